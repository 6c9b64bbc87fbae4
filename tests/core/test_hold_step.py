"""`hold` as the last step of a runbook: evidence first, then nothing but a person."""

from __future__ import annotations

from typing import Any

import pytest

from supervise.actions.hold import Hold
from supervise.actions.snapshot import Snapshot
from supervise.core.model.events import Exited, Finished
from supervise.core.model.policy import Ladder, Runbook

BOOK = Runbook("wrong", (Snapshot(), Hold()), ("snapshot", "hold"))


@pytest.fixture
def wrong(tell, make_policy):
    """Start a story whose rule `grad` (above 9) runs snapshot and hold, on no level."""

    def begin(**changes: Any):
        base = make_policy()
        rules = [rule for rule in base.rules if rule.id != "grad"]
        (old,) = (rule for rule in base.rules if rule.id == "grad")
        made = type(old)("grad", old.when, old.text, old.uses, "SEV1", "wrong")
        books = {**base.runbooks, "wrong": changes.pop("book", BOOK)}
        return tell(**({"rules": (*rules, made), "runbooks": books} | changes))

    return begin


def test_evidence_is_taken_and_then_nothing_acts(wrong):
    """The job goes on, later rules are told and held back, and its own end is the end."""
    story = wrong()
    story.frames(2.0, times=50)
    story.frames(2.0, times=5, grad=20.0)

    assert story.actions() == ["inc-1/1/0-snapshot"]
    assert story.state.machine == "holding"
    (held,) = story.kinds("incident", "held")
    assert held.reason.startswith("held: wrong: grad_global_norm 20")
    assert held.step == 50

    told = len(story.kinds("notify_intent"))
    story.frames(8.0, times=3)
    assert story.actions() == ["inc-1/1/0-snapshot"]
    assert story.kinds("suppressed")[-1].data["suppressed_by"] == "holding"
    assert len(story.kinds("notify_intent")) == told + 1

    story.send(Exited(story.at_ns, 0))
    assert story.state.machine == "halted"
    assert story.kinds("incident", "closed")[-1].reason == "closed: the job ended with code 0"


def test_evidence_that_fails_does_not_keep_it_from_holding(wrong):
    """The person who comes hears both: what is wrong, and that there is no bundle."""
    story = wrong(answer=lambda key: Finished(1, key, False, {}, "no room on the disk"))
    story.frames(2.0, times=50)
    story.frames(2.0, grad=20.0)

    assert story.state.machine == "holding"
    (held,) = story.kinds("incident", "held")
    assert held.reason.startswith("held: wrong: grad_global_norm 20")
    assert held.reason.endswith("0-snapshot failed: no room on the disk")


def test_it_holds_even_where_a_failure_would_lead_elsewhere(wrong):
    """A runbook built by hand cannot turn a hold into an action by failing."""
    book = Runbook(BOOK.name, BOOK.steps, BOOK.verbs, if_it_fails="back")
    story = wrong(book=book, answer=lambda key: Finished(1, key, False, {}, "no"))
    story.frames(2.0, times=50)
    story.frames(2.0, grad=20.0)

    assert story.state.machine == "holding"
    assert story.actions() == ["inc-1/1/0-snapshot"]


def test_evidence_that_is_never_done_does_not_either(wrong):
    """The performer is silent: past its deadline the outcome is in doubt, and the run held."""
    story = wrong(answer=lambda key: None)
    story.frames(2.0, times=50)
    story.frames(2.0, grad=20.0)
    assert story.state.machine != "holding"

    story.tick(100)

    assert story.state.machine == "holding"
    assert story.actions() == ["inc-1/1/0-snapshot"]


def test_what_is_worse_meanwhile_finds_the_run_held(wrong):
    """It fires while the evidence is written; that it would have rolled back is on record."""
    story = wrong(answer=lambda key: None)
    story.frames(2.0, times=50)
    story.frames(2.0, grad=20.0)
    story.frames(99.0)
    story.send(Finished(story.at_ns, "inc-1/1/0-snapshot", True, {}))
    story.frames(99.0, times=5)

    assert story.state.machine == "holding"
    assert story.actions() == ["inc-1/1/0-snapshot"]
    by = [d.data["suppressed_by"] for d in story.kinds("suppressed") if d.rule == "gone"]
    assert by == ["acting", "holding"]


def test_in_a_hold_it_takes_new_evidence_and_says_nothing_twice(wrong):
    """The rule cleared and fires again: another bundle, no other call for a person."""
    story = wrong()
    story.frames(2.0, times=50)
    story.frames(2.0, grad=20.0)
    story.frames(2.0, times=5)
    story.frames(2.0, grad=20.0)

    assert story.actions() == ["inc-1/1/0-snapshot", "inc-1/2/0-snapshot"]
    assert len(story.kinds("incident", "held")) == 1
    assert story.state.machine == "holding"
    assert story.state.incident.phase == "held"


def test_a_person_releases_it(wrong):
    """Then rules act again, this one included while its trouble lasts."""
    story = wrong()
    story.frames(2.0, times=50)
    story.frames(2.0, grad=20.0)
    assert story.say("release").data["ok"]
    story.frames(2.0, times=30)

    assert story.state.machine == "nominal"
    story.frames(2.0, grad=20.0)
    assert story.actions()[-1] == "inc-2/1/0-snapshot"
    assert story.state.machine == "holding"


def test_as_the_last_rung_it_gives_the_trouble_its_class(wrong):
    """Reached by climbing, it is what the reserved `hold` is there, with a bundle."""
    story = wrong(ladder=Ladder(("soften", "wrong"), reset_after_steps=500))
    story.frames(2.0, times=50)
    story.frames(8.0, times=60)

    assert [key.rpartition("-")[2] for key in story.actions()] == ["reach", "conftest", "snapshot"]
    assert story.state.machine == "holding"
    assert "spike" in story.kinds("incident", "held")[0].data


def test_nobody_is_asked_and_shadow_only_says_it(wrong):
    """It touches nothing, so it needs no approval; shadow writes down both steps."""
    asked = wrong(mode="approve")
    asked.frames(2.0, times=50)
    asked.frames(2.0, grad=20.0)
    assert asked.state.machine == "holding"
    assert not asked.kinds("approval_requested")

    shadow = wrong(mode="shadow")
    shadow.frames(2.0, times=50)
    shadow.frames(2.0, grad=20.0)
    assert shadow.state.machine == "suspect"
    (would,) = (d for d in shadow.kinds("suppressed") if "would" in d.data)
    assert [step["verb"] for step in would.data["would"]] == ["snapshot", "hold"]


def test_a_job_that_ends_meanwhile_is_not_held(wrong):
    """There is nothing left to hold."""
    story = wrong(answer=lambda key: None)
    story.frames(2.0, times=50)
    story.frames(2.0, grad=20.0)
    story.send(Exited(story.at_ns, 0))
    story.send(Finished(story.at_ns, "inc-1/1/0-snapshot", True, {}))

    assert story.state.machine == "halted"
    assert not story.kinds("incident", "held")
