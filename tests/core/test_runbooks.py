"""Runbooks: which one goes first, hold and pause in them, and how they are verified."""

from __future__ import annotations

import pytest

from supervise.actions import Hold, HoldRate, LrScale, Pause, Relaunch, Resume, Rollback, Snapshot
from supervise.core import explain_withdrawal
from supervise.core.model import Frame, Ladder

from .conftest import (
    AMPLE,
    Reach,
    Touch,
    Verify,
    above,
    messages,
    one_rule,
    rule_on,
    rules_of,
    runbook_of,
    taken_back,
)

DETECTORS = {"high": above("train_loss_raw", 5.0), "wild": above("grad_global_norm", 9.0)}


def going(tell, ladder=()):
    """`high` runs `back`, which takes the job back when `commit` is called."""
    story = tell(
        **rules_of(DETECTORS, ("high", "SEV1", "back"), ("wild", "SEV0", "back")),
        answer=lambda key: None,
        runbooks={name: runbook_of(name, Touch(), Verify()) for name in ("back", "other")},
        budgets=AMPLE,
        ladder=Ladder(ladder),
        healthy=30,
        then=8.0,
    )
    assert story.actions() == ["inc-1/1/0-touch"]
    return story


def commit(story):
    story.step -= 12
    story.finish("inc-1/1/0-touch", {"attempt": 1, "ack_step": story.step})
    story.attempt = 1


def test_a_frame_from_before_the_rollback_that_is_read_late_is_no_reason(tell):
    """It was in the ring when the outcome came, and it is worse than what was answered."""
    story = going(tell)
    commit(story)
    story.send(Frame(story.at_ns, 0, 0, story.step + 13, (2.0, 10.0)))
    story.frames(2.0, times=8)

    assert story.actions() == ["inc-1/1/0-touch"]
    said = [d.reason for d in story.kinds("suppressed") if d.rule == "wild"]
    assert said == ["wild: in frames from before attempt 1"]
    assert not story.state.incident.deferred.rules


@pytest.mark.parametrize("ladder", [(), ("back", "other", "hold")])
@pytest.mark.parametrize("again", [False, True])
def test_what_is_worse_acts_again_only_when_frames_behind_the_rollback_are_in_breach(
    tell, again, ladder
):
    """It fired in the middle of the action; it need not have cleared in between."""
    story = going(tell, ladder)
    story.frames(2.0, grad=10.0)
    commit(story)
    assert len(story.actions()) == 1
    story.frames(2.0, grad=10.0 if again else 1.0)
    story.frames(2.0, times=6)

    assert len(story.actions()) == (2 if again else 1)
    assert bool(story.kinds("verify", "preempted")) == again


def holding(tell, **changes):
    """A job of 50 steps whose gradient, above 9 then, is answered by snapshot and hold."""
    base = tell().policy
    wrong = rule_on(base.detectors, "wild", "SEV1", "wrong", rule_id="grad")
    books = {**base.runbooks, "wrong": runbook_of("wrong", Snapshot(), Hold())}
    story = tell(rules=(base.rules[0], wrong), runbooks=books, **changes, healthy=50)
    story.frames(2.0, times=5, grad=20.0)
    return story


def test_evidence_that_fails_does_not_keep_it_from_holding(tell):
    story = holding(tell, answer=lambda key: ({}, "no room on the disk"))

    assert story.state.machine == "holding"
    (held,) = story.kinds("incident", "held")
    assert held.reason.startswith("held: wrong: gradient norm 20")
    assert held.reason.endswith("the snapshot failed: no room on the disk")
    assert story.say("release").data["ok"]
    story.frames(2.0, times=30)
    assert story.state.machine == "nominal"


def test_nobody_is_asked_to_hold_and_shadow_only_says_it(tell):
    asked = holding(tell, mode="approve")
    assert asked.state.machine == "holding"
    assert not asked.kinds("approval_requested")

    shadow = holding(tell, mode="shadow")
    assert shadow.state.machine == "suspect"
    (would,) = (d for d in shadow.kinds("suppressed") if "would" in d.data)
    assert [step["verb"] for step in would.data["would"]] == ["snapshot", "hold"]


BACK = {"step": 30, "attempt": 0}


def waiting(tell, verb):
    """The runbook has come to the step `verb`, whose outcome it waits for."""
    steps = (Pause(), Snapshot(), Rollback(at_least=5), Resume(), Verify())
    return tell(
        answer=lambda key: None if key.endswith(verb) else BACK,
        **one_rule(above("train_loss_raw", 5.0), "SEV1", "mend"),
        ladder=Ladder(("mend", "hold")),
        runbooks={"mend": runbook_of("mend", *steps)},
        budgets=AMPLE,
        healthy=50,
        then=8.0,
    )


def end_pause(story):
    data = {"key": "run:inc-1/1/0-pause"}
    story.notice("pause-ended", "nobody renewed the pause", data=data)


@pytest.mark.parametrize("error", [None, "not sent"])
@pytest.mark.parametrize(
    ("verb", "why"), [("snapshot", ""), ("rollback", "the pause that it depends on has ended")]
)
def test_a_runbook_that_relies_on_the_pause_fails(tell, verb, why, error):
    """The step under way comes to its end, no other follows, no resume; the incident is held."""
    story = waiting(tell, verb)
    end_pause(story)
    assert not story.state.job.paused
    assert explain_withdrawal(story.policy, story.state) == why
    asked = story.actions()
    story.finish(asked[-1], BACK, error)

    assert story.actions() == asked and asked[-1].endswith(verb)
    assert story.state.machine == "holding"
    assert "pause ended without a resume" in " ".join(m["title"] for m in messages(story))


def test_a_pause_that_ended_before_its_outcome_came_is_over(tell):
    """The supervisor hung meanwhile. A resume makes sure, and nothing else is done."""
    story = waiting(tell, "pause")
    end_pause(story)
    story.finish(story.actions()[-1], {"paused_step": 50})

    assert [action.rpartition("/")[2] for action in story.actions()] == ["0-pause", "undo-resume"]
    assert story.state.machine == "holding" and not story.state.job.paused


LOSS_AND_GRADIENT = {"huge": above("train_loss_raw", 50.0), "wild": above("grad_global_norm", 9.0)}


def back(tell, severity="SEV2", runbook=None, **more):
    """A SEV0 at step 60 was answered by going back to step 40."""
    books = runbook_of("back", Rollback(rewarm=0), Verify(within=60)), runbook_of("aside")
    huge = rule_on(LOSS_AND_GRADIENT, "huge", "SEV0", "back")
    other = rule_on(LOSS_AND_GRADIENT, "wild", severity, runbook, **more)
    story = tell(
        answer=lambda key: None if "rollback" in key else {},
        detectors=LOSS_AND_GRADIENT,
        rules=(huge, other),
        runbooks={book.name: book for book in books},
        budgets=AMPLE,
        ladder=Ladder(("back", "hold")),
        inhibit=(),
        healthy=60,
        then=99.0,
    )
    taken_back(story, 40)
    return story


def test_a_held_rate_stays_held_under_what_is_tried_next(tell):
    """It is on no level: behind it comes what it names, from whatever level that is."""
    hold = runbook_of("hold-rate", HoldRate(), Verify(within=9), if_it_fails="back")
    story = tell(
        **one_rule(above("train_loss_raw", 50.0), "SEV1", "hold-rate"),
        runbooks={"hold-rate": hold, "back": runbook_of("back", Touch(), Verify(within=9))},
        budgets=AMPLE,
        ladder=Ladder(("soften", "back", "hold")),
        answer=lambda key: {"rate_limit": 0.1, "groups": 1},
        healthy=60,
    )
    story.frames(99.0, times=20)

    assert story.actions() == ["inc-1/1/0-hold_rate", "inc-1/2/0-touch"]


def failed(story):
    return [(d.step, d.reason) for d in story.kinds("verify", "failed")]


@pytest.mark.parametrize("step", [50, 61])
def test_what_comes_back_ends_the_verification_at_once(tell, step):
    story = back(tell)
    story.frames(2.0, times=step - 41)
    assert not failed(story)
    story.frames(99.0)

    why = f"back did not help: huge is in breach again at step {step} on rank 0"
    assert failed(story) == [(step, why)]
    assert story.state.machine == "holding"


@pytest.mark.parametrize("loss", [2.0, 99.0])
def test_what_takes_a_few_steps_to_clear_has_them(tell, loss):
    """It may be in breach up to where it was first met, and is to be quiet behind it."""
    story = back(tell)
    story.frames(99.0, times=20)
    assert not failed(story)
    story.frames(loss, times=5)

    why = "back did not help: huge is in breach still at step 61 on rank 0"
    assert failed(story) == ([] if loss == 2.0 else [(61, why)])
    assert bool(story.kinds("verify", "passed")) == (loss == 2.0)


@pytest.mark.parametrize(("level", "verified"), [(2.01, True), (2.06, False)])
def test_a_run_that_went_back_is_to_have_the_level_of_before(tell, level, verified):
    """No single loss is out of the normal range, whose end lies at 2.1; so many may not differ."""
    story = back(tell)
    story.frames(level, times=90)

    assert bool(story.kinds("verify", "passed")) == verified
    lacking = [reason for _, reason in failed(story)]
    assert ["losses is +0.06 from the trend" in reason for reason in lacking] == [True] * (
        not verified
    )


@pytest.mark.parametrize(
    "more", [{"severity": "SEV1"}, {"runbook": "aside"}, {"runbook": None}, {"mode": "shadow"}]
)
def test_other_rules_wait_for_the_end_of_the_verification(tell, more):
    """What does not damage the weights, is not answered by going back, or acts on nothing."""
    story = back(tell, **{"severity": "SEV0", "runbook": "back"} | more)
    story.frames(2.0, times=5)
    story.frames(2.0, times=20, grad=99.0)
    assert "wild" in story.state.incident.rules and not failed(story)
    story.frames(2.0, times=5)

    assert story.kinds("verify", "passed")


# ── a trouble that began on one rank is over when that rank says so, too ──────────────────────────


@pytest.mark.parametrize(("newest", "verified"), [(2.0, True), (4.0, False)])
def test_the_rank_that_it_began_on_has_to_be_back_in_its_band(tell, newest, verified):
    """The rule is clear in both, and so is the other rank."""
    book = runbook_of("only", Rollback(at_least=10, rewarm=0), Verify(clear_for=5, within=40))
    story = tell(
        **one_rule(above("residual_rms", 5.0), "SEV1", "only"),
        names=("train_loss_raw", "residual_rms"),
        runbooks={"only": book},
        budgets=AMPLE,
        answer=lambda key: {"attempt": 1, "step": 40, "ranks": 2},
    )
    for rank in (0, 1):
        story.announce(rank, 2, rank + 1)

    def step(loss):
        story.frames(2.0)
        story.send(Frame(story.at_ns, 1, story.attempt, story.step, (loss, loss)))

    for _ in range(60):
        step(2.0)
    step(8.0)
    assert story.state.incident.case.rank == 1
    story.attempt = 1
    for _ in range(90):
        step(newest)

    texts = [record.reason for record in story.kinds("verify")]
    assert any("no rule fired for 5 steps" in text for text in texts) == verified
    assert any("and its normal range ends at" in text for text in texts) != verified


# ── a command that some ranks carried out and others did not ──────────────────────────────────────


WHY = "the ranks differ from step 61 on: rank 1 did not answer"


@pytest.mark.parametrize(
    ("books", "asked", "phase"),
    [
        ([runbook_of("again", Snapshot(), Relaunch(), Verify())], ["reach", "snapshot"], "acting"),
        ([], ["reach"], "held"),
    ],
)
def test_a_command_that_some_ranks_carried_out_is_followed_by_a_relaunch_or_a_person(
    tell, books, asked, phase
):
    """Not even to undo the step: that would be a second command to ranks that differ."""

    def answer(key):
        facts = {"inconsistent": True, "retryable": False}
        return (facts, WHY) if "reach" in key else None

    story = tell(
        **one_rule(above("train_loss_raw", 5.0), "SEV1", "first"),
        runbooks={b.name: b for b in (runbook_of("first", Reach(), Verify()), *books)},
        budgets=AMPLE,
        answer=answer,
        healthy=50,
    )
    story.frames(9.0, times=3)

    assert [action.rpartition("-")[2] for action in story.actions()] == asked
    assert [m for m in messages(story) if m["severity"] == "SEV0" and WHY in m["verdict"]]
    assert (story.state.incident.severity, story.state.incident.phase) == ("SEV0", phase)


def test_ranks_that_cannot_act_at_one_step_are_asked_once_in_a_launch(tell):
    why = "rank 1 waits in a collective for what rank 0 does only behind the end of its step"
    ease = runbook_of("ease", LrScale(set=0.5), Verify(), if_refused="look")

    def answer(key):
        facts = {"refused": True, "unfenceable": why, "retryable": False}
        return (facts, why) if "lr_scale" in key else None

    story = tell(
        **one_rule(above("train_loss_raw", 5.0), "SEV1", "ease"),
        runbooks={"ease": ease, "look": runbook_of("look", Snapshot())},
        budgets=AMPLE,
        ladder=Ladder(("ease", "hold")),
        answer=answer,
    )
    for _ in range(2):
        story.frames(2.0, times=60)
        story.frames(9.0, times=3)

    verbs = [action.rpartition("-")[2] for action in story.actions()]
    assert verbs[:2] == ["lr_scale", "snapshot"] and verbs.count("lr_scale") == 1
    assert why in story.state.job.unavailable["fence"]
    assert len([m for m in messages(story) if "cannot be changed together" in m["title"]]) == 1
    assert [r for r in story.kinds("abort", "refused") if why in r.reason and "ease" in r.reason]

    story.launch(1, 77)
    assert "fence" not in story.state.job.unavailable
