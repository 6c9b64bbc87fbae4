"""The supervisor is killed, or replays: failure groups G and O; and every pair of state and event.

The groups are those of policy.md section 12, as in the other files of failures.
"""

from __future__ import annotations

import pytest

from supervise.core import engine
from supervise.core.model import state_machine
from supervise.core.model.events import Exited, Finished, Gap, Notice, OperatorCommand
from supervise.core.model.policy import Inhibit
from supervise.core.replay import record
from supervise.core.state.run_state import State, StepContext
from supervise.detectors.absence import Absence
from supervise.detectors.join import Join
from supervise.detectors.nonfinite import Nonfinite
from supervise.detectors.ratio import Ratio
from supervise.detectors.robust_z import RobustZ
from supervise.detectors.sequence import Sequence

from .conftest import NAN, above, rule_on


def everything(tell):
    """A story with every kind of event and nearly every kind of decision in it."""
    detectors = {
        "high": above("train_loss_raw", 5.0),
        "huge": above("train_loss_raw", 50.0),
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
    wanted = "rule incident state suppressed intent commit verify notify_intent gap blind note"
    assert kinds >= set(wanted.split())
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
