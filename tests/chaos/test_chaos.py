"""A few scenarios of the chaos driver, one seed each; `make chaos` runs all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DRIVE = Path(__file__).with_name("drive.py")
# The other areas have tests of their own in the suite.
SHORT = ("closed_descriptors", "few_files", "small_disk", "slow_disk", "short_writes")


def test_short_scenarios_pass_and_one_that_fails_has_the_command_that_repeats_it():
    """The job is not harmed, its code comes out, and nothing is left behind."""
    command = [sys.executable, str(DRIVE), "--seed", "0", "--scenario", *SHORT, "always_fails"]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert [line.partition(" --scenario ")[2] for line in failed] == ["always_fails --seed 0"], (
        done.stdout + done.stderr
    )
    assert "exit code 7, not 8" in done.stdout
