"""The sentences of a card, each by the facts that it is made of."""

import math

import pytest
from msgspec.structs import replace

from supervise.core.model import Payload, PlannedStep
from supervise.report import (
    Action,
    Approval,
    Condition,
    Move,
    Status,
    action_texts,
    change_text,
    describe_condition,
    describe_rate_left,
    describe_response,
    next_step,
)


def move(level: float, peak: float, ratio: float | None) -> Move:
    steps = dict.fromkeys(("peak_step", "first_step", "earliest_step", "latest_step"), 9)
    return Move(metric="update_norm", level=level, peak=peak, ratio=ratio, **steps)


@pytest.mark.parametrize(
    ("level", "peak", "ratio", "text"),
    [
        (0.1, 2.8, 28.0, "update norm ×28"),
        (0.1, math.inf, None, "update norm NaN or Inf"),
        (0.0, 2.0, None, "update norm 0 → 2"),
        (-0.5, 2.0, -4.0, "update norm -0.5 → 2"),
        (2.0, 0.001, 0.0005, "update norm fell to nearly 0"),
        (2.0, 0.5, 0.25, "update norm fell to 25 %"),
    ],
)
def test_how_far_a_signal_went_is_told_by_its_healthy_value(level, peak, ratio, text):
    assert change_text(move(level, peak, ratio)) == text


def condition(**facts) -> Condition:
    plain = {"detector": "d", "rule": "a.b", "severity": "SEV1", "step": 9, "is_breach": True}
    plain |= {"code": "BREACH", "metric": "train_loss_raw", "value": 9.0, "measure": "value"}
    plain |= {"measured": None, "limit": None, "baseline": None, "signal": None}
    plain |= {"nonfinite": (), "module": "", "text": "no step for 90 s", "past": None}
    return Condition(**plain | facts)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "loss 9"),
        ({"limit": 5.0}, "loss 9 (limit 5)"),
        ({"limit": 0.0, "value": 0.0}, "loss 0 (must be above 0)"),
        ({"limit": 5.0, "baseline": 2.5}, "loss 9 (before 2.5)"),
        ({"module": "head.3"}, "loss 9 on head.3"),
        (
            {"nonfinite": ["train_loss_raw", "update_norm"]},
            "loss is NaN or Inf, update norm is NaN or Inf",
        ),
        ({"signal": "step", "metric": None}, "no step for 90 s; last step 9"),
        ({"metric": None}, ""),
        ({"measure": "difference", "limit": 8.0}, "loss 9 (must be 8)"),
        ({"measure": "sum", "measured": -3.0}, "loss 9 (low for too long)"),
        ({"measure": "sum", "measured": 3.0}, "loss 9 (high for too long)"),
    ],
)
def test_a_reading_in_breach_is_one_clause(facts, text):
    assert describe_condition(condition(**facts)) == text


@pytest.mark.parametrize(
    ("opened_at", "text"), [(9, "loss 9 (limit 5)"), (7, "loss 9 at step 9 (limit 5)")]
)
def test_a_reading_of_after_the_opening_names_its_step(opened_at, text):
    assert describe_condition(condition(limit=5.0), opened_at=opened_at) == text


def action(verb: str, *, ok: bool | None = True, **facts) -> Action:
    plain = {"record": 3, "step": 9, "attempt": 0, "wall": None, "id": verb, "runbook": "r"}
    plain |= {"touches_job": True, "is_undo": False, "outcome": "", "took_s": 1.0}
    plain |= {"args": Payload({}), "result": Payload({}), "outcome_record": 4, "error": ""}
    facts = {k: Payload(v) if isinstance(v, dict) else v for k, v in facts.items()}
    return Action(verb=verb, ok=ok, **plain | facts)


CHANGED = {"result": {"step": 5, "from_step": 9}}


@pytest.mark.parametrize(
    ("actions", "texts"),
    [
        ([action("pause", result={"paused_step": 9})], ["paused since step 9"]),
        ([action("pause"), action("resume", result={"held_s": 2.0})], ["paused 2.0 s"]),
        ([action("pause"), action("resume")], ["paused and resumed"]),
        ([action("snapshot")], ["evidence saved"]),
        (
            [action("snapshot", result={"missing": ["a", "b", "c"]})],
            ["evidence saved; missing: a, b and 1 more"],
        ),
        ([action("savepoint")], ["savepoint written"]),
        (
            [action("rollback", **CHANGED)],
            [
                "weights of step 5 restored at step 9 (steps 6 to 9 undone); training goes on at "
                "step 10"
            ],
        ),
        (
            [action("relaunch", args={"step": 4})],
            ["started again from the checkpoint of step 4"],
        ),
        (
            [action("relaunch", args={"step": 4}, result={"resumed": False})],
            ["started again, NOT from the checkpoint of step 4: it trains from its own start"],
        ),
        (
            [action("relaunch", args={"step": 4}, result={"start_ended": "ended with code 1"})],
            [
                "started again from the checkpoint of step 4; that start ended with code 1 before "
                "its first step"
            ],
        ),
        ([action("stop")], ["job stopped"]),
        (
            [action("lr_scale", args={"value": 0.5, "rewarm_steps": 40}, result={"ack_step": 9})],
            ["learning rate × 0.5 from step 10 on, back to × 1 over 40 steps"],
        ),
        (
            [action("hold_rate", result={"rate_limit": 0.01, "ack_step": 9})],
            ["learning rate capped at 0.01 from step 10 on"],
        ),
        (
            [action("hold_rate", args={"limit": 0.01, "harmful": 0.3})],
            ["learning rate capped at 0.01 (0.3 did the harm)"],
        ),
        ([action("hold_rate", args={"lift": True})], ["learning-rate cap lifted"]),
        ([action("hold_rate")], ["learning rate capped"]),
        ([action("skip_step", args={"count": 3})], ["3 updates skipped"]),
        ([action("quarantine", args={"add": [{"name": "a.tar"}]})], ["left out a.tar"]),
        ([action("check_weights")], ["weights tested, without a result"]),
        ([action("profile")], ["profile taken"]),
        ([action("stop", is_undo=True)], ["undo: job stopped"]),
        (
            [action("hold_rate", ok=False, error="no rank answered")],
            ["hold rate FAILED: no rank answered"],
        ),
        ([action("rollback", ok=None)], ["rollback: no answer, so its effect is unknown"]),
        ([action("rollback", ok=None, outcome_record=None)], ["rollback under way"]),
        ([action("notify")], []),
    ],
)
def test_an_action_is_told_by_its_observed_effect(actions, texts):
    told = action_texts(actions, newest=math.inf, has_new_batches=False)

    assert [text for _, text in told] == texts


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "nothing: the policy has no action for this"),
        (
            {"opened_by_rule": False},
            "nothing: the policy has no job.on_crash, so the job is not started again",
        ),
        (
            {"unprotected": True},
            "nothing: the record of the run could not be written, and without it nothing is done",
        ),
        ({"mode": "observe"}, "nothing: mode observe"),
        ({"skipped": [7]}, "skipped the update of step 7"),
        ({"skipped": [7, 9]}, "skipped the updates of steps 7 and 9"),
        ({"skipped": [7, 8, 9]}, "skipped the updates of steps 7 to 9"),
        ({"skipped": [7, 8, 12]}, "skipped 3 updates of steps 7 to 12"),
        (
            {"cause": "a.tar", "refusals": [(4, "back cannot run: a.tar")]},
            "back cannot run: the data changed",
        ),
    ],
)
def test_what_was_done_about_an_incident_is_told_with_its_reason(facts, text):
    plain = {"status": Status.OPEN, "mode": "enforce", "skipped": [], "approval": None}
    plain |= {"suppressed": [], "refusals": [], "unprotected": False, "opened_by_rule": True}

    assert describe_response([], newest=9, **plain | facts) == text


def test_a_request_says_how_far_above_its_level_it_leaves_a_rate():
    """Half of thirty times the schedule's rate is fifteen times that."""
    plan = [PlannedStep("lr_scale", Payload({"value": 0.5, "rewarm_steps": 200}))]
    terms = {"timeout_s": 60.0, "on_timeout": "deny", "answer": None, "answer_text": ""}
    moment = {"record": 1, "step": 165, "attempt": 0, "wall": None}
    asked = Approval(id="ask-1", runbook="soften", plan=plan, **terms, **moment)
    rate = move(0.002, 0.06, 30.0)

    text = describe_rate_left(asked, rate, 0.06)
    assert text == "the learning rate would still be 0.03, ×15 of that before step 9"
    assert describe_rate_left(asked, rate, 0.004) == ""
    assert describe_rate_left(replace(asked, plan=[]), rate, 0.06) == ""
    assert describe_rate_left(asked, None, 0.06) == ""


@pytest.mark.parametrize(
    ("timeout_s", "wall", "until"),
    [
        (86400.0, "2026-11-30T00:51:30.000Z", "24 h (by 2026-12-01 00:51:30 UTC)"),
        (900.0, "2026-11-30T00:51:30.000Z", "15 min (by 01:06:30 UTC)"),
        (90.0, "2026-11-30T23:59:00.000Z", "90 s (by 2026-12-01 00:00:30 UTC)"),
        (5400.0, None, "90 min"),
    ],
)
def test_a_request_says_how_long_it_waits_and_how_it_is_answered(timeout_s, wall, until):
    request = Approval(
        step=9,
        wall=wall,
        record=1,
        attempt=0,
        id="ask-1",
        runbook="soften",
        plan=(),
        timeout_s=timeout_s,
        on_timeout="deny",
        answer=None,
        answer_text="",
        args_sha256="sha256:0123456789abcdef",
    )
    approve, deny, silence = next_step(Status.WAITING, (), None, request)

    assert approve.command == "supervise approve --sha 0123456789ab RUN ask-1"
    assert deny.command == "supervise deny RUN ask-1"
    assert silence.text == f"without an answer within {until} the answer is deny"
