"""The disk under the run directory is full in the middle of a run.

The job goes on, nothing is decided that is not on disk and acted on, and whatever is asked
afterwards says so: status, why, replay, receipt.
"""

from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path

import pytest

from supervise.core.model.events import Frame
from supervise.store import journal
from tests.support.supervised_run import Records, tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

CODE = 7
LAST = 299


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB; skips where mounting is not permitted."""
    where = tmp_path / "small"
    where.mkdir()
    options = ["-t", "tmpfs", "-o", "size=4m", "tmpfs", str(where)]
    try:
        done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def fill(path: Path) -> None:
    """Write until there is no room for one more byte."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC, error


def test_a_full_disk_ends_the_acting_and_every_command_says_so(small_disk, supervise, halves):
    """A pause that is in force then can still be ended; nothing else is done; no false replay."""
    directory = small_disk / "run"
    run = Records(directory)
    drill = f"lr_spike:factor=3000,steps=8@{LAST - 100}"
    job = tiny("--steps", LAST + 1, "--sleep", 0.01, "--exit", CODE)
    options = ("--policy", halves, "--run-dir", directory, "--drill", drill)
    running = supervise.start(*options, "--", *job)
    wait_until(lambda: any(r["step"] > 5 for r in run.kinds("state")), "step 5")
    wait_until(lambda: run.kinds("identity"), "the last record that comes by itself")
    assert supervise("pause", directory).returncode == 0
    filler = small_disk / "filler"
    fill(filler)
    [note] = wait_until(lambda: run.kinds("note", "journal-incomplete"), "the note")
    filler.unlink()

    resumed, refused = supervise("resume", directory), supervise("lr", directory, "0.5")
    status = " ".join(supervise("status", directory).stdout.split())
    _, errors = running.communicate(timeout=120)

    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert (refused.returncode, "No space left" in refused.stderr) == (1, True), refused
    assert f"record the journal is incomplete from event {note['data']['event']} on" in status
    assert running.returncode == CODE, errors
    kept = [event for _, event in journal.read(directory / "journal")]
    assert len(kept) == note["data"]["event"]
    assert max(e.step for e in kept if isinstance(e, Frame)) < LAST
    log = run.records
    assert log[-1]["kind"] == "run_end" and log[-1]["step"] == LAST
    assert [r["rule"] for r in run.kinds("rule", "fired")] == ["high"]
    assert run.intents == ["pause", "resume", "lr_scale"]
    assert "2 actions on the job, 1 failed" in errors
    assert "runbook half runs" not in errors
    assert f"\n  the journal is incomplete from event {len(kept)} on: cannot write" in errors

    assert supervise("audit", "verify", directory).returncode == 0
    replayed = supervise("replay", directory)
    assert replayed.returncode == 2, replayed.stdout
    assert replayed.stdout.startswith(f"incomplete: the journal ends before event {len(kept)}; ")
    assert "the journal is incomplete from event" in supervise("why", directory).stdout
    over = json.loads(supervise("status", "--json", directory).stdout)
    assert (over["job"], over["exit_code"], over["over"]) == ("ended", CODE, True)
