"""The runner: time, ranks, faults, and actions on a job that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from supervise.catalog import Subject
from supervise.core.model import Decision
from supervise.lab import Outcome, ScenarioRunner, scenario_engine

Play = Callable[..., Outcome]
QUIET = 'series: {train_loss_raw: "2x60", grad_global_norm: "1x60"}\nexpect: []\n'
SPIKE = 'series: {train_loss_raw: "2x30 6x3 2x60", grad_global_norm: "1x93"}\nexpect: []\n'
DEAD = (
    'series: {train_loss_raw: "2x30 nanx3", grad_global_norm: "1x33"}\n'
    'after_rollback: {train_loss_raw: "2x60", grad_global_norm: "1x60"}\nexpect: []\n'
)


def kinds(outcome: Outcome, kind: str) -> list[tuple[int, Decision]]:
    return [(at, decision) for at, decision in outcome.result.log if decision.kind == kind]


def states(outcome: Outcome) -> list[str]:
    return list(dict.fromkeys(outcome.result.states))


def test_a_quiet_run_warms_up_and_nothing_else(outcome: Play) -> None:
    found = outcome(QUIET)

    assert len(found.result.states) == 60
    assert states(found) == ["warming", "nominal"]
    assert found.result.states.index("nominal") == 9
    assert found.result.intents() == []
    assert found.result.active == {"spike", "both", "grad", "dead"}


def test_actions_are_performed_and_verified(outcome: Play) -> None:
    found = outcome(SPIKE)

    assert found.result.intents() == [(30, "snapshot"), (30, "lr_scale")]
    assert states(found) == ["warming", "nominal", "acting", "probation"]
    assert len(kinds(found, "commit")) == 2
    assert found.result.changes("spike", "fired") == [30]
    assert found.result.changes("spike", "cleared") == [33]


def test_a_rollback_takes_the_step_back_and_the_attempt_on(outcome: Play) -> None:
    """The newest savepoint that is old enough: 30 - 5 = before 25, kept every 5 steps."""
    found = outcome(DEAD)
    (committed,) = [d for _, d in kinds(found, "commit") if "step" in d.data["result"]]
    last = found.result.log[-1][1]

    assert found.result.intents()[2] == (30, "rollback")
    assert committed.data["result"]["step"] == 20
    assert committed.data["result"]["attempt"] == last.attempt == 1
    assert len(found.result.states) == 31 + 60
    assert found.result.states[-1] == "nominal"


def test_an_action_takes_its_time(outcome: Play) -> None:
    """`delay: 1s` is ten frames of a tenth of a second; a paused job makes none."""
    found = outcome(f"{SPIKE}delay: 1s\n")

    assert [at for at, _ in found.result.intents()] == [30, 40]
    assert [at for at, _ in kinds(found, "commit")] == [40, 50]
    dead = DEAD.replace("nanx3", "nanx20").replace("1x33", "1x50")
    paused = outcome(f"{dead}delay: 1s\n")
    # The pause itself takes ten frames; what follows happens while the job stands still.
    assert [at for at, _ in paused.result.intents()] == [30, 40, 40, 40]


def test_an_action_without_an_outcome_is_in_doubt(outcome: Play) -> None:
    """Its deadline is 120 s and 30 s more; the late words of operators end the hold."""
    found = outcome(
        SPIKE + "every: 5s\ninject: [{at: 0, lose_action: lr_scale}, {at: 80, command: release}]\n"
    )

    assert kinds(found, "in_doubt")[0][0] == 30 + 31
    assert found.result.states[79] == "holding"
    assert found.result.states[80] != "holding"


KINDS = ["rule", "incident", "state", "intent", "commit", "verify", "notify_intent"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("story", [SPIKE, DEAD])
def test_a_supervisor_that_dies_goes_on_as_if_it_had_not(
    kind: str, story: str, outcome: Play
) -> None:
    """After any kind of decision; the restarted one folds what was recorded."""
    whole = outcome(story).result
    again = outcome(f"{story}inject: [{{at: 0, crash_after: {kind}}}]\n").result

    assert again.replay_differences == []
    assert repr(again.log) == repr(whole.log)
    assert again.states == whole.states


def test_a_fold_that_differs_is_a_failure(
    subject: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The point of the fault: an engine that remembers what is not in the events."""
    found = subject("  - {name: a, series: {train_loss_raw: '2x30 6x3'}, expect: []}\n")
    form, _ = found.scenarios[0]
    runner = ScenarioRunner(found.policy, form)
    runner.run()
    runner.restart()
    assert runner.result.replay_differences == []

    real = scenario_engine.step

    def forgetful(*args: Any) -> Any:
        state, made = real(*args)
        return state, [decision for decision in made if decision.kind != "intent"]

    monkeypatch.setattr(scenario_engine, "step", forgetful)
    runner.restart()

    assert "decision" in runner.result.replay_differences[0]
    assert "became" in runner.result.replay_differences[1]


def test_frames_are_lost_and_counted(outcome: Play) -> None:
    """The job made them; we have not seen them."""
    found = outcome(SPIKE + "inject: [{at: 29, gap: 3}]\n")
    ((at, gap),) = kinds(found, "gap")

    assert (at, gap.data["count"]) == (32, 3)
    assert found.result.changes("spike", "fired") == [32]
    assert found.result.log[-1][1].step == outcome(SPIKE).result.log[-1][1].step


def test_nan_is_put_in(outcome: Play) -> None:
    """For one frame, unless it says for how many."""
    found = outcome(QUIET + "inject: [{at: 20, nan: [train_loss_raw]}]\n")
    longer = outcome(QUIET + "inject: [{at: 20, nan: [train_loss_raw], for: 4}]\n")

    assert found.result.changes("dead", "fired") == [20]
    assert found.result.changes("dead", "cleared") == [21]
    assert longer.result.changes("dead", "cleared") == [24]


def test_time_can_jump_and_the_job_be_in_a_phase(outcome: Play) -> None:
    """An hour in which nobody ran is no silence; one in a checkpoint has a grace."""
    policy = """\
version: supervise/v1
detectors: {still: {kind: absence, after: {min: 10s, p99_multiple: 3}, grace: {eval: 60s}}}
rules: [{id: stuck, when: still, sev: SEV0}]
"""
    story = 'series: {step_time: "1x100 _x300 1x9"}\nexpect: []\n'

    assert outcome(story, policy).result.changes("stuck", "fired") == [209]
    jump = outcome(story.replace("_x300 ", "") + "inject: [{at: 50, clock_jump: 1h}]\n", policy)
    assert jump.result.changes("stuck", "fired") == []
    graced = outcome(story + "inject: [{at: 95, phase: eval, for: 300}]\n", policy)
    assert graced.result.changes("stuck", "fired") == []


def test_another_process_starts_from_nothing(outcome: Play) -> None:
    policy = """\
version: supervise/v1
detectors: {z: {kind: robust_z, metric: train_loss_raw, gt: 6.0, window: 32, min: 16, freeze: 16}}
rules: [{id: odd, when: z, sev: SEV2}]
"""
    story = 'series: {train_loss_raw: "2x40 9"}\nnoise: {train_loss_raw: 0.1}\nexpect: []\n'

    assert outcome(story, policy).result.changes("odd", "fired") == [40]
    again = outcome(story + "inject: [{at: 30, probe_restart: true}]\n", policy)
    assert again.result.changes("odd", "fired") == []


def test_ranks_have_their_own_noise_and_can_fall_silent(outcome: Play) -> None:
    two = outcome(SPIKE + "ranks: 2\n")
    silent = outcome(SPIKE + "ranks: 2\ninject: [{at: 10, silent_rank: 1}]\n")
    back = outcome(SPIKE + "ranks: 2\ninject: [{at: 10, silent_rank: 1, for: 20}]\n")

    for each in (two, silent, back):  # by the loss of the job, once
        assert len(each.result.changes("spike", "fired")) == 1
    assert {verb for _, verb in two.result.intents()} == {"snapshot", "lr_scale"}


AGAIN = """
  again: [snapshot, {relaunch: {at_least: 5}}, {verify: {within: 60, clear_for: 5}}]
"""


def test_a_relaunch_goes_on_behind_a_checkpoint_in_another_process(
    outcome: Play, small: str
) -> None:
    """A checkpoint has to be told of; the new process is announced, its steps follow it."""
    policy = small.replace("run: back}", "run: again}").replace("calm, back, hold", "calm, hold")
    policy = policy.replace("\n  back:", AGAIN.rstrip() + "\n  back:")
    policy = policy.replace("rollback: {max: 2}", "rollback: {max: 2}, restart: {max: 1}")
    policy += "job: {relaunch: {args: [--resume]}}\n"
    without, told = (
        outcome(DEAD, policy),
        outcome(f"{DEAD}inject: [{{at: 15, checkpoint: 12}}]\n", policy),
    )

    assert [verb for _, verb in without.result.intents()] == ["snapshot"]
    assert [verb for _, verb in told.result.intents()] == ["snapshot", "relaunch"]
    ((_, commit),) = (row for row in kinds(told, "commit") if "pid" in row[1].data["result"])
    assert commit.data["result"]["attempt"] == 1
    assert told.result.states[-1] == "nominal"
    assert told.result.replay_differences == []
