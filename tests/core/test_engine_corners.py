"""The engine where things meet: hangs, refusals, probation, muting, several ranks, blindness."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervise.actions.stop import Stop
from supervise.core.model.events import (
    Announced,
    Beat,
    Exited,
    Finished,
    Gap,
    Notice,
    OperatorCommand,
    Tick,
)
from supervise.core.model.policy import Ladder, Rule, Runbook
from supervise.detectors.absence import Absence
from supervise.detectors.robust_z import RobustZ

from .conftest import runbook_of

SECOND = 1_000_000_000


def hang_story(tell, **changes):
    touch = tell().policy.runbooks["back"].steps[0]
    base = tell().policy
    detectors = {**base.detectors, "hung": Absence("step", {"min": 30.0})}
    rules = (*base.rules, Rule("stuck", lambda codes: codes[3], "hung", ("hung",), "SEV0", "end"))
    runbooks = {**base.runbooks, "end": Runbook("end", (touch,), ("end",))}
    return tell(detectors=detectors, rules=rules, runbooks=runbooks, **changes)


def beat(story, phase="step"):
    for _ in range(40):
        story.at_ns += SECOND
        story.send(Tick(story.at_ns, (Beat(0, story.at_ns, phase),)))


def test_silence_counts_only_while_the_probe_is_known_to_be_there(tell):
    """No beat, a probe that is off, a job that is exiting: nothing is stopped for it."""
    story = hang_story(tell)
    story.frames(2.0, times=50)
    story.tick()
    beat(story, phase="exiting")
    story.send(Notice(story.at_ns, "probe-off", "it failed", rank=0))
    beat(story)

    assert story.actions() == []
    assert story.state.incident is None


def test_a_hang_is_answered_whatever_was_tried_before(tell):
    """A runbook off the ladder runs after a recovery, on probation, and in a hold."""
    for recovered in (8, 60):
        story = hang_story(tell)
        story.frames(2.0, times=50)
        story.frames(8.0)
        story.frames(2.0, times=recovered)
        beat(story)
        assert story.actions()[-1].endswith("0-end"), story.actions()

    story = hang_story(tell, ladder=Ladder(("soften", "hold")))
    story.frames(2.0, times=50)
    story.frames(8.0, times=60)
    assert story.state.machine == "holding"
    beat(story)
    assert story.actions()[-1].endswith("0-end")


def test_a_shadow_rule_does_not_swallow_one_that_acts(tell):
    """SEV0 in shadow and SEV1 in enforce in one frame: one is planned, the other runs."""
    rules = list(tell().policy.rules)
    rules[2] = replace(rules[2], mode="shadow")
    story = tell(rules=tuple(rules), inhibit=(), healthy=50, then=99.0)

    assert story.actions() == ["inc-1/1/0-reach"]
    assert [d.data["suppressed_by"] for d in story.kinds("suppressed")] == ["mode:shadow"]


def test_a_new_trouble_on_probation_gets_its_own_runbook(tell):
    """It asks for a higher level than was tried: that one, and not the one above it."""
    story = tell(healthy=50, then=8.0)
    story.frames(2.0, times=8)
    story.frames(99.0)

    assert story.actions() == ["inc-1/1/0-reach", "inc-1/2/0-touch"]
    assert story.state.machine == "acting"


def test_ranks_without_rank_0_have_a_pace(tell):
    """A second node sees ranks 8 and 9 only; budgets and probation go on all the same."""
    story = tell()
    for rank in (8, 9):
        story.send(Announced(0, rank, 16, rank, story.names))
    for step in range(50):
        story.step = step
        story.rank(8, 2.0)
        story.rank(9, 2.0)

    assert (story.state.frame_count, story.state.step, story.state.machine) == (50, 49, "nominal")


def test_a_long_warm_up_is_not_blindness(tell):
    """Six seconds a step: 64 samples take longer than the limit, and nothing went missing."""
    detectors = {"z": RobustZ(metric="train_loss_raw", gt=6.0)}
    rules = (Rule("up", lambda codes: codes[0], "z", ("z",), "SEV1"),)
    story = tell(detectors=detectors, rules=rules)
    for _ in range(60):
        story.frames(2.0)
        story.tick(6)

    assert story.kinds("blind") == []


def test_blindness_is_an_incident_and_ends(tell):
    story = tell(blind_after_steps=30, healthy=50)
    story.frames(None, times=40)
    story.tick()
    assert story.state.incident is not None
    story.frames(2.0, times=40)

    assert story.state.incident is None
    assert story.state.machine == "nominal"


def test_a_verification_waits_for_the_effect(tell):
    """An action whose effect no frame could show yet is not verified."""

    def answer(action_id):
        return Finished(0, action_id, True, {"attempt": 1, "step": 40})

    story = tell(answer=answer, healthy=50, then=8.0)
    story.frames(2.0, times=40)

    assert story.kinds("verify", "passed") == []
    assert "effect" in story.kinds("verify", "failed")[0].reason


def test_a_relapse_that_never_cleared_is_seen_on_probation(tell):
    """`keep` holds the rule firing, so there is no edge; the breach itself counts."""
    rules = list(tell().policy.rules)
    rules[0] = replace(rules[0], keep_steps=500)
    story = tell(rules=tuple(rules), healthy=50, then=8.0)
    story.frames(2.0, times=8)
    assert story.state.machine == "probation"
    story.frames(8.0, times=3)

    assert story.actions()[-1].endswith("0-touch")


def test_a_muted_rule_speaks_when_its_inhibitor_is_gone(tell):
    """SEV0 cleared, SEV1 still in breach: it is enlisted then."""
    story = tell(mode="observe", healthy=50, then=99.0)
    assert story.state.incident.rules == ["gone"]
    story.frames(8.0, times=3)

    assert "spike" in story.state.incident.rules


def test_release_lets_a_rule_that_still_fires_act_again(tell):
    """After a person released the hold, the breach that goes on is answered anew."""
    story = tell(ladder=Ladder(("soften", "hold"), reset_after_steps=1), healthy=50)
    story.frames(8.0, times=120)
    acted = len(story.actions())
    story.send(OperatorCommand(story.at_ns, "anna", "release"))
    story.frames(8.0, times=5)

    assert len(story.actions()) == acted + 1


@pytest.mark.parametrize(
    ("ok", "exit_code", "title"), [(True, 78, "stopped by policy"), (True, None, "finished")]
)
def test_only_a_stop_that_took_hold_is_called_one(tell, ok, exit_code, title):
    """A job that ended by itself while it was looked at has finished, and is told so."""
    book = runbook_of("soften", Stop())

    def answer(action_id):
        return Finished(0, action_id, ok, {"exit_code": exit_code})

    story = tell(
        answer=answer, runbooks={**tell().policy.runbooks, "soften": book}, healthy=50, then=8.0
    )
    story.send(Exited(story.at_ns, 0))

    assert story.kinds("notify_intent")[-1].data["message"]["title"].startswith(title)


def test_what_is_worse_than_an_action_under_way_is_answered_when_that_is_over(tell):
    """It may not cut the action; nor may it be forgotten, though it never stops firing."""
    story = tell(answer=lambda key: None, healthy=50, then=8.0)
    (first,) = story.actions()
    story.frames(80.0, times=3)
    assert story.kinds("suppressed")[-1].data["suppressed_by"] == "acting"
    assert story.actions() == [first]

    story.send(Finished(story.at_ns, first, True, {"ack_step": story.step}))

    assert len(story.actions()) == 2
    assert story.actions()[1].endswith("0-touch")


def test_steps_without_a_frame_are_told(tell):
    """Once, whoever lost them; people hear of many. A gap that was told explains its own."""
    story = tell(healthy=50)
    story.step = 59
    story.frames(2.0, times=20)
    assert [d.reason for d in story.kinds("gap")] == ["rank 0: steps 50 to 59 have no frame"]
    assert not story.kinds("notify_intent")
    story.send(Gap(story.at_ns, 0, 80, 30))
    story.step = 109
    story.frames(2.0, times=20)
    assert len(story.kinds("gap")) == 2
    story.step = 229
    story.frames(2.0, times=2)
    story.step += 1
    story.frames(2.0, times=2)

    told = [d.reason for d in story.kinds("gap")][2:]
    assert told == ["rank 0: steps 130 to 229 have no frame", "rank 0: step 232 has no frame"]
    (message,) = [d.data["message"] for d in story.kinds("notify_intent")]
    assert (message["severity"], message["title"]) == ("SEV2", told[0])
