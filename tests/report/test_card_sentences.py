"""The sentences of a card, each by the facts that it is made of."""

import math

import pytest
from msgspec.structs import replace

from supervise.core.model import (
    ContextEvent,
    ElseHappened,
    EvalShifted,
    Failure,
    IncidentOpened,
    NormChange,
    NormsStayed,
    Payload,
    PlannedStep,
    Questions,
    Rejoined,
    SpikeClass,
    Verdict,
)
from supervise.report import (
    Action,
    Approval,
    Candidate,
    Check,
    Condition,
    Estimate,
    Move,
    Status,
    UnchangedArea,
    action_texts,
    change_text,
    data_change,
    describe_cause,
    describe_condition,
    describe_cost,
    describe_probation,
    describe_proof,
    describe_rate_left,
    describe_response,
    estimate_unaided_cost,
    next_step,
    title_trigger,
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
                "savepoint of step 5 restored at step 9 (steps 6 to 9 undone); training goes on at "
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
        ({"hold": "back was tried before"}, "nothing: back was tried before"),
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


# ── what it cost ──────────────────────────────────────────────────────────────────────────────────

AGAIN = action("relaunch", args={"step": 4})  # at step 9
BACK = action("rollback", result={"step": 5, "from_step": 9})
SKIP = action("skip_step", args={"count": 3})
UNAIDED = Estimate("without it every further step would have been lost", "NaN does not go away")


@pytest.mark.parametrize(
    ("actions", "facts", "text"),
    [
        ([], {"acted": False}, "nothing: the job was not changed"),
        ([], {"acted": False, "standing": "no step lost"}, "no step lost"),
        (
            [BACK],
            {"status": Status.HELD, "standing": "3 steps trained on NaN or Inf from step 9 on"},
            "the progress of 4 steps lost; 3 steps trained on NaN or Inf from step 9 on",
        ),
        ([BACK], {"standing": "3 steps trained on NaN"}, "the progress of 4 steps lost"),
        ([], {"acted": None}, "unknown: an action has no outcome on record"),
        ([], {"acted": True}, "no steps repeated"),
        ([], {"acted": False, "skipped": 1}, "1 update skipped"),
        ([], {"acted": False, "lost_s": 12.0}, "the steps took 12 s longer in all"),
        ([], {"acted": False, "lost_s": 0.4}, "nothing: the job was not changed"),
        ([], {"acted": True, "ended_at": 40}, "the run ended at step 40"),
        ([], {"acted": True, "ended_at": -1}, "the run ended"),
        ([BACK], {}, "the progress of 4 steps lost"),
        ([action("rollback", result={"step": 5})], {}, "the progress of 4 steps lost"),
        ([action("rollback", ok=False, result={"step": 5})], {}, "no steps repeated"),
        ([AGAIN], {}, "5 steps repeated; 1 restart"),
        ([AGAIN, AGAIN], {}, "10 steps repeated; 2 restarts"),
        ([AGAIN], {"spent": {"restart": "1/2"}}, "5 steps repeated; 1 of 2 restarts used"),
        ([AGAIN], {"status": Status.STOPPED}, "5 steps undone; 1 restart"),
        ([AGAIN], {"status": Status.JOB_ENDED}, "5 steps undone; 1 restart"),
        ([AGAIN], {"status": Status.ASKED}, "5 steps undone; 1 restart"),
        (
            [action("relaunch", args={"step": 4}, result={"start_ended": "ended with code 1"})],
            {},
            "1 restart",
        ),
        ([action("resume", result={"held_s": 2.0})], {}, "2.0 s paused"),
        ([action("resume", result={"held_s": 0.04})], {}, "no steps repeated"),
        ([SKIP], {"skipped": 1}, "4 updates skipped"),
        (
            [BACK],
            {"spent": {"lr_scale": "1/1"}},
            "the progress of 4 steps lost; 1 of 1 rate change used",
        ),
        (
            [BACK],
            {"spent": {"rollback": "1/2", "all": "0/9"}},
            "the progress of 4 steps lost; 1 of 2 rollbacks used",
        ),
        (
            [BACK],
            {"unaided": UNAIDED},
            "the progress of 4 steps lost; without it every further step would have been lost",
        ),
    ],
)
def test_a_cost_is_counted_from_the_outcomes_of_the_actions(actions, facts, text):
    plain = {"status": Status.RECOVERED, "acted": True}

    assert describe_cost(actions, **plain | facts).text == text


def test_the_numbers_of_a_cost_stand_beside_its_text():
    cost = describe_cost(
        [AGAIN, BACK, SKIP, action("resume", result={"held_s": 2.0})],
        status=Status.RECOVERED,
        acted=True,
        skipped=1,
        budgets={"restart": "1/2"},
    )

    assert (cost.steps_repeated, cost.steps_lost, cost.relaunches) == (5, 4, 1)
    assert (cost.paused_s, cost.skipped, cost.budgets) == (2.0, 4, {"restart": "1/2"})


# ── what nothing would have cost ──────────────────────────────────────────────────────────────────

BROKEN, LARGE = move(2.0, math.nan, None), move(2.0, 9.0, 4.5)
CRASH = Failure("exception", "OSError", "x")
LOST_AT_SKIP = (
    "had the update not been skipped, the weights would have been lost at step 7",
    "an update with NaN or Inf leaves no weight as it was",
)
LOST_AT_SKIPS = (LOST_AT_SKIP[0].replace("update", "updates"), LOST_AT_SKIP[1])
ENDS_THERE = "without it the run would have ended there", "the process had ended"
LASTS = "without it every further step would have been lost", "NaN or Inf does not go away"


@pytest.mark.parametrize(
    ("status", "skipped", "moves", "actions", "failure", "estimate"),
    [
        (Status.CLEARED, [7], [BROKEN], [], None, LOST_AT_SKIP),
        (Status.CLEARED, [7, 8], [LARGE, BROKEN], [], None, LOST_AT_SKIPS),
        (Status.CLEARED, [7], [LARGE], [], None, None),
        (Status.RECOVERED, [7], [BROKEN], [BACK], None, LASTS),  # a later one was applied
        (Status.ACTING, [7], [BROKEN], [action("pause")], None, None),
        (Status.RECOVERED, [], [], [AGAIN], CRASH, ENDS_THERE),
        (Status.DIFFERS, [], [], [AGAIN], CRASH, ENDS_THERE),
        (Status.WATCHING, [], [], [AGAIN], CRASH, ENDS_THERE),
        (Status.HELD, [], [], [AGAIN], CRASH, None),
        (Status.RECOVERED, [], [], [action("relaunch", ok=False)], CRASH, None),
        (Status.RECOVERED, [], [BROKEN], [BACK], None, LASTS),
        (Status.RECOVERED, [], [BROKEN], [AGAIN], None, LASTS),
        (Status.RECOVERED, [], [BROKEN], [SKIP], None, None),
        (Status.RECOVERED, [], [LARGE], [BACK], None, None),
        (Status.HELD, [], [BROKEN], [BACK], None, None),
    ],
)
def test_what_nothing_would_have_cost_is_told_where_a_record_shows_it(
    status, skipped, moves, actions, failure, estimate
):
    told = estimate_unaided_cost(status, skipped, moves, actions, failure)

    assert (None if told is None else (told.text, told.reason)) == estimate


# ── what shows that it is over ────────────────────────────────────────────────────────────────────


def check(kind: str, text: str) -> Check:
    return Check(record=5, step=12, attempt=0, wall=None, kind=kind, text=text)


def verdict(back: str = "yes", *, norms: dict | None = None, **facts) -> Verdict:
    """Return a verdict on a loss, with norms as `(before, after, limit)`."""
    changes = {name: NormChange(*numbers) for name, numbers in (norms or {}).items()}
    no_objective = facts.pop("no_objective", False)
    return Verdict(
        kind=SpikeClass.RECOVERABLE,
        no_objective=no_objective,
        questions=Questions(
            rejoined=Rejoined(answer=back, text="", **{"excursion": True} | facts),
            eval_shifted=EvalShifted(answer="unknown", text=""),
            norms_stayed=NormsStayed(
                answer="yes" if norms else "unknown", text="", metrics=changes
            ),
            else_happened=ElseHappened(answer="no", text="", events=()),
        ),
    )


def proof(**facts):
    plain = {"status": Status.RECOVERED, "end": "", "hold": "", "verification": ()}
    plain |= {"diagnosis": None, "actions": (), "loss_left": True, "skipped": (), "good": None}
    return describe_proof(**plain | facts)


PASSED = check("passed", "20 steps in a row without trouble")
NORMS = {"grad_global_norm": (1.0, 1.1, 2.0)}


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status.OPEN, "none yet: it is not over"),
        (Status.ACTING, "not verified: the actions are under way"),
        (Status.WATCHING, "not yet: watched for a relapse"),
        (Status.WAITING, "not verified: nothing was done yet"),
        (Status.HELD, "not recovered: HOLD"),
        (Status.CLEARED, "its rules cleared; nothing was done, so nothing was verified"),
        (Status.NOT_RECOVERED, "not verified: its rules took the new level as their baseline"),
        (
            Status.WITHDRAWN,
            "none is needed: the job was not changed, and the reason to change it is over",
        ),
        (
            Status.RELEASED,
            "not verified: a person ended the hold; nothing was verified after it",
        ),
        (
            Status.SUPERSEDED,
            "not verified: an incident of the training began before it was over",
        ),
        (
            Status.SESSION_ENDED,
            "not verified: the training ended before anything could be verified",
        ),
        (Status.STOPPED, "none: supervise stopped the job, which is down"),
        (Status.JOB_ENDED, "END"),
        (Status.ASKED, "END, as asked"),
        (Status.UNRECOVERED, "END"),
        (Status.DOWN, "none: the job is down"),
        (Status.RECOVERED, "not verified: no verification is on record"),
        (Status.DIFFERS, "END"),
        (Status.DONE, "none: nothing was wrong before it; END"),
    ],
)
def test_what_was_not_verified_says_so_by_its_status(status, text):
    assert proof(status=status, end="END", hold="HOLD").text == text
    assert not proof(status=status, end="END", hold="HOLD").verified


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            {"verification": [PASSED], "end": "no relapse in 200 steps"},
            "20 steps in a row without trouble; no relapse in 200 steps",
        ),
        (
            {"diagnosis": verdict()},
            "loss back in its normal range; no relapse; norms: unknown",
        ),
        (
            {"diagnosis": verdict(rejoined_step=12, norms=NORMS)},
            "loss back in its normal range at step 12; no relapse; gradient norm as before",
        ),
        (
            {"diagnosis": verdict(norms=NORMS)},
            "loss back in its normal range; no relapse; gradient norm as before",
        ),
        (
            {"diagnosis": verdict(norms=NORMS, rejoined_step=12), "loss_left": False},
            "the loss stayed in its normal range; no relapse; gradient norm as before",
        ),
        (
            {"diagnosis": verdict(norms=NORMS, rejoined_step=12, is_sum=True)},
            "the loss of as many tokens stayed in its normal range; no relapse; "
            "gradient norm as before",
        ),
        (
            {"diagnosis": verdict("no", norms=NORMS), "height": " (3.4, 2.5 before)"},
            "the loss did NOT come back into its normal range (3.4, 2.5 before); no relapse; "
            "gradient norm as before",
        ),
        (
            {"diagnosis": verdict("no", norms=NORMS, excursion=False)},
            "20 steps in a row without trouble; no relapse; gradient norm as before",
        ),
        (
            {"diagnosis": verdict(norms={"grad_global_norm": (1.0, 3.0, 2.0)})},
            "loss back in its normal range; no relapse; norms are UP (gradient norm ×3 of just "
            "before)",
        ),
        (
            {"diagnosis": verdict(norms={"grad_global_norm": (0.0, 3.0, 2.0)})},
            "loss back in its normal range; no relapse; norms are UP (gradient norm 0 to 3 of just "
            "before)",
        ),
        (
            {"diagnosis": verdict(norms={"grad_global_norm": (9.0, 1.0, 18.0)})},
            "loss back in its normal range; no relapse",
        ),
        (
            {"diagnosis": verdict(), "slowness": "a step takes 0.1 s, as before"},
            "a step takes 0.1 s, as before; no relapse",
        ),
        (
            {
                "status": Status.DIFFERS,
                "diagnosis": verdict(norms=NORMS),
                "verification": [PASSED, check("differs", "other batches"), check("differs", "x")],
            },
            "loss back in its normal range; no relapse; but other batches; x",
        ),
    ],
)
def test_a_recovery_is_shown_by_the_loss_its_end_and_the_norms(facts, text):
    shown = proof(**{"verification": [PASSED], "end": "no relapse"} | facts)

    assert shown.text == text
    assert shown.verified == ("status" not in facts)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            {"status": Status.WATCHING, "verification": [PASSED]},
            "not yet: 20 steps in a row without trouble",
        ),
        (
            {"status": Status.CLEARED, "skipped": [7]},
            "its rules cleared; the skipped update never reached the weights",
        ),
        (
            {"status": Status.CLEARED, "skipped": [7, 8]},
            "its rules cleared; the skipped updates never reached the weights",
        ),
        (
            {"status": Status.CLEARED, "actions": [BACK]},
            "its rules cleared; that the actions caused it was not verified",
        ),
        (
            {"status": Status.CLEARED, "diagnosis": verdict(rejoined_step=12, norms=NORMS)},
            "loss back in its normal range at step 12; gradient norm as before; its rules cleared; "
            "nothing was done, so nothing was verified",
        ),
        (
            {"status": Status.JOB_ENDED, "good": (7, 20)},
            "recovered so far: 7 good steps of 20; END",
        ),
        (
            {"status": Status.JOB_ENDED, "good": (7, 20), "verification": [check("differs", "x")]},
            "7 good steps of 20; but x; END",
        ),
        (
            {"status": Status.ASKED, "diagnosis": verdict("no", norms=NORMS)},
            "the loss did NOT come back into its normal range; END, as asked",
        ),
        (
            {"status": Status.JOB_ENDED, "diagnosis": verdict("no", no_objective=True)},
            "END",
        ),
        (
            {"status": Status.UNRECOVERED, "diagnosis": verdict("no", norms=NORMS)},
            "the loss did NOT come back into its normal range; END",
        ),
    ],
)
def test_what_is_known_without_a_verification_stands_before_its_end(facts, text):
    assert proof(**{"end": "END"} | facts).text == text


def test_the_numbers_of_a_proof_stand_beside_its_text():
    shown = proof(
        verification=[PASSED, check("differs", "other batches")],
        diagnosis=verdict(rejoined_step=12),
        good=(7, 20),
    )

    assert (shown.rejoined_step, shown.good_steps, shown.required_steps) == (12, 7, 20)
    assert shown.remaining == ["other batches"]


@pytest.mark.parametrize(
    ("verification", "text"),
    [
        ([], "watched for a relapse"),
        ([check("failed", "no")], "watched for a relapse"),
        ([PASSED, check("passed", "newer")], "newer"),
    ],
)
def test_a_probation_is_told_by_its_newest_check(verification, text):
    assert describe_probation(verification) == text


# ── the cause ─────────────────────────────────────────────────────────────────────────────────────


def moved(metric: str, step: int, *, within: int = 0) -> Move:
    at = {"peak_step": step, "first_step": step}
    at |= {"earliest_step": step - within, "latest_step": step + within}
    return Move(metric=metric, level=1.0, peak=9.0, ratio=9.0, **at)


def candidate(kind: str, text: str) -> Candidate:
    return Candidate(kind=kind, text=text, step=9, move=None)


def nearby(*events: ContextEvent, kind: SpikeClass = SpikeClass.RECOVERABLE) -> Verdict:
    plain = verdict()
    happened = ElseHappened(answer="yes", text="", events=events)
    return replace(plain, kind=kind, questions=replace(plain.questions, else_happened=happened))


TOGETHER = [moved("grad_global_norm", 9, within=2), moved("train_loss_raw", 10, within=2)]
IN_ORDER = [moved("grad_global_norm", 9), moved("train_loss_raw", 12), moved("update_norm", 12)]
STAYED = [UnchangedArea("attention", ()), UnchangedArea("data", ()), UnchangedArea("ranks", ())]
GAP = ContextEvent(8, "logging", "4 frames were lost")


@pytest.mark.parametrize(
    ("facts", "kind", "text"),
    [
        ({}, "unknown", "unknown: nothing on record explains it"),
        ({"rule": None}, "unknown", "unknown: no process of the job recorded how it ended"),
        (
            {"unchanged": STAYED},
            "unknown",
            "unknown: nothing on record explains it; attention, data and ranks stayed as before",
        ),
        (
            {"unchanged": STAYED[:1]},
            "unknown",
            "unknown: nothing on record explains it; attention stayed as before",
        ),
        (
            {"diagnosis": nearby(GAP, ContextEvent(9, "drill", "a drill"))},
            "unknown",
            "unknown: nothing on record explains it; near it: 4 frames were lost (step 8)",
        ),
        (
            {"moves": TOGETHER},
            "order",
            "unknown: gradient norm and loss moved together, in step 9",
        ),
        (
            {"moves": IN_ORDER},
            "order",
            "unknown: gradient norm moved first (9), then loss and update norm (12)",
        ),
        (
            {"moves": IN_ORDER, "candidates": [candidate("attention", "logits grew")]},
            "order",
            "unknown: gradient norm moved first (9), then loss and update norm (12); near it: "
            "logits grew",
        ),
        (
            {"candidates": [candidate("attention", "logits grew")], "unchanged": STAYED[:2]},
            "unknown",
            "unknown: nothing on record explains it; near it: logits grew; data stayed as before",
        ),
        (
            {"moves": IN_ORDER, "candidates": [candidate("rate", "learning rate ×30")]},
            "order",
            "learning rate ×30; gradient norm moved first (9), then loss and update norm (12)",
        ),
        ({"candidates": [candidate("rate", "learning rate ×30")]}, "order", "learning rate ×30"),
        (
            {"moves": IN_ORDER, "candidates": [candidate("data", "another batch")]},
            "diagnosis",
            "another batch; gradient norm moved (9), then loss and update norm (12)",
        ),
        (
            {"moves": IN_ORDER, "candidates": [candidate("drill", "drill moments")]},
            "drill",
            "drill moments; gradient norm moved first (9), then loss and update norm (12)",
        ),
        (
            {"moves": IN_ORDER, "candidates": [candidate("error", "OSError: x")]},
            "error",
            "OSError: x",
        ),
        (
            {"candidates": [candidate("wiring", "no gradient"), candidate("wiring", "eval mode")]},
            "diagnosis",
            "perhaps the job's wiring: no gradient; eval mode",
        ),
    ],
)
def test_a_cause_is_told_by_its_likeliest_candidate_and_the_order_of_moves(facts, kind, text):
    plain = {"moves": [], "candidates": [], "unchanged": [], "diagnosis": None, "rule": "a.b"}
    facts = plain | facts
    opened = IncidentOpened(
        reason="", rule=facts.pop("rule"), headline="loss 9", runbook="", breach_step=9, band=None
    )
    cause = describe_cause(opened, **facts)

    assert (cause.kind, cause.text) == (kind, text)
    assert cause.is_known == (not text.startswith("unknown"))


@pytest.mark.parametrize(
    ("diagnosis", "kinds", "text"),
    [
        (None, [], ""),
        (nearby(kind=SpikeClass.DATA), [], ""),
        (nearby(kind=SpikeClass.DATA), ["error", "data"], ""),
        (nearby(kind=SpikeClass.DATA), ["data"], "an unusual batch"),
        (nearby(kind=SpikeClass.SCHEDULE), ["rate"], "a learning-rate jump"),
        (nearby(kind=SpikeClass.CUT), ["data"], "a change of the batch size"),
        (nearby(), ["drill", "rate"], "a learning-rate jump"),
        (None, ["data"], ""),
    ],
)
def test_a_title_names_what_an_incident_came_after(diagnosis, kinds, text):
    assert title_trigger(diagnosis, [candidate(kind, "x") for kind in kinds]) == text


def test_how_the_data_changed_is_the_first_event_of_the_data():
    changed, again = ContextEvent(9, "data", "another mix"), ContextEvent(10, "data", "x")

    assert data_change(nearby(GAP, changed, again)) == "another mix"
    assert data_change(nearby(GAP)) == data_change(None) == ""
