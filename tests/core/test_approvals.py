"""Asking people first: bound to what was asked, durable, and never in the way of the job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervise.actions.snapshot import Snapshot
from supervise.core.model.events import Finished, Reloaded
from supervise.core.model.policy import Approval

from .conftest import Reach, Touch, Verify, runbook_of


def asked(tell, **changes):
    """A run in trouble that waits for a yes to `soften`."""
    story = tell(**({"mode": "approve"} | changes), healthy=50, then=8.0)
    assert [d.data["id"] for d in story.kinds("approval_requested")] == ["ask-1"]
    assert story.actions() == []
    return story


def test_nothing_touches_the_job_before_a_person_said_yes(tell):
    """The message holds the command; the job goes on; then it runs as ever."""
    story = asked(tell)
    request = story.kinds("approval_requested")[0].data
    assert request["args"] == [{"verb": "reach", "args": {}}]
    assert request["args_sha256"].startswith("sha256:")
    message = story.kinds("notify_intent")[-1].data["message"]
    assert "supervise approve RUN ask-1" in message["next"]
    assert "the job continues meanwhile" in message["next"]
    assert story.state.machine == "suspect"
    story.frames(8.0, times=5)
    assert len(story.kinds("approval_requested")) == 1
    assert story.say("approve", id="ask-1").data["ok"]

    assert [d.data["what"] for d in story.kinds("approval")] == ["approved"]
    assert story.actions() == ["inc-1/2/0-reach"]
    assert story.state.machine == "acting"
    story.frames(2.0, times=60)
    assert story.state.machine == "nominal"


def test_evidence_is_taken_while_people_are_asked(tell):
    book = runbook_of("soften", Snapshot(), Reach(), Verify())
    base = tell().policy.runbooks
    story = tell(
        mode="approve",
        runbooks={**base, "soften": book},
        answer=lambda key: None,
        healthy=50,
        then=8.0,
    )
    assert story.actions() == ["inc-1/1/0-snapshot"]
    assert story.say("approve", id="ask-1").data["ok"]
    assert len(story.actions()) == 1
    story.send(Finished(story.at_ns, "inc-1/1/0-snapshot", True))

    assert story.actions()[1:] == ["inc-1/2/0-snapshot"]
    assert story.kinds("approval")[0].data["operator"] == "anna"


@pytest.mark.parametrize(
    ("word", "on_timeout", "what"),
    [("deny", "deny", "denied"), (None, "deny", "denied"), (None, "allow", "approved")],
)
def test_no_and_silence_hold_the_run_unless_silence_means_yes(tell, word, on_timeout, what):
    story = asked(tell, approvals={"all": Approval(900.0, on_timeout)})
    if word:
        assert story.say(word, id="ask-1").data["ok"]
    else:
        story.tick(901)
    (answer,) = story.kinds("approval")
    late = story.say("approve", id="ask-1").data

    assert answer.data["what"] == what
    assert ("no answer in time" in answer.reason) == (word is None)
    assert (story.state.machine == "holding") == (what == "denied")
    assert story.actions() == ["inc-1/2/0-reach"] * (what == "approved")
    assert late["ok"] == (what == "approved")
    assert late["answer"].startswith("no change: " if late["ok"] else "too late: ask-1 was denied")


def test_a_second_yes_is_harmless(tell):
    story = asked(tell)
    story.say("approve", id="ask-1")
    said = story.say("approve", "bo", id="ask-1")

    assert said.data["ok"]
    assert said.data["answer"].startswith("no change: ask-1 was approved at step 50: by anna")
    assert len(story.actions()) == 1
    said = story.say("deny", "bo", id="ask-1")
    assert not said.data["ok"]
    assert said.data["answer"].startswith("too late: ask-1 was approved")


def test_a_yes_to_other_arguments_is_none(tell):
    story = asked(tell)
    sha = story.kinds("approval_requested")[0].data["args_sha256"]
    said = story.say("approve", id="ask-1", sha="abcdef")
    assert not said.data["ok"]
    assert "has other arguments" in said.data["answer"]
    assert story.say("approve", id="ask-1", sha=sha[7:15]).data["ok"]


def test_what_ended_by_itself_needs_no_answer(tell):
    """Withdrawn with the incident; the next one is asked for again, not climbed over."""
    story = asked(tell)
    story.frames(2.0, times=30)
    assert story.kinds("approval")[0].data["what"] == "withdrawn"
    assert story.state.incident is None
    assert "too late" in story.say("approve", id="ask-1").data["answer"]
    story.frames(8.0)

    assert [d.data["runbook"] for d in story.kinds("approval_requested")] == ["soften", "soften"]


def test_a_worse_rule_asks_for_its_own_runbook(tell):
    story = asked(tell)
    story.frames(99.0)

    assert [d.data["id"] for d in story.kinds("approval_requested")] == ["ask-1", "ask-2"]
    assert story.kinds("approval")[0].data["what"] == "expired"
    assert not story.say("approve", id="ask-1").data["ok"]
    assert story.say("approve", id="ask-2").data["ok"]
    assert story.actions()[-1].endswith("0-touch")


def test_a_reload_makes_it_void_and_asks_under_the_new_policy(tell):
    story = asked(tell)
    before = story.policy
    story.policy = replace(before, digest="sha256:1")
    story.send(Reloaded(story.at_ns, "bo", "sha256:1", "test", "approve", before.digest))

    assert story.kinds("approval")[0].reason == "ask-1 expired: the policy was reloaded"
    assert story.kinds("approval_requested")[1].data["policy"] == "sha256:1"


def test_terms_are_found_by_verb_runbook_and_all_in_this_order(tell):
    """In `enforce` what has no terms runs, and the most severe may."""
    terms = {"all": Approval(), "soften": Approval(unless="SEV1")}
    story = tell(approvals=terms, healthy=50, then=8.0)
    assert story.actions() == ["inc-1/1/0-reach"]

    story = tell(approvals=terms | {"reach": Approval(unless="SEV0")}, healthy=50, then=8.0)
    assert story.actions() == []
    assert story.state.approvals.pending.runbook == "soften"


def test_a_rule_may_ask_in_a_policy_that_acts(tell):
    rules = list(tell().policy.rules)
    rules[0] = replace(rules[0], mode="approve")
    story = asked(tell, mode="enforce", rules=tuple(rules))
    story.say("approve", id="ask-1")
    story.frames(8.0, times=40)

    assert story.actions() == ["inc-1/2/0-reach", "inc-1/2/undo-conftest"]
    assert story.state.approvals.pending.runbook == "back"


@pytest.mark.parametrize(
    ("reach", "touch", "found"),
    [
        (Approval(60, "allow"), Approval(900, "deny"), (900, "deny")),
        (Approval(60, "deny"), Approval(30, "allow"), (60, "deny")),
        (Approval(300, "deny"), Approval(60, "deny"), (60, "deny")),
        (Approval(60, "allow"), Approval(90, "allow"), (90, "allow")),
        (Approval(60, "allow"), None, (900, "deny")),
    ],
)
def test_one_request_has_the_strictest_terms_of_its_steps(tell, reach, touch, found):
    book = runbook_of("soften", Reach(), Touch(), Verify())
    terms = {"reach": reach} | ({} if touch is None else {"touch": touch})
    story = asked(tell, runbooks={**tell().policy.runbooks, "soften": book}, approvals=terms)
    request = story.kinds("approval_requested")[0].data

    assert (request["timeout_s"], request["on_timeout"]) == found
