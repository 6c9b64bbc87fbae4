"""The disk under the run directory is full in the middle of a run.

Acting goes on from the reserve, which nobody else can take; people are told at once.
"""

from __future__ import annotations

import errno
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.supervised_run import Records, tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

CODE = 7


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB; skips where mounting is not permitted."""
    where = tmp_path / "small"
    where.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", where]
        subprocess.run(mount, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"mounting a tmpfs is not permitted here: {error.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", where], check=False, capture_output=True)


def fill(path: Path) -> None:
    """Write until there is no room for one more byte."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC, error


def test_a_full_disk_is_reported_at_once_and_acting_goes_on(small_disk, supervise, halves):
    """What takes all that is left, again and again, does not get the reserve."""
    directory = small_disk / "run"
    run = Records(directory)
    job = tiny("--steps", 300, "--sleep", 0.01, "--exit", CODE)
    options = ("--quiet", "--policy", halves, "--run-dir", directory)
    drill = ("--drill", "lr_spike:factor=3000,steps=8@200")
    running = supervise.start(*options, *drill, "--", *job)
    wait_until(lambda: any(r["step"] > 5 for r in run.kinds("state")), "step 5")
    full = 0
    while running.poll() is None:
        fill(small_disk / f"filler-{full}")
        full += 1
        time.sleep(0.02)
    _, errors = running.communicate(timeout=120)

    assert running.returncode == CODE, errors
    assert errors.startswith("supervise: SEV1 no space is left for the record of this run"), errors
    assert f"MB on {small_disk}; what fills it: du -xm {small_disk} | sort -n | tail; " in errors
    [note] = run.kinds("note", "record-space-short")
    details = note["data"]["details"]
    assert details["reserve_bytes"] > 64 * 4096 and details["seconds"] > 0
    assert run.intents[0] == "lr_scale" and run.kinds("commit")
    assert supervise("replay", directory).stdout.startswith("same: ")
    assert supervise("audit", "verify", directory).returncode == 0
