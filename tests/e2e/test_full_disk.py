"""The disk under the run directory is full in the middle of a run.

Acting goes on from the reserve, which nobody else can take; people are told at once. Without one
the job goes on, nothing is acted on that is not on disk, and whatever is asked afterwards says so:
status, why, replay, receipt.
"""

from __future__ import annotations

import errno
import json
import subprocess
import time
from pathlib import Path

import pytest

from supervise.core.model import Frame
from supervise.store import read_journal
from tests.support.supervised_run import Records, tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

CODE = 7
LAST = 499


@pytest.fixture
def small_disk(tmp_path):
    """A function that makes a file system of that size; skips where mounting is not permitted."""
    where = tmp_path / "small"
    where.mkdir()

    def mount(size: str) -> Path:
        options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)]
        try:
            done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command here")
        if done.returncode:
            pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
        return where

    yield mount
    subprocess.run(["umount", "-l", str(where)], check=False, capture_output=True)


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
    directory = small_disk("8m") / "run"
    run = Records(directory)
    drill = f"lr_spike:factor=3000,steps=8@{LAST - 100}"
    job = tiny("--steps", LAST + 1, "--sleep", 0.01, "--exit", CODE)
    options = ("--quiet", "--policy", halves, "--run-dir", directory, "--drill", drill)
    running = supervise.start(*options, "--", *job)
    wait_until(lambda: any(r["step"] > 5 for r in run.kinds("state")), "step 5")
    full = 0
    while running.poll() is None:
        fill(directory.parent / f"filler-{full}")
        full += 1
        time.sleep(0.02)
    _, errors = running.communicate(timeout=120)

    assert running.returncode == CODE, errors
    assert errors.startswith("supervise: SEV1 no space is left for the record of this run"), errors
    mount = directory.parent
    assert f"MB on {mount}; what fills it: du -xm {mount} | sort -n | tail; " in errors
    [note] = run.kinds("note", "record-space-short")
    details = note["data"]["details"]
    assert details["reserve_bytes"] > 64 * 4096 and details["seconds"] > 0
    assert run.intents[0] == "lr_scale" and run.kinds("commit")
    assert supervise("replay", directory).stdout.startswith("same: ")
    assert supervise("audit", "verify", directory).returncode == 0


@pytest.mark.chaos
def test_a_full_disk_without_a_reserve_ends_the_acting(small_disk, supervise, halves):
    """The job goes on, every command says what happened, and there is no false replay."""
    directory = small_disk("400k") / "run"
    (directory.parent / "before").write_bytes(bytes(160 << 10))
    run = Records(directory)
    drill = f"lr_spike:factor=3000,steps=8@{LAST - 100}"
    job = tiny("--steps", LAST + 1, "--sleep", 0.01, "--exit", CODE)
    options = ("--policy", halves, "--run-dir", directory, "--drill", drill)
    running = supervise.start(*options, "--", *job)
    wait_until(lambda: any(r["step"] > 5 for r in run.kinds("state")), "step 5")
    wait_until(lambda: run.kinds("identity"), "the last record that comes by itself")
    filler = directory.parent / "filler"
    fill(filler)
    [note] = wait_until(lambda: run.kinds("note", "journal-incomplete"), "the note")
    filler.unlink()

    wait_until(lambda: "trouble" in json.loads((directory / "state.json").read_text()), "a status")
    status = " ".join(supervise("status", directory).stdout.split())
    _, errors = running.communicate(timeout=120)

    assert "mode enforce" in status and "no action is possible" in status
    assert f"record the journal is incomplete from event {note['data']['event']} on" in status
    assert running.returncode == CODE, errors
    kept = [event for _, event in read_journal(directory / "journal")]
    assert len(kept) == note["data"]["event"]
    assert max(e.step for e in kept if isinstance(e, Frame)) < LAST
    log = run.records
    assert log[-1]["kind"] == "run_end" and log[-1]["step"] == LAST
    assert [r["rule"] for r in run.kinds("rule", "fired")] == ["high"]
    assert run.intents == []
    assert "1 incident, no action on the job" in errors
    assert "SEV1 this run is not protected any more: nothing is acted on" in errors
    card = supervise("why", directory).stdout
    assert "Did    nothing: the record of the run could not be written" in card, card
    assert "runbook half runs" not in errors
    assert f"\n  the journal is incomplete from event {len(kept)} on: cannot write" in errors

    assert supervise("audit", "verify", directory).returncode == 0
    replayed = supervise("replay", directory)
    assert replayed.returncode == 2, replayed.stdout
    assert replayed.stdout.startswith(f"incomplete: the journal ends before event {len(kept)}; ")
    assert "the journal is incomplete from event" in supervise("why", directory).stdout
    over = json.loads(supervise("status", "--json", directory).stdout)
    assert (over["job"], over["exit_code"], over["over"]) == ("ended", CODE, True)
