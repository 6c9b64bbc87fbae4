"""The supervisor is killed, or replays: failure groups G and O; and every pair of state and event.

The groups are those of policy.md section 12, as in the other files of failures.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from supervise.core import engine
from supervise.core.model import state_machine
from supervise.core.model.events import Exited, Finished, Gap, Notice, OperatorCommand
from supervise.core.model.policy import Inhibit
from supervise.core.replay import decisions, record
from supervise.core.state.run_state import State, StepContext
from supervise.detectors.absence import Absence
from supervise.detectors.join import Join
from supervise.detectors.nonfinite import Nonfinite
from supervise.detectors.ratio import Ratio
from supervise.detectors.robust_z import RobustZ
from supervise.detectors.sequence import Sequence

from .conftest import NAN, Above, rule_on

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
        detectors=detectors,
        rules=rules,
        blind_after_steps=20,
        hold_reminder_s=600.0,
        inhibit=(Inhibit(mute=("high",), by_rule="huge"),),
    )
    story.frames(2.0, 2.1, 1.9, times=20)
    story.send(Notice(story.at_ns, "collector-off", "the optimizer collector is off"))
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
    story.send(OperatorCommand(story.at_ns, "ann", "release"))
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
        "rule",
        "incident",
        "state",
        "suppressed",
        "intent",
        "commit",
        "verify",
        "notify_intent",
        "gap",
        "blind",
        "note",
    }
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
names = ["engine", "detection.rank_monitor", "incidents.diagnosis", "analysis.spike_classifier",
         "runbooks.runner", "handlers.rule_fired", "model.state_machine", "replay",
         "state.run_state"]
random.Random(int(sys.argv[1])).shuffle(names)
for name in names:
    importlib.import_module("supervise.core." + name)
import hashlib, json
from supervise.catalog import load_policy
from supervise.core import replay
from supervise.core.model.events import Announced, Exited, Frame, Launched
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
            [sys.executable, "-c", REPLAYED, seed],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        found.add(done.stdout)

    assert len(found) == 1


def test_decisions_are_json_and_the_same_twice(tell):
    """Records have a form that hashes alike."""

    def digest():
        log = [record(d) for d in everything(tell).log]
        return hashlib.sha256(json.dumps(log, allow_nan=False).encode()).hexdigest()

    assert digest() == digest()


# ── all (state, event) pairs ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", state_machine.STATES)
@pytest.mark.parametrize("event", state_machine.EVENTS)
def test_every_pair_moves_as_the_table_says_or_is_an_audited_no_op(make_policy, state, event):
    """No pair raises, none is silent unless it stays where it is by the table."""
    run = State(machine=state)
    turn = StepContext(make_policy(), run, Exited(0, 0))
    turn.move(event, "because")
    target = state_machine.move(state_machine.DEFAULT, state, event)

    assert run.machine == (target or state)
    said = [d for d in turn.decisions if d.kind == "state"]
    if target is None:
        assert [d.reason for d in said] == [f"{event} has no move in {state}"]
        assert said[0].data == {"event": event}
    elif target != state:
        assert said[0].data == {"event": event, "before": state, "after": target}
    else:
        assert said == []
