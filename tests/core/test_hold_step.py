"""`hold` as the last step of a runbook: evidence first, then nothing but a person."""

from __future__ import annotations

from typing import Any

import pytest

from supervise.actions.hold import Hold
from supervise.actions.snapshot import Snapshot
from supervise.core.model.events import Exited, Finished

from .conftest import runbook_of

BOOK = runbook_of("wrong", Snapshot(), Hold())


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
    assert story.say("release").data["ok"]
    story.frames(2.0, times=30)
    assert story.state.machine == "nominal"


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
