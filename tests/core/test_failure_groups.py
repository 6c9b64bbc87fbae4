"""The groups of failures that the engine must stand (policy.md section 12), one letter each.

What other files show already is not repeated: engine corners, parts, replay, questions.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from supervise.actions.lr_scale import LrScale
from supervise.actions.pause import Pause
from supervise.actions.resume import Resume
from supervise.actions.rollback import Rollback
from supervise.actions.skip_step import SkipStep
from supervise.actions.snapshot import Snapshot
from supervise.actions.stop import Stop
from supervise.core import engine, machine
from supervise.core.replay import decisions, record
from supervise.core.rule import Budget, Inhibit, Ladder, Rule, Runbook
from supervise.core.state import State, Turn
from supervise.core.values import (
    SEVERITIES,
    Announced,
    Beat,
    Exited,
    Finished,
    Gap,
    Noticed,
    Tick,
    Told,
)
from supervise.detectors.absence import Absence
from supervise.detectors.join import Join
from supervise.detectors.nonfinite import Nonfinite
from supervise.detectors.ratio import Ratio
from supervise.detectors.robust_z import RobustZ
from supervise.detectors.sequence import Sequence
from supervise.detectors.threshold import Threshold

from .conftest import Above, Verify, index_of

NAN = float("nan")


def rule_on(detectors, name, severity, runbook=None, **more):
    return Rule(name, index_of(name, detectors), name, (name,), severity, runbook, **more)


def messages(story):
    return [d.data["message"] for d in story.kinds("notify_intent")]


# ── A storm ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", [1, -1])
def test_a_hundred_rules_in_one_step_are_one_incident_one_runbook_one_message(tell, order):
    """Whatever their order; the most severe one speaks."""
    detectors = {f"d{i}": Above("train_loss_raw", 5.0 + i / 100) for i in range(100)}
    rules = [
        rule_on(detectors, f"d{i}", SEVERITIES[min(i, 2)], "back" if i == 0 else "soften")
        for i in range(100)
    ][::order]
    story = tell(detectors=detectors, rules=tuple(rules), inhibit=())
    story.frames(2.0, times=50)
    told = len(messages(story))
    story.answer = lambda key: None
    story.frames(9.0)

    assert len(story.kinds("incident", "opened")) == 1
    assert story.actions() == ["inc-1/1/0-touch"]
    assert len(messages(story)) == told + 1
    assert len(story.kinds("rule", "fired")) == 100
    assert messages(story)[-1]["severity"] == "SEV0"


# ── B flapping ────────────────────────────────────────────────────────────────────────────────────


def test_hysteresis_and_keep_leave_two_transitions(tell):
    """A metric that swings around its limit: with `clear` and `keep` it fires and clears once."""
    swing = [4.9, 5.1] * 20
    for detector, keep, changes in (
        (Threshold("train_loss_raw", gt=5.0), 0, 40),
        (Threshold("train_loss_raw", gt=5.0, clear=4.0), 0, 2),
        (Threshold("train_loss_raw", gt=5.0), 60, 2),
    ):
        detectors = {"cap": detector}
        rules = (rule_on(detectors, "cap", "SEV2", keep_steps=keep),)
        story = tell(detectors=detectors, rules=rules)
        story.frames(2.0, times=20)
        story.frames(*swing)
        story.frames(2.0, times=60)

        assert len(story.kinds("rule")) == changes
        flapping = [d for d in story.kinds("note", "flapping") if "flapping" in d.reason]
        assert len(flapping) == (changes > 6)


# ── C missing ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("hole", [None, NAN])
@pytest.mark.parametrize("frames", [1, 3])
def test_a_hole_inside_for_neither_advances_nor_resets_it(tell, hole, frames):
    """`for: 4` with samples missing in the middle fires on the fourth bad one that was seen."""
    detectors = {"high": Above("train_loss_raw", 5.0)}
    rules = (rule_on(detectors, "high", "SEV2", for_steps=4),)
    story = tell(detectors=detectors, rules=rules)
    story.frames(2.0, times=20)
    story.frames(8.0, 8.0)
    story.frames(hole, times=frames)
    story.frames(8.0)
    assert not story.kinds("rule", "fired")
    story.frames(8.0)

    assert len(story.kinds("rule", "fired")) == 1


@pytest.mark.parametrize("lost", [1, 3, 200])
def test_frames_that_were_lost_are_on_record_and_harmless(tell, lost):
    """The ring was overrun: the steps jump, nothing fires, and the loss of frames is said."""
    story = tell()
    story.frames(2.0, times=30)
    story.send(Gap(story.at_ns, 0, 30, lost))
    story.step += lost
    story.frames(2.0, times=30)

    assert [d.data["count"] for d in story.kinds("gap")] == [lost]
    assert story.state.machine == "nominal"
    assert story.state.incident is None


def test_a_hole_inside_probation_is_no_relapse_and_no_recovery(tell):
    """Samples are missing for ten steps of probation: it goes on, and passes."""
    story = tell()
    story.frames(2.0, times=50)
    story.frames(8.0)
    story.frames(2.0, times=8)
    assert story.state.machine == "probation"
    story.frames(None, times=10)
    assert story.state.machine == "probation"
    story.frames(2.0, times=20)

    assert story.state.machine == "nominal"
    assert story.actions() == ["inc-1/1/0-reach"]


def test_a_hole_is_no_recovery_while_it_is_verified(tell):
    """A rule that cannot be judged does not count as quiet."""
    story = tell()
    story.frames(2.0, times=50)
    story.frames(8.0)
    story.frames(None, times=20)

    assert not story.kinds("verify", "passed")


def test_a_hole_inside_a_sequence_is_unknown_and_not_calm(tell):
    """Gradient, then a gap over the loss: the coupling is UNKNOWN, so `not chain` is not true."""
    detectors = {
        "wild": Threshold("grad_global_norm", gt=9.0),
        "high": Threshold("train_loss_raw", gt=5.0),
        "chain": Sequence(steps=("wild", "high"), within=4),
    }
    when = [lambda codes: codes[2], lambda codes: 2 - codes[2]]
    rules = tuple(
        Rule(name, one, name, ("chain",), "SEV2")
        for name, one in zip(("chain", "calm"), when, strict=True)
    )
    story = tell(detectors=detectors, rules=rules)
    story.frames(2.0, times=20)
    bank = story.state.banks[0]
    assert bank.rules[1].firing
    story.frames(2.0, grad=99.0)
    story.frames(None, None)

    assert bank.rules[1].code == 1
    story.frames(8.0)
    assert "chain" in [d.rule for d in story.kinds("rule", "fired")]


def test_a_silent_rank_is_a_stall_of_its_own(tell):
    """Rank 3 of 4 stops sending: its clock fires, and names the rank."""
    detectors = {"stalled": Absence(signal="step", after={"min": 30.0})}
    rules = (rule_on(detectors, "stalled", "SEV1"),)
    story = tell(detectors=detectors, rules=rules)
    for rank in range(1, 4):
        story.send(Announced(0, rank, 4, rank + 1, story.names))
    for step in range(80):
        story.frames(2.0)
        for rank in (1, 2, *([3] if step < 20 else [])):
            story.rank(rank, 2.0)
        beats = tuple(Beat(rank, story.at_ns, "step") for rank in range(4))
        story.send(Tick(story.at_ns, beats))

    assert [d.data["rank"] for d in story.kinds("rule", "fired")] == [3]


def test_a_probe_that_starts_again_starts_from_nothing(tell):
    """Another process of the rank, steps from 0: no breach, no leftover baseline, not blind."""
    detectors = {"z": RobustZ("train_loss_raw", gt=6.0, window=32, min_=16)}
    story = tell(detectors=detectors, rules=(rule_on(detectors, "z", "SEV1"),))
    story.frames(2.0, 2.1, 1.9, times=30)
    story.send(Announced(story.at_ns, 0, 1, 2, story.names))
    story.step = -1
    story.frames(9.0, 9.1, 8.9, times=30)

    assert not story.kinds("rule", "fired")
    assert not story.kinds("blind")


# ── D contamination ───────────────────────────────────────────────────────────────────────────────


def test_two_spikes_ten_steps_apart_are_one_incident(tell):
    """And the first does not raise the limit for the second."""
    detectors = {"z": RobustZ("train_loss_raw", gt=6.0)}
    story = tell(detectors=detectors, rules=(rule_on(detectors, "z", "SEV2"),))
    story.frames(2.0, 2.1, 1.9, times=40)
    story.frames(4.0, *[2.0] * 9, 4.0)
    story.frames(2.0, 2.1, 1.9, times=20)

    assert len(story.kinds("rule", "fired")) == 2
    assert len(story.kinds("incident", "opened")) == 1


def test_a_constant_series_is_no_alarm(tell):
    """MAD 0, and rounding on top of it."""
    detectors = {"z": RobustZ("train_loss_raw", gt=6.0)}
    story = tell(detectors=detectors, rules=(rule_on(detectors, "z", "SEV1"),))
    story.frames(2.0, times=200)
    story.frames(2.0000001, 1.9999999, 2.0, times=20)

    assert not story.kinds("rule", "fired")


# ── E clocks ──────────────────────────────────────────────────────────────────────────────────────


def test_a_clock_that_goes_back_gives_no_decision(tell):
    """Time in events may only be late: the state keeps the newest."""
    story = tell()
    story.frames(2.0, times=30)
    newest = story.state.at_ns
    story.send(Tick(newest - 3600 * 10**9))
    story.at_ns -= 3600 * 10**9
    story.frames(2.0, times=30)

    assert story.state.at_ns == newest
    assert [d.kind for d in story.log] == ["state", "state"]


def test_a_suspended_machine_is_no_stall(tell):
    """Ten hours between two ticks, and a notice that it slept: the deadline begins anew."""
    detectors = {"stalled": Absence(signal="step", after={"min": 120.0})}
    story = tell(detectors=detectors, rules=(rule_on(detectors, "stalled", "SEV0"),))
    story.frames(2.0, times=30)
    story.at_ns += 36_000 * 10**9
    story.send(Noticed(story.at_ns, "suspended", "the machine slept for 10 hours"))
    story.send(Tick(story.at_ns, (Beat(0, story.at_ns, "step"),)))
    assert not story.kinds("rule", "fired")
    for _ in range(13):
        story.at_ns += 10 * 10**9
        story.send(Tick(story.at_ns, (Beat(0, story.at_ns, "step"),)))

    assert len(story.kinds("rule", "fired")) == 1


@pytest.mark.parametrize("jump", [-20, 0, 5000])
def test_step_ids_that_jump_are_survived(tell, jump):
    """Back without a new attempt, the same again, far ahead: no decision about a healthy loss."""
    detectors = {
        "z": RobustZ("train_loss_raw", gt=6.0, window=32, min_=16),
        "x": Ratio("train_loss_raw", fast=1, ref=16, gt=1.4),
    }
    rules = tuple(rule_on(detectors, name, "SEV1", "soften") for name in detectors)
    story = tell(detectors=detectors, rules=rules)
    story.frames(2.0, 2.1, 1.9, times=40)
    story.step += jump - (jump == 0)
    story.frames(2.0, 2.1, 1.9, times=40)

    assert story.actions() == []
    assert not story.kinds("incident")


# ── F actions ─────────────────────────────────────────────────────────────────────────────────────

BOOKS = {
    "mend": (Pause(), Snapshot(), Rollback(at_least=5), Resume(), Verify()),
    "ease": (Snapshot(), LrScale(set=0.5), SkipStep(), Verify()),
    "end": (Snapshot(), Stop()),
}
BACK = {"step": 30, "attempt": 0}  # what a rollback answers; others have no use for it
ALL_STEPS = [
    (name, i)
    for name, steps in BOOKS.items()
    for i, step in enumerate(steps)
    if not step.engine_step
]


def mending(name):
    verbs = tuple(type(step).__module__.rpartition(".")[2] for step in BOOKS[name])
    verbs = tuple("verify" if verb.endswith("conftest") else verb for verb in verbs)
    detectors = {"high": Above("train_loss_raw", 5.0)}
    return {
        "detectors": detectors,
        "rules": (rule_on(detectors, "high", "SEV1", name),),
        "runbooks": {name: Runbook(name, BOOKS[name], verbs)},
        "ladder": Ladder((name, "hold")),
        "budgets": {"all": Budget(9), "rollback": Budget(9), "lr_scale": Budget(9)},
        "inhibit": (),
    }


def told_when(seen, at):
    """Return how the action with index `at` is answered: others succeed."""

    def answer(key):
        label = key.rpartition("/")[2]
        seen.append(label)
        return None if label.partition("-")[0] == str(at) else Finished(0, key, True, BACK)

    return answer


@pytest.mark.parametrize(("name", "at"), ALL_STEPS)
@pytest.mark.parametrize("how", ["fails", "never", "late", "twice"])
def test_each_step_of_each_runbook_may_fail(tell, name, at, how):
    """Held with what can be taken back taken back, later steps never asked for, nothing twice."""
    seen: list[str] = []
    story = tell(answer=told_when(seen, at), **mending(name))
    story.frames(2.0, times=50)
    story.frames(8.0)
    action = story.actions()[-1]
    assert action.endswith(f"/{at}-{seen[-1].partition('-')[2]}")
    done = Finished(story.at_ns, action, True, BACK)
    if how == "fails":
        story.send(replace(done, ok=False, error="no space left on device"))
    elif how == "twice":
        story.send(done)
        asked = len(story.actions())
        story.send(done)
        assert len(story.actions()) == asked
        assert story.kinds("note", "late-outcome")
    else:
        story.tick(1000.0)
        if how == "late":
            story.send(done)
            assert story.kinds("note", "late-outcome")
    story.frames(2.0, times=3)

    assert len(set(story.actions())) == len(story.actions())
    if how == "twice":
        return
    assert story.state.machine == "holding"
    assert len(story.kinds("in_doubt")) == (how != "fails")
    after = [label for label in seen if label.partition("-")[0].isdecimal()]
    assert [int(label.partition("-")[0]) for label in after] == list(range(at + 1))
    undone = [label for label in seen if label.startswith("undo-")]
    if name == "mend":  # the pause does not stay; a resume that failed leaves it to its lease
        assert ("undo-resume" in undone) == (at != 3)


def test_an_undo_that_fails_is_the_worst_there_is(tell):
    """SEV0, held, and said."""

    def answer(key):
        bad = "2-rollback" in key or "undo" in key
        return Finished(0, key, not bad, {}, "gone" if bad else None)

    story = tell(answer=answer, **mending("mend"))
    story.frames(2.0, times=50)
    story.frames(8.0)

    assert story.state.machine == "holding"
    assert story.state.incident.severity == "SEV0"
    assert any("taking an action back failed" in m["title"] for m in messages(story)) or any(
        m["severity"] == "SEV0" for m in messages(story)
    )


def test_an_undo_without_an_outcome_is_asked_for_once(tell):
    """Then held, SEV0 and said: nobody resumes a job seven times in the dark."""

    def answer(key):
        if "undo" in key:
            return None
        return Finished(0, key, "2-rollback" not in key, BACK, None)

    story = tell(answer=answer, **mending("mend"))
    story.frames(2.0, times=50)
    story.frames(8.0)
    for _ in range(5):
        story.tick(1000.0)

    undone = [action for action in story.actions() if "undo-" in action]
    assert len(undone) == len(set(undone)) == 1
    assert story.state.machine == "holding"
    assert story.state.incident.severity == "SEV0"


# ── G crash, O replay ─────────────────────────────────────────────────────────────────────────────


def everything(tell):
    """A story with every kind of event and nearly every kind of decision in it."""
    detectors = {
        "high": Above("train_loss_raw", 5.0),
        "huge": Above("train_loss_raw", 50.0),
        "z": RobustZ("grad_global_norm", gt=6.0, window=32, min_=16),
        "x": Ratio("train_loss_raw", fast=1, ref=16, gt=1.4),
        "chain": Sequence(steps=("z", "x"), within=5),
        "either": Join(any=("z", "x"), within=2),
        "bad": Nonfinite(metrics=("train_loss_raw", "grad_global_norm")),
        "stalled": Absence(signal="step", after={"min": 60.0}),
    }
    severities = dict.fromkeys(detectors, "SEV2") | {"high": "SEV1", "huge": "SEV0"}
    books = {"high": "soften", "huge": "back"}
    rules = tuple(
        rule_on(detectors, name, severities[name], books.get(name), cooldown_steps=30)
        for name in detectors
    )
    story = tell(
        detectors=detectors, rules=rules, blind_after_steps=20, hold_max_s=600.0,
        inhibit=(Inhibit(mute=("high",), by_rule="huge"),),
    )  # fmt: skip
    story.frames(2.0, 2.1, 1.9, times=20)
    story.send(Noticed(story.at_ns, "collector-off", "the optimizer collector is off"))
    story.frames(8.0, 2.0, 2.1, 1.9)
    story.frames(2.0, 2.1, times=20)
    story.send(Gap(story.at_ns, 0, 70, 5))
    story.frames(2.0, 2.1, times=3, grad=50.0)
    story.frames(NAN, None, 2.0, times=4)
    story.frames(None, times=30)
    story.tick()
    story.frames(2.0, 2.1, times=20)
    story.frames(99.0, times=40)
    story.tick(1000.0)
    story.send(Told(story.at_ns, "ann", "release"))
    story.frames(99.0, times=2)
    story.attempt += 1
    story.step -= 30
    story.frames(2.0, 2.1, times=40)
    story.send(Finished(story.at_ns, "inc-9/1/0-touch", True))
    story.send(Exited(story.at_ns, -9))
    return story


def test_a_run_can_be_cut_after_every_event(tell):
    """Fold, copy, go on: the same decisions byte for byte, wherever the supervisor was killed."""
    story = everything(tell)
    whole = [record(d) for d in story.log]
    kinds = {d["kind"] for d in whole}
    assert kinds >= {
        "rule", "incident", "state", "suppressed", "intent", "commit", "verify",
        "notify_intent", "gap", "blind", "note",
    }  # fmt: skip
    state, done = engine.start(story.policy), 0
    for i, event in enumerate(story.events):
        twin, ahead = state.copy(), done
        for following in story.events[i : i + 25]:
            twin, made = engine.step(story.policy, twin, following)
            for decision in made:
                assert record(decision) == whole[ahead], f"cut before event {i}"
                ahead += 1
        state, made = engine.step(story.policy, state, event)
        done += len(made)
    assert done == len(whole)


def test_a_copy_shares_nothing_with_the_original(tell):
    """Going on with one leaves the other where it was."""
    story = everything(tell)
    state = engine.start(story.policy)
    for event in story.events[:150]:
        state, _ = engine.step(story.policy, state, event)
    twin = state.copy()
    for event in story.events[150:]:
        state, _ = engine.step(story.policy, state, event)
    again = [d for _, d in decisions(story.policy, enumerate(story.events[150:]), twin)]

    assert again == [record(d) for d in story.log][-len(again) :]


REPLAYED = """
import importlib, random, sys
names = ["engine", "bank", "questions", "spike", "runner", "response", "machine", "replay", "state"]
random.Random(int(sys.argv[1])).shuffle(names)
for name in names:
    importlib.import_module("supervise.core." + name)
import hashlib, json
from supervise.catalog.policy import load_policy
from supervise.core import replay
from supervise.core.values import Announced, Exited, Frame, Launched
policy = load_policy("nano", mode="shadow")
noise = random.Random(7)
names = ("train_loss_raw", "grad_global_norm", "update_norm", "update_to_weight", "learning_rate")
events = [Launched(0, 1, 0), Announced(0, 0, 1, 1, names)]
for step in range(600):
    hot = 1.0 + 2.0 * (300 <= step < 306) + 0.03 * noise.gauss(0, 1)
    values = (2.0 * hot, hot, 0.1 * hot * hot, 1e-3 * hot, 1e-3 * (10 if step == 299 else 1))
    events.append(Frame(step * 10**8, 0, 0, step, values))
events.append(Exited(10**12, 0))
log = [d for _, d in replay.decisions(policy, enumerate(events))]
assert any(d["kind"] == "incident" for d in log)
print(len(log), hashlib.sha256(json.dumps(log).encode()).hexdigest())
"""


@pytest.mark.slow
def test_replay_is_the_same_under_any_hash_seed_and_import_order():
    """Sets and dicts of names do not reach a decision: byte-identical records."""
    found = set()
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", REPLAYED, seed], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        found.add(done.stdout)

    assert len(found) == 1


def test_decisions_are_json_and_the_same_twice(tell):
    """Records have a form that hashes alike."""

    def digest():
        log = [record(d) for d in everything(tell).log]
        return hashlib.sha256(json.dumps(log, allow_nan=False).encode()).hexdigest()

    assert digest() == digest()


# ── I budget ──────────────────────────────────────────────────────────────────────────────────────


def test_a_budget_in_seconds_slides_with_time(tell):
    """Two in 100 s: the third is held back; 100 s after the first one there is room again."""
    detectors = {"high": Above("train_loss_raw", 5.0)}
    made = {
        "detectors": detectors,
        "rules": (rule_on(detectors, "high", "SEV1", "back"),),
        "ladder": Ladder(("back", "hold"), reset_after_steps=1),
        "probation_steps": 1,
        "budgets": {"touch": Budget(2, per_s=100.0)},
    }
    story = tell(**made)
    story.frames(2.0, times=30)
    for _ in range(2):
        story.frames(8.0)
        story.frames(2.0, times=12)
    assert len(story.actions()) == 2
    story.frames(8.0)
    assert story.state.machine == "holding"
    assert story.kinds("suppressed")[-1].data["suppressed_by"] == "budget:touch"
    story.at_ns += 100 * 10**9
    story.frames(2.0, times=30)
    story.send(Told(story.at_ns, "ann", "release"))
    story.frames(2.0, times=30)
    story.frames(8.0)

    assert len(story.actions()) == 3


def test_a_release_does_not_refund_a_budget(tell):
    """What a person says lets the engine go on; it gives no intent back."""
    story = tell(budgets={"touch": Budget(1), "all": Budget(9)})
    story.frames(2.0, times=50)
    story.frames(99.0, times=60)
    spent = [a for a in story.actions() if a.endswith("touch")]
    story.send(Told(story.at_ns, "ann", "release"))
    story.frames(2.0, times=30)
    story.frames(99.0, times=5)

    assert len(spent) == 1
    assert [a for a in story.actions() if a.endswith("touch")] == spent


# ── J escalation ──────────────────────────────────────────────────────────────────────────────────


def test_each_relapse_climbs_one_rung_and_the_last_one_holds(tell):
    """soften, back, hold; whatever calms down in between."""
    story = tell()
    story.frames(2.0, times=50)
    for _ in range(3):
        story.frames(8.0)
        story.frames(2.0, times=8)

    assert [a.rpartition("/")[2] for a in story.actions()] == [
        "0-reach", "undo-conftest", "0-touch",
    ]  # fmt: skip
    assert story.state.machine == "holding"
    assert story.kinds("incident", "held")[0].data["spike"]["class"] == "structural instability"


@pytest.mark.parametrize(("calm", "second"), [(100, "touch"), (560, "reach")])
def test_the_ladder_resets_only_after_clean_steps(tell, calm, second):
    """A new incident 100 steps after a recovery enters no lower; after 500 it starts below."""
    story = tell(ladder=Ladder(("soften", "back", "hold"), reset_after_steps=500))
    story.frames(2.0, times=50)
    story.frames(8.0)
    story.frames(2.0, times=8)
    story.frames(8.0)  # a relapse on probation: back
    story.frames(2.0, times=calm)
    assert story.state.machine == "nominal"
    story.frames(8.0)

    begun = [action for action in story.actions() if "undo" not in action]
    assert begun[2].endswith(second)


def test_sev0_preempts_a_runbook_that_is_only_verified_and_never_an_action(tell):
    """In the middle of an action it waits its turn; what was begun is not done twice."""
    story = tell(inhibit=(), answer=lambda key: None)
    story.frames(2.0, times=50)
    story.frames(8.0)
    story.frames(99.0)
    assert story.actions() == ["inc-1/1/0-reach"]
    assert story.kinds("suppressed")[-1].data["suppressed_by"] == "acting"

    other = tell(inhibit=())
    other.frames(2.0, times=50)
    other.frames(8.0)
    other.frames(99.0)
    assert other.kinds("verify", "preempted")
    assert other.actions() == ["inc-1/1/0-reach", "inc-1/2/0-touch"]


# ── K inhibition ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("flip", [False, True])
def test_source_and_target_in_one_step_do_not_depend_on_their_order(tell, flip):
    """The muted rule does not act although it is listed first, and is on record."""
    base = tell()
    rules = base.policy.rules[::-1] if flip else base.policy.rules
    story = tell(rules=rules)
    story.frames(2.0, times=50)
    story.frames(99.0)

    assert story.actions() == ["inc-1/1/0-touch"]
    assert [d.data["suppressed_by"] for d in story.kinds("suppressed")] == ["inhibit:gone"]


def test_a_mute_by_state_ends_with_the_state(tell):
    """What is muted while something acts speaks afterwards, if it is still there."""
    inhibit = (Inhibit(mute=("grad",), by_state=("acting", "probation")),)
    story = tell(inhibit=inhibit)
    story.frames(2.0, times=50)
    story.frames(8.0)
    story.frames(2.0, times=3, grad=20.0)
    assert story.kinds("suppressed")[-1].data["suppressed_by"] == "inhibit:acting"
    assert "grad" not in story.state.incident.rules
    story.frames(2.0, times=60, grad=20.0)

    assert story.state.machine == "suspect"
    assert story.state.incident.rules == ["grad"]


# ── S cascades ────────────────────────────────────────────────────────────────────────────────────


def test_what_an_action_does_to_the_numbers_is_no_new_trouble(tell):
    """Rollback, re-warmed rate, a slow first step: one runbook, verified, closed as recovered."""
    names = ("train_loss_raw", "learning_rate", "step_time")
    detectors = {
        "up": RobustZ("train_loss_raw", gt=6.0),
        "rate": Ratio("learning_rate", fast=1, ref=32, gt=2.5, freeze=32),
        "slow": Ratio("step_time", fast=1, ref=32, gt=1.5, freeze=32),
    }
    rules = (
        rule_on(detectors, "up", "SEV1", "mend", cooldown_steps=50),
        rule_on(detectors, "rate", "SEV2"),
        rule_on(detectors, "slow", "SEV2"),
    )
    book = Runbook(
        "mend",
        (Rollback(at_least=10, start=0.1, rewarm=50), Verify(within=200, clear_for=30)),
        ("rollback", "verify"),
    )

    def answer(key):
        return Finished(0, key, True, {"step": 174, "attempt": 1, "ack_step": 200})

    story = tell(
        names=names, answer=answer, detectors=detectors, rules=rules, runbooks={"mend": book},
        budgets={"rollback": Budget(2)}, ladder=Ladder(("mend", "hold")), probation_steps=50,
        inhibit=(Inhibit(mute=("rate", "slow"), by_state=("acting", "probation")),),
    )  # fmt: skip

    def rows(count, loss, rate=lambda i: 1e-3, time=0.1):
        story.rows(
            *[
                {"train_loss_raw": loss + 0.01 * (i % 3), "learning_rate": rate(i)}
                | {"step_time": time}
                for i in range(count)
            ]
        )

    rows(200, 2.0)
    rows(1, 9.0)
    story.attempt, story.step = 1, 174
    rows(1, 2.05, lambda i: 1e-4, time=3.0)
    rows(50, 2.05, lambda i: 1e-3 * (0.1 + 0.9 * (i + 1) / 50))
    rows(120, 2.0)

    assert [a.rpartition("-")[2] for a in story.actions()] == ["rollback"]
    assert story.kinds("verify", "passed")
    assert story.state.machine == "nominal"
    assert "recovered" in story.kinds("incident", "closed")[0].reason


# ── T blindness ───────────────────────────────────────────────────────────────────────────────────


def test_when_everything_is_unknown_the_run_is_blind_and_never_nominal(tell):
    """All metrics were there and went missing: an incident, at SEV0 where a SEV0 rule is blind."""
    story = tell(blind_after_steps=50)
    story.frames(2.0, times=50)
    story.frames(None, times=60, grad=None)
    story.tick()

    assert {d.rule for d in story.kinds("blind")} == {"spike", "grad", "gone"}
    assert story.state.machine != "nominal"
    assert story.state.incident.severity == "SEV0"
    told = len(story.kinds("blind"))
    story.frames(None, times=60, grad=None)
    story.tick()
    assert len(story.kinds("blind")) == told


# ── all (state, event) pairs ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", machine.STATES)
@pytest.mark.parametrize("event", machine.EVENTS)
def test_every_pair_moves_as_the_table_says_or_is_an_audited_no_op(make_policy, state, event):
    """No pair raises, none is silent unless it stays where it is by the table."""
    run = State(machine=state)
    turn = Turn(make_policy(), run, Exited(0, 0))
    turn.move(event, "because")
    target = machine.move(machine.DEFAULT, state, event)

    assert run.machine == (target or state)
    said = [d for d in turn.decisions if d.kind == "state"]
    if target is None:
        assert [d.reason for d in said] == [f"{event} has no move in {state}"]
        assert said[0].data == {"event": event}
    elif target != state:
        assert said[0].data == {"event": event, "before": state, "after": target}
    else:
        assert said == []
