"""The benchmarks run by hand: they must at least import and start."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "benchmarks"
LOOK = """
import ast, importlib, sys, types
for name in sys.argv[1:]:
    script = importlib.import_module(name)
    for node in ast.walk(ast.parse(open(script.__file__).read())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = getattr(script, node.value.id, None)
            ours = isinstance(owner, types.ModuleType) and owner.__name__.startswith("supervise")
            if ours and not hasattr(owner, node.attr):
                sys.exit(f"{name}.py:{node.lineno}: {owner.__name__} has no {node.attr}")
"""


@pytest.mark.parametrize("folder", ["", "proving"])
def test_what_they_take_from_the_project_is_there(folder):
    """Modules, and what they use of these: nothing else runs most of these scripts."""
    names = sorted(path.stem for path in (FOLDER / folder).glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *names], cwd=FOLDER / folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {"": "recovery", "proving": "record"}[folder] in names


def test_two_trees_are_judged_by_their_intervals(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import against

    noisy = (0.9, 1.2)  # of added time
    verdicts = {
        (0.98, 1.02): against.NOT_MORE,
        (1.05, 1.09): against.MORE,
        (0.99, 1.06): against.INCONCLUSIVE,
    }
    assert {own: against.verdict(own, noisy, 0.03) for own in verdicts} == verdicts
    assert against.verdict((0.98, 1.02), (1.1, 1.4), 0.03) == against.MORE


def test_a_suite_that_is_not_judged_without_its_runs_is_refused(monkeypatch, tmp_path, capsys):
    """Its part of the page is what its runs said, with the actions in them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import leadtime

    page = leadtime.PAGE.read_text()
    argv = ["leadtime.py", "--judge-only", "--suites", "dense-all", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        leadtime.main()
    assert ended.value.code == 2
    assert "--judge-only is for dense and moe, not dense-all" in capsys.readouterr().err
    assert leadtime.PAGE.read_text() == page


def test_a_supervised_run_misses_above_the_undisturbed_and_the_unsupervised(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import frameworks as bench

    undisturbed = [bench.Result(0, loss, (), 0, False) for loss in (2.0, 2.01)]
    deviation = bench.deviation(undisturbed)

    assert deviation == pytest.approx(0.00707, rel=1e-2)
    assert bench.worse(bench.Result(0, 2.1, (), 0, False), undisturbed[0]) == pytest.approx(0.05)
    assert bench.worse(bench.Result(78, None, (), 0, True), undisturbed[0]) == float("inf")
    assert not bench.misses(0.02, 0.5, deviation)  # within 1.5 % and the deviation of the seeds
    assert bench.misses(0.03, 0.5, deviation)
    assert not bench.misses(0.03, 0.025, deviation)  # the fault is no harm to cure
    assert bench.misses(0.018, 0.001, deviation)  # dearer than doing nothing


@pytest.fixture
def scorer(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER / "proving"))
    import score

    return score


def test_harm_is_measured_against_the_undisturbed_run(scorer, monkeypatch, tmp_path):
    """A lasting loss and an infinite one are harm; noise and the loss of a bad batch itself not."""
    import record
    from grid import Program

    program = Program("made_up", 0, 40)
    monkeypatch.setattr(scorer, "RECORDINGS", tmp_path)
    runs, rows, before = {}, [], [2.0] * 10
    for name, fault, drill, losses in (
        ("healthy-0", "healthy", "", [2.0] * 40),
        ("healthy-1", "healthy", "", [2.01] * 40),
        ("twin", "rate_x1.2", "nan_grad", before + [2.01] * 10 + [2.0] * 20),
        ("worse", "rate_x30", "nan_grad", before + [2.1] * 30),
        ("nan", "nan_gradient", "nan_grad", before + [float("nan")] * 30),
        ("own", "random_batch", "bad_batch", [*before, 9.0] + [2.0] * 29),
        ("burst", "random_batch", "bad_batch", [*before, 9.0, 9.0] + [2.0] * 28),
    ):
        runs[name] = {"fault": fault, "seed": int(name == "healthy-1"), "row": 10}
        runs[name] |= {"final_loss": losses[-1], "drill": {"fault": drill, "params": {"steps": 1}}}
        rows += [
            {"run": name, "rank": 0, "step": step, "attempt": 1, "train_loss_raw": loss}
            for step, loss in enumerate(losses)
        ]
    record.save(program, runs, rows, tmp_path)

    harms = scorer.harms(program)

    assert {name for name, harm in harms.items() if harm.harmed} == {"worse", "nan", "burst"}
    assert harms["worse"].lost == pytest.approx(3.0, abs=1e-4)  # 0.1 nats over 30 rows
    assert harms["worse"].half == 24  # the 15th of these
    assert harms["burst"].half == 11


def test_short_steps_are_compared_on_runs_with_the_committed_losses(scorer, monkeypatch, tmp_path):
    """A run with other losses is another run; one that is acted on too late is named."""
    import record
    import short_steps
    from grid import Program

    from supervise.lab import BacktestOutcome

    program, folder = Program("made_up", 0, 40), tmp_path / "short"
    monkeypatch.setattr(scorer, "RECORDINGS", tmp_path)
    monkeypatch.setattr(short_steps, "RECORDINGS", tmp_path)
    before, runs, rows = [2.0] * 10, {}, []
    for name, seed, losses in (
        ("healthy-0", 0, [2.0] * 40),
        ("healthy-1", 1, [2.01] * 40),
        ("late-0", 0, before + [2.1] * 30),
        ("other-0", 0, before + [2.2] * 30),
    ):
        fault = "healthy" if name.startswith("healthy") else "rate_x30"
        runs[name] = {"fault": fault, "seed": seed, "row": 10, "drill": {"fault": "nan_grad"}}
        runs[name] |= {"final_loss": losses[-1], "step_ms": 42.0, "share": 0.005}
        rows += [
            {"run": name, "rank": 0, "step": step, "attempt": 1, "train_loss_raw": loss}
            for step, loss in enumerate(losses)
        ]
    record.save(program, runs, rows, tmp_path)
    rows[-1] = {**rows[-1], "train_loss_raw": 2.3}
    record.save(program, runs, rows, folder)

    def ordered(step):
        return SimpleNamespace(step=step, rule="rule", touches_job=True)

    def outcomes(acted_at):
        step = {"late-0": acted_at, "other-0": 11}
        return [
            BacktestOutcome(name, "nano", 40, actions=[ordered(step[name])] if name in step else [])
            for name in runs
        ]

    length = short_steps.Length()
    short_steps.compare(length, program, folder, outcomes(30), outcomes(12))

    assert length.allowed_ms == 21.0
    assert length.differ == ["made_up other-0"]
    assert (length.here.acted, length.committed.acted, length.here.harmed) == (0, 1, 1)
    assert length.here.healthy == 2
    assert length.lost == ["made_up late-0: rule at 30; committed: rule at 12; harm 10, half 24"]


def test_steps_of_a_program_are_lengthened(tmp_path):
    """A sleep behind the optimizer's step; one that took longer by itself gets none."""
    script = """
import time, torch
from common import arguments
options = arguments(6)
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
ends = []
for step in range(options.steps):
    time.sleep(0.08 if step == 3 else 0.0)
    optimizer.step()
    ends.append(time.monotonic())
print(*(b - a for a, b in zip(ends, ends[1:])))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "--step-ms=40"],
        cwd=FOLDER / "proving" / "programs",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    times = [float(each) for each in done.stdout.split()]
    assert min(times) >= 0.039
    assert times[2] >= 0.08


@pytest.fixture
def live(scorer):
    import live

    return live


@pytest.mark.chaos
def test_branches_share_their_past_and_differ_by_their_remedy(live):
    """The real forks of a real program: each remedy shows first in the row that it is to."""
    from grid import Cell, Program

    program = Program("byte_gpt_noisy", 2, 30)
    of = [Cell(program, "rate_x30", 0, 12)]

    found = live.run(program, of)

    losses = {name: result["losses"] for name, result in found.items()}
    twin, ill = losses["twin"], losses["rate_x30"]
    firsts = {
        name: next(i for i, pair in enumerate(zip(run, ill, strict=True)) if len(set(pair)) > 1)
        for name, run in losses.items()
        if run is not ill
    }
    held = {f"rate_x30.{name}": 16 for name in ("skip", "hold_rate")}  # the first other update: 15
    at_once = {f"rate_x30.{name}_now": 14 for name in ("skip", "hold_rate")}
    restored = {f"rate_x30.restore_{steps}": 15 for steps in (10, 25, 100)}
    assert firsts == {"twin": 13, **at_once, **held, **restored}
    assert losses["rate_x30.restore_100"][15] == pytest.approx(twin[0], abs=0.2)  # from the start

    kept = live.judged(program, of, found)["faults"]["rate_x30"]["branches"]

    assert set(kept) == set(live.BRANCHES)
    assert kept["nothing"]["lost"] == pytest.approx(sum(ill[12:]) - sum(twin[12:]), abs=0.01)
    again = sum(ill[12:15]) + sum(twin[:15])  # as many updates, the last 15 steps not reached
    assert kept["relaunch"]["lost"] == pytest.approx(again - sum(twin[12:]), abs=0.01)


@pytest.mark.parametrize(
    ("runbook", "step", "wanted"),
    [
        ("rollback-and-rewarm", 62, ("restore_10", 5.0)),  # from 50, 2 rows after the fault
        ("rollback-and-rewarm", 84, ("restore_25", 6.0 - 1.0 + 9.0)),  # from 50, late
        ("soften", 60, ("hold_rate_now", 1.0)),
        ("soften", 62, ("hold_rate", 2.0)),
        ("soften", 79, ("nothing", 40.0)),  # the rate is what it was again
        ("relaunch-and-rewarm", 63, ("relaunch", 7.0 - 1.0 + 9.0)),
        ("page-with-evidence", 63, ("nothing", 40.0)),
    ],
)
def test_a_policy_is_scored_by_the_branch_of_its_remedy(live, runbook, step, wanted):
    from supervise.lab import ScoredAction, load_in_shadow_mode

    lost = {"nothing": 40, "restore_10": 5, "restore_25": 6, "hold_rate": 2, "relaunch": 7}
    lost["hold_rate_now"] = 1
    branches = {name: {"lost": each} for name, each in lost.items()}
    known = {"row": 60, "before": 1.0, "branches": branches}
    act = ScoredAction(step, "SEV1", "rule", "1", runbook, True, True, False, step)

    found = live.looked_up(known, "rate_x30", act, load_in_shadow_mode("nano"), 9.0)

    assert found == wanted


@pytest.mark.chaos
def test_the_script_for_a_device_works_without_one():
    """Each part gives its row; of no device is anything claimed but the bytes of a rollback."""
    command = [sys.executable, "device.py", "--device", "cpu", "--quick"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    subjects = ("overhead", "host waits", "rollback", "attention fault")

    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()[-len(subjects) :]
    assert all(row.startswith(subject) for row, subject in zip(rows, subjects, strict=True))
    assert [row.endswith("PASS") for row in rows] == [False, False, True, False]
    assert "FAIL" not in done.stdout


def test_commands_to_ranks_that_get_no_answer_in_time_are_said_and_the_job_is_ended():
    command = [sys.executable, "fenced_training.py", "--ranks", "1", "--limit", "0.5"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=120)

    assert done.returncode == 1, done.stderr
    text = "not complete: 0 of 300 commands in 0.5 s, which ran out before step 60 of all ranks"
    assert text in done.stdout
