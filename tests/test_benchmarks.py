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


def test_the_cost_of_the_probe_is_measured_beside_its_floor():
    command = ["overhead.py", "--pairs", "10", "--sequences", "1", "--only", "nano, light set"]
    done = subprocess.run(
        [sys.executable, *command, "--seconds", "0", "--rounds", "0"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr  # so few pairs judge nothing
    rows = [line.split() for line in done.stdout.splitlines()]
    floor = [row for row in rows if row[:2] == ["its", "floor"]]
    assert len(floor) == 1, done.stdout + done.stderr
    assert 0 < float(floor[0][2]) < 5000  # us, its own time
    assert any(row[-1:] in (["PASS"], ["FAIL"]) for row in rows), done.stdout


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
