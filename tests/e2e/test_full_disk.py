"""The disk under the run directory is full in the middle of a run.

The job goes on, nothing is decided that is not on disk and acted on, and whatever is asked
afterwards says so: status, why, replay, receipt.
"""

from __future__ import annotations

import errno
import json
import subprocess
import time
from pathlib import Path

import pytest

from supervise.core.model.events import Frame
from supervise.errors import SuperviseError
from supervise.store import audit, journal

pytestmark = pytest.mark.slow

CODE = 7
LAST = 499


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


def eventually(check, what):
    deadline = time.monotonic() + 60
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)
    return found


def fill(path: Path) -> None:
    """Write until there is no room for one more byte."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC, error


def records(run):
    try:
        return list(audit.read(run / "audit.log"))
    except SuperviseError:
        return []


def notes(run):
    return [r for r in records(run) if r.get("data", {}).get("what") == "journal-incomplete"]


def test_a_full_disk_ends_the_acting_and_every_command_says_so(
    small_disk, supervise, tiny_job, halves
):
    """A pause that is in force then can still be ended; nothing else is done; no false replay."""
    run = small_disk / "run"
    drill = f"lr_spike:factor=3000,steps=8@{LAST - 100}"
    job = tiny_job("--steps", LAST + 1, "--sleep", 0.01, "--exit", CODE)
    running = supervise.start("--policy", halves, "--run-dir", run, "--drill", drill, "--", *job)
    eventually(lambda: any(r["kind"] == "state" and r["step"] > 5 for r in records(run)), "step 5")
    assert supervise("pause", str(run)).returncode == 0
    filler = small_disk / "filler"
    fill(filler)
    [note] = eventually(lambda: notes(run), "the note")
    filler.unlink()

    resumed, refused = supervise("resume", str(run)), supervise("lr", str(run), "0.5")
    status = " ".join(supervise("status", str(run)).stdout.split())
    _, said = running.communicate(timeout=120)

    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert (refused.returncode, "No space left" in refused.stderr) == (1, True), refused
    assert f"record the journal is incomplete from event {note['data']['event']} on" in status
    assert running.returncode == CODE, said
    kept = [event for _, event in journal.read(run / "journal")]
    assert len(kept) == note["data"]["event"]
    assert max(e.step for e in kept if isinstance(e, Frame)) < LAST
    log = records(run)
    assert log[-1]["kind"] == "run_end" and log[-1]["step"] == LAST
    assert [r["rule"] for r in log if r["kind"] == "rule" and r["data"]["what"] == "fired"] == [
        "high"
    ]
    verbs = [r["data"]["action"]["verb"] for r in log if r["kind"] == "intent"]
    assert verbs == ["pause", "resume", "lr_scale"]
    assert "2 actions on the job, 1 failed" in said
    assert "runbook half runs" not in said
    assert f"\n  the journal is incomplete from event {len(kept)} on: cannot write" in said

    assert supervise("audit", "verify", str(run)).returncode == 0
    replayed = supervise("replay", str(run))
    assert replayed.returncode == 2, replayed.stdout
    assert replayed.stdout.startswith(f"incomplete: the journal ends before event {len(kept)}; ")
    assert "the journal is incomplete from event" in supervise("why", str(run)).stdout
    over = json.loads(supervise("status", "--json", str(run)).stdout)
    assert (over["job"], over["exit_code"], over["over"]) == ("ended", CODE, True)
