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
