"""The benchmarks run by hand: they must at least import and start."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "benchmarks"


def test_what_they_import_is_there():
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    text = "import sys\nfor name in sys.argv[1:]: __import__(name)"
    done = subprocess.run(
        [sys.executable, "-c", text, *names], cwd=FOLDER, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "savepoints" in names and "recovery" in names


def test_two_trees_are_judged_by_their_intervals():
    """Within the margin, beyond it, or across it: inconclusive."""
    sys.path.insert(0, str(FOLDER))
    try:
        import against
    finally:
        sys.path.remove(str(FOLDER))
    known = (0.9, 1.2)  # of added time, which is noisy
    verdicts = {
        (0.98, 1.02): against.NOT_MORE,
        (1.05, 1.09): against.MORE,
        (0.99, 1.06): against.INCONCLUSIVE,
    }

    assert {own: against.verdict(own, known, 0.03) for own in verdicts} == verdicts
    assert against.verdict((0.98, 1.02), (1.1, 1.4), 0.03) == against.MORE


@pytest.fixture
def scorer(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER / "proving"))
    import score

    return score


def test_harm_is_measured_against_the_undisturbed_run(scorer, monkeypatch, tmp_path):
    """A lasting loss, an infinite one and a short high one are harm; a twin's noise is none."""
    import record
    from grid import Program

    program = Program("made_up", 0, 40)
    monkeypatch.setattr(record, "RECORDINGS", tmp_path)
    monkeypatch.setattr(scorer, "RECORDINGS", tmp_path)
    known, rows = {}, []

    def add(name, fault, seed, losses):
        known[name] = {"fault": fault, "seed": seed, "row": 10, "final_loss": losses[-1]}
        rows.extend(
            {"run": name, "rank": 0, "step": step, "attempt": 1, "train_loss_raw": loss}
            for step, loss in enumerate(losses)
        )

    add("healthy-0", "healthy", 0, [2.0] * 40)
    add("healthy-1", "healthy", 1, [2.01] * 40)
    add("twin", "rate_x1.2", 0, [2.0] * 10 + [2.01] * 10 + [2.0] * 20)
    add("worse", "rate_x30", 0, [2.0] * 10 + [2.1] * 30)
    add("nan", "nan_gradient", 0, [2.0] * 10 + [float("nan")] * 30)
    add("burst", "random_batch", 0, [2.0] * 10 + [9.0] + [2.0] * 29)
    record.save(program, known, rows)

    found = scorer.harms(program)

    harmed = {name: harm.harmed for name, harm in found.items()}
    assert harmed == {"twin": False, "worse": True, "nan": True, "burst": True}
    assert found["worse"].lost == pytest.approx(3.0, abs=1e-4)  # 0.1 nats over 30 rows
    assert found["worse"].half == 24  # the 15th of these
    assert found["burst"].half == 10
