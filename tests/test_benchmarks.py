"""Nothing runs the benchmarks but people: they must at least find what they measure."""

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
