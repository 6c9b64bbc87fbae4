"""The four questions in the engine: asked of every incident, kept over rollbacks."""

from __future__ import annotations

import math

import pytest

from supervise.actions import Rollback
from supervise.core.model import Budget, Ladder, Planned
from supervise.detectors import Descent, Nonfinite

from .conftest import AMPLE, Story, Touch, Verify, above, messages, one_rule, rules_of, runbook_of

FULL = (
    "train_loss_raw",
    "grad_global_norm",
    "update_norm",
    "learning_rate",
    "learning_rate_scheduled",
    "val_loss",
    "batch_token_entropy",
    "update_skipped",
)


def closed(story):
    return story.kinds("incident", "closed")[-1]


def row(loss=2.0, **others):
    made = {"train_loss_raw": loss, "grad_global_norm": 1.0, "update_norm": 0.1}
    made |= {"learning_rate": 1e-3, "learning_rate_scheduled": 1e-3, "batch_token_entropy": 3.0}
    return made | others


def evaluated(count, loss=2.0, value=2.2, **others):
    """Rows of which each 25th has an evaluation."""
    rows = [row(loss, **others) for _ in range(count)]
    return [each | {"val_loss": value} if i % 25 == 0 else each for i, each in enumerate(rows)]


def watch_only(tell, **changes):
    return tell(mode="observe", names=FULL, **changes)


def test_trouble_without_a_loss_has_no_class(tell):
    story = tell(names=("grad_global_norm",), **one_rule(above("grad_global_norm", 9.0), "SEV2"))
    story.rows(*[{"grad_global_norm": 1.0}] * 50, {"grad_global_norm": 99.0})
    story.rows(*[{"grad_global_norm": 1.0}] * 30)

    assert "spike" not in closed(story).data


def test_a_quiet_incident_waits_for_its_loss_and_not_for_ever(tell):
    """The rule clears at 4 while the loss was 2: closed 350 frames after it was opened."""
    story = watch_only(tell)
    story.rows(*[row(2.0)] * 300, *[row(8.0)] * 3, *[row(4.0)] * 340)
    assert not story.kinds("incident", "closed")

    story.rows(*[row(4.0)] * 20)
    (told,) = story.kinds("incident", "classified")

    assert told.step == 300 + 350
    assert "no evaluation to compare" in told.reason
    assert closed(story).data["spike"]["class"] == told.data["spike"]["class"] == "undecided"


@pytest.mark.parametrize(
    ("loss", "update", "entropy", "value", "kind"),
    [
        (4.0, 0.1, 3.0, 4.2, "new worse plateau"),
        (4.0, 0.5, 3.0, 4.2, "structural instability"),
        (4.0, 0.1, 5.4, 4.2, "data event"),
        (4.0, 0.1, 3.0, 2.2, "logging artefact or data order"),
    ],
)
def test_the_metrics_decide_the_class(tell, loss, update, entropy, value, kind):
    story = watch_only(tell)
    story.rows(*evaluated(300), *[row(8.0, batch_token_entropy=entropy)] * 3)
    story.rows(*evaluated(400, loss, value, update_norm=update))
    found = closed(story).data["spike"]

    assert found["class"] == kind
    assert found["questions"]["eval_shifted"]["shift"] == pytest.approx(value - 2.2)
    numbers = found["questions"]["norms_stayed"]["metrics"]["update_norm"]
    assert numbers == pytest.approx({"before": 0.1, "after": update, "limit": 0.15})


@pytest.mark.parametrize(
    ("counts", "kind"), [((64.0,), "batch size change"), ((64.0, 512.0), "structural instability")]
)
def test_a_smaller_batch_is_one_that_stays(tell, counts, kind):
    """The norms of noisier updates are no matter of the architecture; an epoch's end is no cut."""
    story = tell(mode="observe", names=(*FULL, "tokens_per_update"))
    story.rows(*[row(2.0, tokens_per_update=512.0)] * 300)
    late = [row(4.0, update_norm=0.5, tokens_per_update=counts[-1])] * 400
    story.rows(*[row(8.0, tokens_per_update=counts[0])] * 3, *late)
    found = closed(story).data["spike"]

    assert found["class"] == kind
    assert "target tokens per update 64, 512 before" in found["questions"]["else_happened"]["text"]


def test_a_loss_that_stays_nan_is_not_contained(tell):
    """A finite one shows that the weights are finite, however many batches were bad before."""
    story = watch_only(tell, **one_rule(Nonfinite(("train_loss_raw",)), "SEV2"))
    bad = row(math.nan, grad_global_norm=math.nan, update_norm=0.0, update_skipped=1.0)
    story.rows(*[row(2.0)] * 100, bad, *[row(2.0)] * 60)
    assert closed(story).data["spike"]["class"] == "contained numeric fault"
    story.rows(bad, row(2.0), bad, *[row(2.0)] * 60)
    assert closed(story).data["spike"]["class"] == "contained numeric fault"
    story.rows(*[bad] * 400)

    (found,) = story.kinds("incident", "classified")
    assert found.data["spike"]["class"] == "numeric fault"


@pytest.mark.parametrize(
    ("severity", "fall", "message"),
    [("SEV2", 0.0, "INFO"), ("SEV2", 0.01, "INFO"), ("SEV1", 0.0, "SEV1"), ("SEV1", 0.01, "SEV1")],
)
def test_of_what_can_wait_undecided_is_no_alarm(tell, severity, fall, message):
    """A policy gradient; and a loss that was learned and is up for good, as was reported."""
    detectors = {"high": above("train_loss_raw", 7.0), "fell": Descent("train_loss_raw")}
    story = watch_only(tell, **rules_of(detectors, ("high", severity)))
    calm = [2.0 + fall * max(0, 200 - i) + 0.02 * (i % 3) for i in range(300)]
    story.rows(*map(row, calm), *[row(8.0 + 0.02 * (i % 3)) for i in range(400)])

    (notice,) = (m for m in messages(story) if m["form"] == "Diagnosed")
    assert notice["title"] == "inc-1: diagnosis: undecided"
    assert notice["severity"] == message


@pytest.mark.parametrize(
    ("value", "update", "entropy", "message"),
    [
        (2.2, 0.1, 3.0, "INFO"),
        (4.2, 0.1, 3.0, "SEV2"),
        (2.2, 0.5, 3.0, "SEV2"),
        (2.2, 0.01, 3.0, "SEV2"),
        (2.2, 0.1, 5.4, "SEV2"),
    ],
)
def test_a_loss_that_is_higher_for_a_term_is_reported_once(tell, value, update, entropy, message):
    """Its norms and evaluations are as before, and nothing else happened."""
    detectors = {"high": above("train_loss_raw", 3.0)}
    story = watch_only(tell, **rules_of(detectors, ("high", "SEV2")))
    story.rows(*evaluated(300), *[row(4.0, batch_token_entropy=entropy)] * 3)
    story.rows(*evaluated(400, 4.0, value, update_norm=update))

    fires, diagnosed, *_ = messages(story)
    assert (fires["severity"], diagnosed["severity"]) == ("SEV2", message)
    assert value < 4.0 or "nothing to do" not in diagnosed["next"]


def test_question_four_knows_what_happened(tell):
    plan = Planned(290, 310, "new data mix", "down")
    story = watch_only(tell, planned=(plan,))
    story.rows(*[row(2.0)] * 200)
    story.notice("collector-off", "the optimizer collector is off")
    story.rows(*[row(2.0)] * 95)
    story.say("note", "ann")
    story.notice("drill", "drill lr_spike")
    story.rows(*[row(2.0)] * 5, row(8.0, learning_rate=3e-2), row(8.0, update_skipped=1.0))
    story.rows(*[row(2.0, learning_rate=3e-2)] * 60)
    events = closed(story).data["spike"]["questions"]["else_happened"]["events"]

    kinds = [event["kind"] for event in events]
    assert kinds == ["planned", "operator", "drill", "rate", "skipped"]
    assert events[3]["text"] == "learning rate went from 0.001 to 0.03"


def test_a_rollback_asks_anew_and_keeps_what_was_before(tell):
    """Its frames are gone, its peak, its band and what happened are not; after is the new run."""
    story = watch_only(tell)
    story.rows(*[row(2.0)] * 300, row(8.0, learning_rate=1.0), row(9.0, learning_rate=1.0))
    story.attempt, story.step = 1, 249
    story.rows(*[row(2.0)] * 80)
    found = closed(story).data["spike"]
    first = found["questions"]["rejoined"]

    assert found["class"] == "recoverable spike"
    assert (first["onset"], first["peak"], first["rejoined_step"]) == (300, 9.0, 300)
    assert "after a rollback" in first["text"]
    assert found["questions"]["else_happened"]["events"][0]["kind"] == "rate"


def test_the_level_before_is_that_of_before_the_loss_rose(tell):
    """The rate jumps a step before the loss does, whose onset is known later than the incident."""
    story = tell(
        names=FULL,
        **one_rule(above("learning_rate", 0.01), "SEV1", "mend"),
        runbooks={"mend": runbook_of("mend", Rollback(), Verify(within=60, clear_for=10))},
        budgets={"rollback": Budget(2)},
        answer=lambda verb: None,
    )
    calm = [*[2.4] * 4, *[2.0] * 4] * 20
    story.rows(*map(row, calm), row(2.0, learning_rate=3e-2), *[row(6.0)] * 3)
    assert story.state.incident.case.loss_before == pytest.approx(2.2)
    story.rows(*[row(6.0)] * 4)
    assert story.state.incident.case.loss_before == pytest.approx(2.0)


@pytest.mark.parametrize("by_hand", [False, True], ids=["policy", "command"])
@pytest.mark.parametrize(("way", "mutes"), [("up", True), ("either", True), ("down", False)])
def test_a_planned_rise_mutes_what_it_explains_while_it_lasts(tell, way, mutes, by_hand):
    """SEV1 on the loss is audited as suppressed, and speaks after the plan; SEV0 acts."""
    plan = Planned(50, 80, "new data mix", way)
    story = tell(planned=() if by_hand else (plan,), healthy=50)
    if by_hand:
        story.say("plan", **{"from": 50, "to": 80, "what": plan.what, "expect": way})
    story.frames(8.0, times=31)
    assert bool(story.actions()) is not mutes
    if not mutes:
        return
    assert [d.data["suppressed_by"] for d in story.kinds("suppressed")] == ["planned:new data mix"]
    assert story.state.incident is None
    worse = Story(story.policy)
    worse.frames(2.0, times=50)
    worse.frames(99.0)
    assert worse.actions() != []
    story.frames(8.0)
    assert story.state.incident is not None and story.actions() != []


def test_a_plan_does_not_hide_what_it_cannot_move(tell):
    rule = one_rule(above("batch_token_entropy", 5.0), "SEV1")
    story = watch_only(tell, **rule, planned=(Planned(0, 1000, "new data mix", "either"),))
    story.rows(*[row(2.0)] * 50, row(2.0, batch_token_entropy=6.0))

    assert story.state.incident is not None


def test_structural_at_the_end_of_the_ladder_holds_by_itself(tell):
    story = tell(
        names=FULL,
        **one_rule(above("train_loss_raw", 5.0), "SEV1", "mend"),
        runbooks={"mend": runbook_of("mend", Rollback(), Verify())},
        ladder=Ladder(("mend", "hold")),
        budgets={"rollback": Budget(2)},
    )
    story.notice("rollback-unavailable", "the state is too large")
    story.rows(*evaluated(300), *evaluated(400, 8.0, 9.0, update_norm=0.5))

    assert story.actions() == []
    assert story.state.machine == "holding"
    held = story.kinds("incident", "held")[0]
    assert held.step == 300 + 350
    assert held.data["spike"]["class"] == "structural instability"


def scheduled(tell, **changes):
    """A run of 300 steps with a rule on its loss, and one on its rate that only tells."""
    detectors = {"high": above("train_loss_raw", 5.0), "lr": above("learning_rate", 5e-3)}
    story = tell(
        **rules_of(detectors, ("high", "SEV1", "mend"), ("lr", "SEV2")),
        names=FULL,
        runbooks={"mend": runbook_of("mend", Touch(), Verify())},
        ladder=Ladder(("mend", "hold")),
        budgets=AMPLE,
        **changes,
    )
    story.rows(*evaluated(300))
    return story


def jumped(loss, asked=0.1, update=9.0):
    return row(loss, learning_rate=0.1, learning_rate_scheduled=asked, update_norm=update)


def test_what_outlives_the_ladder_behind_a_jump_of_the_jobs_own_rate_is_its_schedule(tell):
    """The rate is told first, the loss follows; the hold says what is to be mended."""
    begun = scheduled(tell)
    begun.rows(jumped(2.0, update=0.1), *[jumped(8.0)] * 60)

    assert begun.kinds("incident", "held")[0].data["spike"]["class"] == "learning rate jump"
    cause = "the job's own learning rate went from 0.001 to 0.1 (step 300)"
    assert cause in messages(begun)[-1]["verdict"]
    begun.say("release")
    assert closed(begun).data["spike"]["class"] == "learning rate jump"


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (1e-3, "structural instability"),  # somebody else did it: a drill, or an action of ours
        (1.9e-3, "structural instability"),  # too little to explain it
        (2.1e-3, "learning rate jump"),
    ],
)
def test_only_a_rate_that_the_job_asked_for_and_that_jumped_is_its_schedule(tell, asked, kind):
    begun = scheduled(tell)
    begun.rows(*[jumped(8.0, asked)] * 60)

    assert begun.kinds("incident", "held")[0].data["spike"]["class"] == kind


@pytest.mark.parametrize("loss", [4.0, 2.0])  # the loss is back, the large updates are not
def test_a_jump_of_the_schedule_needs_no_evaluation_to_be_classified(tell, loss):
    story = scheduled(tell, mode="observe")
    story.rows(*[jumped(8.0)] * 3, *[jumped(loss)] * 400)
    assert story.kinds("incident", "classified")[0].data["spike"]["class"] == "learning rate jump"
    story.rows(*[jumped(loss)] * 500, *[row(loss, update_norm=9.0)] * 21)

    assert closed(story).data["spike"]["class"] == "learning rate jump"
