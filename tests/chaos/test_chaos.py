"""A few scenarios of the chaos driver, one seed each; `make chaos` runs all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DRIVE = Path(__file__).with_name("drive.py")
SHORT = (
    *("job_dies_of", "signal_is_handled", "closed_descriptors", "small_disk", "few_processes"),
    *("slow_disk", "short_writes", "few_files"),
)


def drive(*names: str, seed: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DRIVE), "--scenario", *names, "--seed", str(seed)]
    return subprocess.run(command, capture_output=True, text=True)


def test_short_scenarios():
    """The job is not harmed, its code comes out, and nothing is left behind."""
    done = drive(*SHORT, seed=0)

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_scenario_that_fails_is_told_with_what_repeats_it():
    """Exit code 1, the reason, and the command to paste."""
    done = drive("always_fails", seed=3)

    assert done.returncode == 1
    assert "exit code 7, not 8" in done.stdout
    assert "drive.py --scenario always_fails --seed 3" in done.stdout
