"""The runner: time, ranks, faults, and actions on a job that is not there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from supervise.catalog import action_classes
from supervise.core import step
from supervise.core.model import Checkpoint, PlanContext, Savepoints
from supervise.errors import ActionError
from supervise.lab import Coverage, FakeJob, MetricSeries, ScenarioRunner, parse_series, run_suite

QUIET = 'series: {train_loss_raw: "2x60", grad_global_norm: "1x60"}\nexpect: []\n'
SPIKE = 'series: {train_loss_raw: "2x30 6x3 2x60", grad_global_norm: "1x93"}\nexpect: []\n'
DEAD = (
    'series: {train_loss_raw: "2x30 nanx3", grad_global_norm: "1x33"}\n'
    'after_rollback: {train_loss_raw: "2x60", grad_global_norm: "1x60"}\nexpect: []\n'
)


def kinds(outcome, kind):
    return [(at, decision) for at, decision in outcome.result.log if decision.kind == kind]


def test_a_quiet_run_warms_up_and_a_spike_has_its_actions_performed_and_verified(outcome):
    quiet, spike = outcome(QUIET).result, outcome(SPIKE).result

    assert (len(quiet.states), quiet.states.index("nominal")) == (60, 9)
    assert (set(quiet.states), quiet.intents()) == ({"warming", "nominal"}, [])
    assert quiet.active == {"spike", "both", "grad", "dead"}
    assert spike.intents() == [(30, "snapshot"), (30, "lr_scale")]
    assert list(dict.fromkeys(spike.states)) == ["warming", "nominal", "acting", "probation"]
    assert [decision.kind for _, decision in spike.log].count("commit") == 2
    assert (spike.changes("spike", "fired"), spike.changes("spike", "cleared")) == ([30], [33])


def test_a_rollback_takes_the_step_back_and_the_attempt_on(outcome):
    found = outcome(DEAD)
    (committed,) = [d for _, d in kinds(found, "commit") if "step" in d.data["result"]]
    last = found.result.log[-1][1]

    assert found.result.intents()[2] == (30, "rollback")
    assert committed.data["result"]["step"] == 20
    assert committed.data["result"]["attempt"] == last.attempt == 1
    assert len(found.result.states) == 31 + 60
    assert found.result.states[-1] == "nominal"


def test_an_action_takes_its_time(outcome):
    """`delay: 1s` is ten frames of a tenth of a second; a paused job makes none."""
    found = outcome(f"{SPIKE}delay: 1s\n")

    assert [at for at, _ in found.result.intents()] == [30, 40]
    assert [at for at, _ in kinds(found, "commit")] == [40, 50]
    dead = DEAD.replace("nanx3", "nanx20").replace("1x33", "1x50")
    paused = outcome(f"{dead}delay: 1s\n")
    # The pause itself takes ten frames; what follows happens while the job stands still.
    assert [at for at, _ in paused.result.intents()] == [30, 40, 40, 40]


def test_an_action_without_an_outcome_is_in_doubt(outcome):
    """Its deadline is 120 s and 30 s more; the late words of operators end the hold."""
    found = outcome(
        SPIKE + "every: 5s\ninject: [{at: 0, lose_action: lr_scale}, {at: 80, command: release}]\n"
    )

    assert kinds(found, "in_doubt")[0][0] == 30 + 31
    assert found.result.states[79] == "holding"
    assert found.result.states[80] != "holding"


def test_a_supervisor_that_dies_after_any_kind_of_decision_goes_on_as_if_it_had_not(outcome):
    """The restarted one folds what was recorded."""
    whole = outcome(DEAD).result

    for kind in ("rule", "incident", "state", "intent", "commit", "verify", "notify_intent"):
        again = outcome(f"{DEAD}inject: [{{at: 0, crash_after: {kind}}}]\n").result
        assert again.replay_differences == []
        assert (repr(again.log), again.states) == (repr(whole.log), whole.states)


def test_a_fold_that_differs_is_a_failure(subject, monkeypatch):
    """The point of the fault: an engine that remembers what is not in the events."""
    found = subject("  - {name: a, series: {train_loss_raw: '2x30 6x3'}, expect: []}\n")
    form, _ = found.scenarios[0]
    runner = ScenarioRunner(found.policy, form)
    runner.run()
    runner.restart()
    assert runner.result.replay_differences == []

    def forgetful(*args):
        state, made = step(*args)
        return state, [decision for decision in made if decision.kind != "intent"]

    monkeypatch.setattr("supervise.core.engine.step", forgetful)
    runner.restart()

    assert "decision" in runner.result.replay_differences[0]
    assert "became" in runner.result.replay_differences[1]


def test_frames_are_lost_and_counted(outcome):
    found = outcome(SPIKE + "inject: [{at: 29, gap: 3}]\n")
    ((at, gap),) = kinds(found, "gap")

    assert (at, gap.data["count"]) == (32, 3)
    assert found.result.changes("spike", "fired") == [32]
    assert found.result.log[-1][1].step == outcome(SPIKE).result.log[-1][1].step


def test_nan_is_put_in(outcome):
    found = outcome(QUIET + "inject: [{at: 20, nan: [train_loss_raw]}]\n")
    longer = outcome(QUIET + "inject: [{at: 20, nan: [train_loss_raw], for: 4}]\n")

    assert found.result.changes("dead", "fired") == [20]
    assert found.result.changes("dead", "cleared") == [21]
    assert longer.result.changes("dead", "cleared") == [24]


def test_time_can_jump_and_the_job_be_in_a_phase(outcome):
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


def test_another_process_starts_from_nothing(outcome):
    policy = """\
version: supervise/v1
detectors: {z: {kind: robust_z, metric: train_loss_raw, gt: 6.0, window: 32, min: 16, freeze: 16}}
rules: [{id: odd, when: z, sev: SEV2}]
"""
    story = 'series: {train_loss_raw: "2x40 9"}\nnoise: {train_loss_raw: 0.1}\nexpect: []\n'

    assert outcome(story, policy).result.changes("odd", "fired") == [40]
    again = outcome(story + "inject: [{at: 30, probe_restart: true}]\n", policy)
    assert again.result.changes("odd", "fired") == []


def test_ranks_have_their_own_noise_and_can_fall_silent(outcome):
    two = outcome(SPIKE + "ranks: 2\n")
    silent = outcome(SPIKE + "ranks: 2\ninject: [{at: 10, silent_rank: 1}]\n")
    back = outcome(SPIKE + "ranks: 2\ninject: [{at: 10, silent_rank: 1, for: 20}]\n")

    for each in (two, silent, back):  # by the loss of the job, once
        assert len(each.result.changes("spike", "fired")) == 1
    assert {verb for _, verb in two.result.intents()} == {"snapshot", "lr_scale"}


AGAIN = """
  again: [snapshot, {relaunch: {at_least: 5}}, {verify: {within: 60, clear_for: 5}}]
"""


def test_a_relaunch_goes_on_behind_a_checkpoint_in_another_process(outcome, small):
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


# ── the notation of series, and the series that takes them ────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2.4", [2.4]),
        ("2.4x3", [2.4, 2.4, 2.4]),
        ("-1+1x3", [-1.0, 0.0, 1.0]),
        ("5-1e-1x2", [5.0, 4.9]),
        ("8*.5x3", [8.0, 4.0, 2.0]),
        ("_x2 nan", [None, None, math.nan]),
        ("inf -inf", [math.inf, -math.inf]),
        ("1e200*1e200x3", [1e200, math.inf, math.inf]),
        (" 1   2\n3 ", [1.0, 2.0, 3.0]),
        ("1x0 2", [2.0]),
    ],
)
def test_a_series_is_its_samples(text, wanted):
    """As in promtool, but that `x3` is three samples."""
    assert repr(parse_series(text)) == repr(wanted)


@pytest.mark.parametrize("text", ["1y3", "1+x3", "1x9999999", "1+1+1"])
def test_an_invalid_series_is_refused(text):
    with pytest.raises(ValueError, match="invalid piece"):
        parse_series(text)


def test_after_a_rollback_a_track_goes_on_unless_it_has_a_sequel():
    """The last sequel serves on; a metric that it leaves out is what it was at this step."""
    series = MetricSeries({"a": "1+1x4", "b": "5+1x4"}, [{"a": "70x2"}, {"a": "80"}])
    alone = MetricSeries({"a": "1+1x4"})
    for each in (series, alone):
        each.next_sample(0)
        each.next_sample(1)
        each.rolled_back(1)

    assert [alone.next_sample(0), alone.next_sample(1)] == [[3.0], [4.0]]
    assert [series.next_sample(1), series.next_sample(2)] == [[70.0, 6.0], [70.0, 7.0]]
    assert alone.is_exhausted and series.is_exhausted
    for times in (2, 3):
        series.rolled_back(times)
        assert series.next_sample(9) == [80.0, None]
        assert series.is_exhausted


# ── the job that is not there answers as a healthy one would ──────────────────────────────────────


GOOD = Checkpoint("ckpt-1", 40, 0, "/c/40.pt", True)
AIM = PlanContext(
    "inc-1",
    step=60,
    breach_step=58,
    attempt=0,
    world_size=1,
    severity="SEV0",
    good=(GOOD,),
    suspects=("a.tar",),
    shards=100,
)
NEEDS = {"lr_scale": {"set": 0.5}, "clip": {"factor": 0.3}}  # actions with keys that must be given


@pytest.fixture
def job():
    found = FakeJob(Savepoints(every=10, keep=3), 1)
    for _ in range(61):
        found.finish_step()
    return found


@pytest.mark.parametrize("verb", [v for v, a in action_classes().items() if not a.engine_step])
def test_every_action_is_content_with_it(verb, job):
    """Their own `perform` judges the answer; a new action must be known here."""
    action = action_classes()[verb](**NEEDS.get(verb, {}))

    assert action.perform(job, action.plan(AIM), key="k")


def test_a_rollback_goes_to_the_newest_savepoint_that_is_old_enough(job):
    assert list(job.kept) == [40, 50, 60]
    args = {"before_step": 55, "rewarm": {"start": 0.1, "steps": 10}}

    assert job.command("rollback", args, key="k", deadline_s=1)["step"] == 50
    assert (job.next_step, job.attempt, list(job.kept)) == (61, 1, [40, 50])
    assert job.lr_factor() == pytest.approx(0.1)
    for factor in (0.55, 1.0):
        for _ in range(5):
            job.finish_step()
        assert job.lr_factor() == pytest.approx(factor)
    with pytest.raises(ActionError, match="no savepoint before step 40"):
        job.command("rollback", {"before_step": 40}, key="k", deadline_s=1)


def test_a_pause_has_a_lease_and_a_skip_has_an_end(job):
    job.now_ns = 7
    job.command("pause", {"lease_s": 2.0}, key="k", deadline_s=1)
    assert job.paused_until == 2_000_000_007
    job.command("resume", {}, key="k", deadline_s=1)
    assert job.paused_until is None

    job.command("skip_step", {"count": 2}, key="k", deadline_s=1)
    left = []
    for _ in range(3):
        left.append(job.skipping)
        job.finish_step()
    assert left == [2, 1, 0]


# ── every expectation: what it takes for it to come true, and what is said when it does not ───────


# spike and both at 30, grad at 31 while spike mutes it; a runbook at 30; quiet from 33 on.
STORY = 'series: {train_loss_raw: "2x30 6x3 2x60", grad_global_norm: "1x30 10x3 1x60"}\nexpect:\n'

EXPECTED = [
    ("at: 30, rule: spike", None),
    ("at: 31, rule: spike, is: firing", "spike fired at 30; expected at 31"),
    ("between: [31, 40], rule: spike", "spike fired at 30; expected between 31 and 40"),
    ("by: 32, rule: spike, is: cleared", "spike cleared at 33; expected by 32"),
    ("between: [30, 32], rule: spike, is: on", None),
    ("between: [30, 33], rule: spike, is: on", "spike does not fire at 33"),
    ("by: 40, rule: spike, is: quiet", "spike fires at 30"),
    ("between: [33, 92], rule: spike, is: quiet", None),
    ("by: 40, rule: grad, is: muted", None),
    ("by: 40, rule: both, is: muted", "no muting of both by 40: it never occurred"),
    ("rule: spike, count: 1", None),
    ("rule: spike, count: 2", "spike fired 1 times, not 2: it occurred at 30"),
    ("at: 20, state: nominal", None),
    ("between: [20, 32], state: holding", "the state is nominal then acting, not holding"),
    ("end: true, state: probation", "the state is nominal, not probation"),
    ("by: 30, actions: [snapshot, lr_scale], count: 1", None),
    ("by: 30, actions: [lr_scale, snapshot]", "expected lr_scale, snapshot, in this order"),
    ("by: 29, actions: [lr_scale]", "actions were none; expected lr_scale"),
    ("by: 90, actions: [lr_scale], count: 2", "lr_scale 1 times, not 2"),
    ("by: 30, actions: []", "actions were snapshot, lr_scale"),
    ("at: 30, severity: SEV1", None),
    ("by: 90, severity: SEV0", "no incident of SEV0 by 90: it never occurred"),
    ("at: 30, budget: {all: 1, lr_scale: 1}", None),
    ("end: true, budget: {all: 2, rollback: 1}", "budget all: 1 used, budget rollback: 0 used"),
    ("by: 30, message: loss 6 at step 30", None),
    ("by: 20, message: loss 6 at step 30", "'loss 6 at step 30' by 20: it occurred at 30"),
    ("by: 40, suppressed: 'inhibit:spike'", None),
    ("never: [dead, rollback, SEV0, holding]", None),
    ("never: [spike]", "spike must not occur: it occurred at 30"),
    ("never: [probation]", "probation must not occur: it occurred at"),
    ("never: [spike], by: 29", None),
    ("never: [spike], between: [29, 31]", "spike must not occur: it occurred at 30"),
    ("at: 93, rule: spike", "the scenario ends at frame 92"),
]


@pytest.mark.parametrize(("keys", "said"), EXPECTED)
def test_an_expectation_holds_or_fails_with_its_place(keys, said, outcome):
    failures = outcome(f"{STORY}  - {{{keys}}}\n").failures

    assert len(failures) == (said is not None)
    for where, message in failures:
        assert where.endswith("p.test.yaml:7:9") and said in message


# ── what scenarios prove is counted: rules both ways, moves of the machine, budgets ───────────────


COVERED_QUIET = """\
  - {name: quiet, series: {train_loss_raw: '2x40', grad_global_norm: '1x40'}, expect: []}
"""
SPIKES = """\
  - {name: spikes, series: {train_loss_raw: '2x30 6x3 2x60 6x3 2x60'}, expect: []}
"""


def covered(subject):
    found = Coverage()
    found.add(subject, [outcome.result for outcome in run_suite(subject)])
    return found


def test_rules_are_shown_firing_and_quiet(subject):
    """A rule whose metrics a scenario does not have is not shown quiet by it."""
    one = covered(subject(COVERED_QUIET))
    assert one.rules == {"spike": [0, 1], "both": [0, 1], "grad": [0, 1], "dead": [0, 1]}

    found = covered(subject(COVERED_QUIET + SPIKES))

    assert found.rules == {"spike": [1, 1], "both": [0, 1], "grad": [0, 1], "dead": [0, 2]}
    assert found.parts()["rules fire"] == (1, 4)
    assert found.parts()["rules stay quiet"] == (4, 4)
    missing = list(found.missing())
    assert any(line.endswith("p.yaml:10:5: both never fires") for line in missing), missing
    assert not any("spike" in line for line in missing)


def test_moves_and_budgets_are_counted(subject):
    """The second spike finds the budget of one lr_scale spent, and holds."""
    found = covered(subject(COVERED_QUIET + SPIKES))
    missing = list(found.missing())

    assert found.moves["p"]["launching", "first_frame"] == 2
    assert found.moves["p"]["nominal", "run"] == 1
    assert found.moves["p"]["acting", "hold"] == 1
    assert "p: 'released' never occurs in holding" in missing
    assert found.budgets == {"p": {"all": 0, "lr_scale": 1, "rollback": 0}}
    assert "p: budget rollback is never used up" in missing
    assert "p: budget lr_scale is never used up" not in missing
    shown, total = map(sum, zip(*found.parts().values(), strict=True))
    assert found.percent() == 100.0 * shown / total < 60


def test_a_policy_that_no_scenario_is_about_is_not_covered(subject):
    """What it has counts, and what another policy shows is not shown for it."""
    found = covered(subject(COVERED_QUIET + SPIKES))
    shown = found.parts()

    found.require(replace(subject(COVERED_QUIET).policy, name="other"))

    assert found.parts()["moves"] == (shown["moves"][0], 2 * shown["moves"][1])
    assert found.parts()["budgets"] == (1, 6)
    assert "other: 'first_frame' never occurs in launching" in found.missing()
    assert "other: budget lr_scale is never used up" in found.missing()
