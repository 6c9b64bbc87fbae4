"""Operators: requests for approval, and commands, each answered in a sentence and done once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from supervise.actions import HoldRate, LrScale, Rollback, Snapshot
from supervise.core.model import Approval, Budget, Ladder, Refused, Rule, Runbook

from .conftest import Reach, Touch, Verify, above, messages, rules_of, runbook_of


def asked(tell, **changes):
    """A run in trouble that waits for a yes to `soften`."""
    story = tell(**({"mode": "approve"} | changes), healthy=50, then=8.0)
    assert [d.data["id"] for d in story.kinds("approval_requested")] == ["ask-1"]
    assert story.actions() == []
    return story


def test_nothing_touches_the_job_before_a_person_said_yes(tell):
    story = asked(tell)
    request = story.kinds("approval_requested")[0].data
    assert request["args"] == [{"verb": "reach", "args": {}}]
    assert request["args_sha256"].startswith("sha256:")
    message = story.kinds("notify_intent")[-1].data["message"]
    assert "supervise approve RUN ask-1" in message["next"]
    assert "the job keeps training meanwhile" in message["next"]
    assert story.state.machine == "suspect"
    story.frames(8.0, times=5)
    assert len(story.kinds("approval_requested")) == 1
    assert story.say("approve", id="ask-1").data["ok"]

    assert [d.data["what"] for d in story.kinds("approval")] == ["approved"]
    assert story.actions() == ["inc-1/2/0-reach"]
    assert story.state.machine == "acting"
    story.frames(2.0, times=60)
    assert story.state.machine == "nominal"


@pytest.mark.parametrize(
    ("word", "on_timeout", "what"),
    [("deny", "deny", "denied"), (None, "deny", "denied"), (None, "allow", "approved")],
)
def test_no_and_silence_hold_the_run_unless_silence_means_yes(tell, word, on_timeout, what):
    story = asked(tell, approvals={"all": Approval(900.0, on_timeout)})
    story.tick(600)
    story.notice("approval-delivered", "it is there", data={"id": "ask-1"})
    if word:
        assert story.say(word, id="ask-1").data["ok"]
    else:
        story.tick(899)
        assert story.state.approvals.pending.delivered
        story.tick(1)
    (answer,) = story.kinds("approval")
    late = story.say("approve", id="ask-1").data

    assert answer.data["what"] == what
    assert ("no answer in time" in answer.reason) == (word is None)
    assert answer.data["operator"] or word is None, "who denied it is in the record"
    assert (story.state.machine == "holding") == (what == "denied")
    assert story.actions() == ["inc-1/2/0-reach"] * (what == "approved")
    assert late["ok"] == (what == "approved")
    assert late["answer"].startswith("no change: " if late["ok"] else "too late: ask-1 was denied")


def test_evidence_that_is_complete_behind_the_no_is_on_record(tell):
    books = {"soften": runbook_of("soften", Snapshot(), Reach(), Verify())}
    story = tell(mode="approve", runbooks=books, answer=lambda action: None, healthy=50, then=8.0)
    (snapshot,) = story.actions()
    story.say("deny", id="ask-1")
    story.finish(snapshot, {"path": "incidents/inc-1/snapshot-1"})
    (done,) = story.kinds("commit")
    assert done.incident == "inc-1"
    assert done.data["action"] == {"id": snapshot}
    assert done.data["result"] == {"path": "incidents/inc-1/snapshot-1"}
    assert story.state.incident.phase == "held"


def test_a_request_that_reaches_nobody_waits_an_hour_longer(tell):
    """An outage of the channels is no answer. A late delivery does not begin it anew."""
    story = asked(tell, approvals={"all": Approval(900.0, "allow")})
    story.tick(3600 + 899)
    story.notice("approval-delivered", "at last", data={"id": "ask-1"})
    assert story.actions() == []
    story.tick(1)

    assert story.kinds("approval")[0].data["what"] == "approved"
    story.notice("approval-delivered", "again", data={"id": "ask-1"})  # it waits no more


def test_a_request_that_is_never_delivered_is_answered_by_its_terms(tell):
    story = asked(tell, approvals={"all": Approval(900.0, "allow")})
    story.tick(3600 + 899)
    assert story.actions() == []
    story.tick(2)

    assert story.kinds("approval")[0].data["what"] == "approved"


def test_a_second_yes_is_harmless_and_one_to_other_arguments_is_none(tell):
    story = asked(tell)
    sha = story.kinds("approval_requested")[0].data["args_sha256"]
    said = story.say("approve", id="ask-1", sha="abcdef").data
    assert not said["ok"] and "has other arguments" in said["answer"]
    assert story.say("approve", id="ask-1", sha=sha[7:15]).data["ok"]

    said = story.say("approve", "bo", id="ask-1").data
    again = "no change: ask-1 was approved at step 50: by anna"
    assert said["ok"] and said["answer"].startswith(again)
    assert len(story.actions()) == 1
    said = story.say("deny", "bo", id="ask-1").data
    assert not said["ok"] and said["answer"].startswith("too late: ask-1 was approved")


def test_a_worse_rule_asks_for_its_own_runbook(tell):
    story = asked(tell)
    story.frames(99.0)

    assert [d.data["id"] for d in story.kinds("approval_requested")] == ["ask-1", "ask-2"]
    runbook = story.state.approvals.pending.runbook
    for word in ("approve", "deny"):
        late = story.say(word, id="ask-1").data
        assert not late["ok"] and late["answer"].startswith("too late: ask-1 was expired")
        then = f"; ask-2 for {runbook} waits instead; supervise {word} RUN ask-2"
        assert late["answer"].endswith(then)
    assert story.kinds("approval")[0].data["what"] == "expired"
    assert not story.say("approve", id="ask-1").data["ok"]
    assert story.say("approve", id="ask-2").data["ok"]
    assert story.actions()[-1].endswith("0-touch")


STEPS = {
    "lower": (LrScale(0.5),),
    "cap": (HoldRate(within=1.0),),
    "back": (Touch(),),
    "unable": (Rollback(at_least=99),),
}
REMEDIES = {
    name: runbook_of(name, Snapshot(), *steps, Verify(), if_refused="cap" * (name == "unable"))
    for name, steps in STEPS.items()
}


@pytest.mark.parametrize(
    ("first", "second", "more", "waits"),
    [
        ("back", "lower", {}, "back"),
        ("back", "lower", {"severity": "SEV0"}, "back"),
        ("back", "cap", {}, "back"),
        ("cap", "lower", {}, "cap"),
        ("unable", "lower", {}, "cap"),  # what is asked for in its place
        ("unable", "cap", {}, "cap"),
        ("lower", "lower", {}, "lower"),
        ("lower", "lower", {"severity": "SEV0"}, "lower"),
        ("lower", "cap", {}, "cap"),
        ("lower", "back", {}, "back"),
        ("lower", "back", {"ladder": ("back",)}, "back"),
        ("lower", "back", {"ladder": ("back",), "severity": "SEV2"}, "lower"),
        ("cap", "back", {"ladder": ("back",)}, "back"),
        ("back", "unable", {}, "back"),
    ],
)
@pytest.mark.parametrize("taken", [True, False])
def test_a_request_gives_way_to_no_weaker_remedy_nor_to_itself(
    tell, first, second, more, waits, taken
):
    """Of two rules the second one asks while the request of the first waits.

    taken: the evidence of that is there by then, else it comes a few steps later.
    """
    more = {"severity": "SEV1", "ladder": ()} | more
    detectors = {"high": above("train_loss_raw", 5.0), "wild": above("grad_global_norm", 9.0)}
    story = tell(
        **rules_of(detectors, ("high", "SEV1", first), ("wild", more["severity"], second)),
        mode="approve",
        healthy=50,
        runbooks=REMEDIES,
        ladder=Ladder(more["ladder"]),
        answer=lambda key: {} if taken else None,
    )
    story.notice("rollback-unavailable", "there is no savepoint")
    story.frames(8.0)
    story.frames(8.0, times=3, grad=20.0)
    if not taken:
        for action in story.actions():
            story.finish(action, {})
    story.frames(8.0, times=3, grad=20.0)
    pending = story.state.approvals.pending

    assert pending.runbook == waits
    asked = [d.data["runbook"] for d in story.kinds("approval_requested")]
    assert asked == list(dict.fromkeys(["cap" if first == "unable" else first, waits]))
    assert [d.data["what"] for d in story.kinds("approval")] == ["expired"] * (len(asked) - 1)
    assert story.replayed() == story.recorded()


def test_terms_are_found_by_verb_runbook_and_all_in_this_order(tell):
    """In `enforce` what has no terms runs, and the most severe may."""
    terms = {"all": Approval(), "soften": Approval(unless="SEV1")}
    story = tell(approvals=terms, healthy=50, then=8.0)
    assert story.actions() == ["inc-1/1/0-reach"]

    story = tell(approvals=terms | {"reach": Approval(unless="SEV0")}, healthy=50, then=8.0)
    assert story.actions() == []
    assert story.state.approvals.pending.runbook == "soften"


@pytest.mark.parametrize(
    ("terms", "found"),
    [
        ({"reach": Approval(60, "deny"), "touch": Approval(30, "allow")}, (60, "deny")),
        ({"reach": Approval(300, "deny"), "touch": Approval(60, "deny")}, (60, "deny")),
        ({"reach": Approval(60, "allow"), "touch": Approval(90, "allow")}, (90, "allow")),
        ({"reach": Approval(60, "allow")}, (900, "deny")),
    ],
)
def test_one_request_has_the_strictest_terms_of_its_steps(tell, terms, found):
    book = runbook_of("soften", Reach(), Touch(), Verify())
    story = asked(tell, runbooks={**tell().policy.runbooks, "soften": book}, approvals=terms)
    request = story.kinds("approval_requested")[0].data

    assert (request["timeout_s"], request["on_timeout"]) == found


@pytest.mark.parametrize(
    ("word", "args", "why"),
    [
        ("lr", {}, "needs `value`, a number"),
        ("lr", {"value": float("nan")}, "needs `value`, a number"),
        ("lr", {"value": 10**400}, "needs `value`, a number, not 1000"),
        ("lr", {"value": 3.0}, "lr_scale: the factor must be above 0"),
        ("lr", {"value": 0.5, "rewarm": True}, "needs `rewarm`, a whole number"),
        ("skip", {"steps": 0}, "skip_step: count must be between"),
        ("quarantine", {"shards": []}, "at least one name"),
        ("quarantine", {"shards": [""]}, "a name in `shards` is empty"),
        ("quarantine", {"shards": ["a.tar"]}, "the job does not report which shards its data is"),
        ("resume", {}, "the job is not paused"),
        ("silence", {"rule": "nix"}, "there is no rule 'nix'"),
        ("silence", {"rule": "gone"}, "gone is SEV0"),
        ("silence", {"rule": "spike", "for": -1}, "needs `for`"),
        ("silence", {"rule": "spike", "steps": 9}, "silence has no argument 'steps'; it has rule"),
        ("pause", {"for": 9}, "pause has no argument 'for'; it has none"),
        ("pause", {"x": {"was": [[1, "a"]]}}, "pause has no argument 'x'"),
        ("plan", {"to": 5, "what": "mix"}, "step 5 is over; the run is at step 19"),
        ("plan", {"from": 40, "to": 30, "what": "mix"}, "plan: to comes before from: 40"),
        ("plan", {"to": 0, "what": "mix"}, "plan: no change 'mix' was announced"),
        ("plan", {"to": 30}, "a name in `what` is empty"),
        ("plan", {"what": "mix"}, "plan needs `to`, a whole number"),
        ("plan", {"to": 30, "what": "mix", "expect": "away"}, "expect must be up, down or either"),
        ("ack", {}, "no incident is open"),
        ("release", {}, "nothing to release: automatic actions are on"),
        ("deny", {"id": "ask-1"}, "no request 'ask-1' is waiting"),
    ],
)
def test_what_cannot_be_done_is_refused_and_touches_nothing(tell, word, args, why):
    story = tell(healthy=20)
    said = story.say(word, **args)

    assert not said.data["ok"] and why in said.data["answer"]
    assert (story.actions(), story.state.incident) == ([], None)


def test_a_planned_change_is_replaced_and_taken_back_by_its_words(tell):
    story = tell(healthy=20)
    said = story.say("plan", to=90, what="a mix")
    assert "to take it back: supervise plan add RUN --to 0 --what 'a mix'" in said.data["answer"]
    story.say("plan", to=80, what="rate")
    said = story.say("plan", to=40, what="a mix", expect="up")
    assert said.data["answer"].startswith("steps 20 to 40 are planned (replaces steps 20 to 90): ")
    story.say("plan", **{"from": 41}, to=60, what="a mix")  # beside it
    planned = story.state.context.planned
    assert [(p.what, p.to_step, p.expect) for p in planned] == [
        ("rate", 80, "either"),
        ("a mix", 40, "up"),
        ("a mix", 60, "either"),
    ]
    said = story.say("plan", to=0, what="a mix")
    assert said.data["ok"] and said.data["answer"] == "a mix is no longer planned"
    assert [p.what for p in story.state.context.planned] == ["rate"]
    assert story.replayed() == story.recorded()


def test_a_seventeenth_planned_change_is_refused_until_one_is_over_or_taken_back(tell):
    story = tell(healthy=20)
    for n in range(16):
        story.say("plan", to=30 if n == 3 else 900, what=f"change {n}")
    said = story.say("plan", to=900, what="one more")
    assert not said.data["ok"]
    assert "16 changes are planned" in said.data["answer"]
    assert "supervise plan add RUN --to 0 --what 'change 0'" in said.data["answer"]
    assert [p.what for p in story.state.context.planned] == [f"change {n}" for n in range(16)]
    story.frames(2.0, times=70)
    assert story.say("plan", to=900, what="one more").data["ok"]
    known = [p.what for p in story.state.context.planned]
    assert (len(known), "change 3" in known, known[-1]) == (16, False, "one more")


@pytest.mark.parametrize(
    ("shards", "told"),
    [
        (["data/nosuch.tar"], "data/nosuch.tar"),
        (["data/s3.tar"], "data/s3.tar"),  # another shard, no mistyped one
        (["s1.tar", "data/s2.tar"], "s1.tar (did you mean data/s1.tar?)"),
        (["data/s2.tra"], "data/s2.tra (did you mean data/s2.tar?)"),
        (["a" * 50, *"bcdefg", "h" * 60], f"{'a' * 50}, b, c and 5 more"),
    ],
)
def test_what_this_run_has_not_seen_is_taken_and_said_to_be_unseen(tell, shards, told):
    """A person may know of more; a mistyped name would leave out nothing, for ever."""
    story = tell()
    names = {"0": "data/s1.tar", "1": "data/s2.tar"}
    story.notice("shard", "the job asks about them", 0, 0, {"shards": names})
    story.frames(2.0, times=20)
    said = story.say("quarantine", shards=shards)
    args = story.kinds("intent")[0].data["action"]["args"]

    assert said.data["ok"]
    named = [*shards[:-1], "and 1 more"] if len(shards) > 5 else shards
    assert f"quarantine shards={' '.join(named)}: " in said.reason
    assert (args["by"], args["most"]) == ("anna", None)
    assert args["add"] == [{"kind": "shard", "name": name} for name in shards]
    assert said.data["answer"] == (
        f"inc-1: quarantine sent to the job; not among the 2 shards seen so far: {told}"
    )


def test_a_pause_of_a_person_may_end_by_itself_and_people_are_told(tell):
    """It lasts a day at most; nothing fails, and there is nothing to resume."""
    story = tell(healthy=50)
    story.say("pause")
    assert story.kinds("intent")[0].data["action"]["args"] == {"lease_s": 86400.0}
    story.notice("pause-ended", "nobody renewed the pause")

    assert story.kinds("notify_intent")[-1].severity == "SEV1"
    assert story.say("resume").data["answer"] == "the job is not paused"
    story.frames(2.0, times=30)
    assert story.state.machine == "nominal"


def test_an_action_under_way_is_not_disturbed_but_stop_and_resume_wait_for_it(tell):
    story = tell(answer=lambda key: None, healthy=50, then=8.0)
    (first,) = story.actions()
    assert f"{first} is in progress" in story.say("lr", value=0.5).data["answer"]
    said = story.say("stop")
    assert said.data["answer"] == f"queued until {first} has finished"
    assert story.actions() == [first]
    story.finish(first, {"ack_step": story.step})

    assert story.actions() == [first, "inc-1/2/0-stop"]
    story.exit(-2)
    assert story.kinds("notify_intent")[-1].data["message"]["title"].startswith("stopped by anna")


def test_a_verification_gives_way_to_a_person(tell):
    story = tell(healthy=50, then=8.0)
    story.say("lr", value=0.25)
    story.frames(8.0, 8.0)

    assert story.kinds("verify", "preempted")[0].reason == "soften preempted by anna"
    assert story.actions()[:2] == ["inc-1/1/0-reach", "inc-1/2/0-lr_scale"]
    assert not any("undo-lr_scale" in action for action in story.actions())


def test_a_person_may_exceed_a_budget_and_it_counts(tell):
    story = tell(budgets={"lr_scale": Budget(1), "all": Budget(9)}, healthy=50)
    for _ in range(2):
        story.say("lr", value=0.5)
        story.frames(2.0, times=30)

    assert len(story.actions()) == 2
    (override,) = story.kinds("override")
    assert override.reason == "lr_scale by anna, although budget lr_scale is spent (1 of 1)"
    assert story.state.ledger.usage(story.policy.budgets, 0, 0)["lr_scale"] == "2/1"


@pytest.mark.parametrize(("word", "verb"), [("savepoint", "savepoint"), ("save", "checkpoint")])
def test_what_a_person_asked_for_and_could_not_be_had_is_told(tell, word, verb):
    story = tell(answer=lambda key: ({}, "no room"), healthy=50)
    story.say(word)

    assert story.kinds("abort")[0].reason == f"inc-1/1/0-{verb} failed: no room"
    assert "command of anna failed" in story.kinds("notify_intent")[-1].data["message"]["title"]
    assert story.state.machine == "suspect"
    story.frames(2.0, times=30)
    assert story.state.machine == "nominal"


def test_a_rollback_takes_evidence_first_and_goes_to_before_the_step_given(tell):
    story = tell(healthy=50)
    story.say("rollback", before=30)
    story.frames(2.0, times=30)
    story.say("rollback")

    args = [d.data["action"]["args"] for d in story.kinds("intent")]
    assert [a.rpartition("-")[2] for a in story.actions()] == ["snapshot", "rollback"] * 2
    assert [args[1]["before_step"], args[3]["before_step"]] == [30, 80]


def test_a_rollback_that_this_job_cannot_make_is_refused_to_a_person_as_well(tell):
    story = tell(healthy=50)
    story.notice("rollback-unavailable", "a for statement drives the step")
    said = story.say("rollback")

    assert not said.data["ok"] and "a for statement drives the step" in said.data["answer"]
    assert story.actions() == [] and story.state.incident is None


def test_in_shadow_a_person_acts_and_the_policy_still_does_not(tell):
    """A rule that is in breach on the probation of an order starts nothing."""
    story = tell(mode="shadow", healthy=50, then=8.0)
    story.say("lr", value=0.5)
    story.frames(8.0, times=40)

    assert story.actions() == ["inc-1/1/0-lr_scale"]
    assert story.state.machine != "holding"


def test_a_silent_rule_neither_acts_nor_tells_and_speaks_again(tell):
    story = tell(healthy=50)
    story.say("silence", rule="spike", **{"for": 20})
    told = len(story.kinds("notify_intent"))
    story.frames(8.0, times=5)
    assert story.kinds("suppressed")[0].data["suppressed_by"] == "silence:anna"
    assert len(story.kinds("notify_intent")) == told
    assert story.state.incident is None
    story.frames(8.0, times=20)

    assert story.actions()[0] == "inc-1/1/0-reach"
    said = story.say("silence", rule="spike", **{"for": 0})
    assert said.data["answer"] == "silence on spike removed"


def test_a_rule_of_negations_speaks_again_behind_its_silence(tell):
    """It holds while nothing is in breach, so no sample of its own says that it is over."""
    still = Rule("still", lambda codes: 2 - codes[0], "not some", ("some",), "SEV1")
    rules = {"detectors": {"some": above("train_loss_raw", 0.5)}, "rules": (still,), "inhibit": ()}
    story = tell(**rules, healthy=50)
    story.say("silence", rule="still", **{"for": 20})
    story.frames(0.0, times=10)
    assert story.state.incident is None
    story.frames(0.0, times=20)
    assert story.state.incident.rules == ["still"]


def test_an_incident_that_somebody_has_is_not_reminded_of(tell):
    story = tell(ladder=Ladder(("soften", "hold")), hold_reminder_s=100.0, healthy=50)
    story.frames(8.0, times=60)
    story.tick(200)
    assert reminders(story, "still off") == 1
    assert not story.say("ack", incident="inc-7").data["ok"]
    assert story.say("ack").data["ok"]
    story.tick(200)

    assert reminders(story, "still off") == 1
    assert story.state.machine == "holding"


@dataclass(frozen=True)
class Impossible(Reach):
    """Changes the training, and never can."""

    changes_training = True

    def plan(self, context):
        raise Refused("no savepoint is old enough")


@pytest.mark.parametrize("acked", [False, True])
def test_an_acknowledgement_covers_the_severity_that_it_was_given_at(tell, acked):
    rules = rules_of(
        {"high": above("train_loss_raw", 5.0), "wild": above("grad_global_norm", 9.0)},
        ("high", "SEV0", "back"),
        ("wild", "SEV2"),
    )
    books = {"back": Runbook("back", (Impossible(), Verify()), ("reach", "verify"))}
    ladder = Ladder(("back", "hold"))
    story = tell(**rules, runbooks=books, ladder=ladder, give_up="stop", healthy=60)
    story.frames(2.0, grad=20.0)
    if acked:
        story.say("ack")
        assert story.state.incident.acknowledged_by == "anna"
    before = len(messages(story))
    story.frames(9.0, grad=20.0)
    incident = story.state.incident
    assert (incident.severity, incident.acknowledged_by) == ("SEV0", "")
    note = "anna acknowledged it as SEV2 only"
    assert [note in m["verdict"] for m in messages(story)[before:]] == [acked]
    story.frames(9.0, times=60, grad=20.0)
    story.tick(700.0)
    assert sum(note in m["verdict"] for m in messages(story)) == acked
    assert [a.rpartition("-")[2] for a in story.actions()][-2:] == ["snapshot", "stop"]


def reminders(story, text):
    return len([d for d in story.kinds("notify_intent") if text in d.reason])


def test_an_open_incident_is_told_again_until_somebody_acknowledges_it(tell):
    story = tell(mode="observe", repeat_s=1800.0, healthy=50, then=8.0)
    for seconds, times in ((1800, 0), (1, 1), (1, 1), (1800, 2)):
        story.tick(seconds)
        assert reminders(story, "still open") == times
    story.say("ack")
    told = story.kinds("notify_intent")[-1]
    assert told.reason == "inc-1: acknowledged by anna"
    assert told.data["message"]["acknowledged_by"] == "anna"
    story.tick(4000)

    assert reminders(story, "still open") == 2


def test_a_yes_to_what_has_changed_meanwhile_is_asked_for_again(tell):
    story = asked(tell)
    story.state.approvals.pending.plan = [{"verb": "reach", "args": {"far": 1}}]
    story.state.approvals.pending.sha = "sha256:0"
    said = story.say("approve", id="ask-1")

    assert not said.data["ok"] and "the action's arguments have changed" in said.data["answer"]
    assert story.kinds("approval")[0].data["what"] == "expired"
    assert story.say("approve", id="ask-2").data["ok"]
    assert story.actions()[-1].endswith("0-reach")
