"""Ranks that train on when the job's first process has ended are never lost sight of in silence."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: orphans
mode: observe
use: [nonfinite]
job: {orphans: {watch: WATCH}}
"""
LEAVES = 'echo $$ > first; "$@" & echo $! > rank; GATE; exit 3'
BY_STEPS = "until grep -qs 'step 50' out; do sleep 0.05; done"


@pytest.fixture
def orphaned(supervise, tiny_job, tmp_path):
    """Start a shell that leaves a rank behind; end whatever of it is left."""

    def start(watch: str, *args: object, gate: str = ":"):
        (tmp_path / "p.yaml").write_text(POLICY.replace("WATCH", watch))
        shell = ["sh", "-c", LEAVES.replace("GATE", gate).replace('"$@"', '"$@" > out'), "sh"]
        job = [*shell, *tiny_job(*args)]
        return supervise.start("--policy", tmp_path / "p.yaml", "--run-dir", "run", "--", *job)

    yield start
    for pid in _pids(tmp_path / "rank"):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def _pids(path: Path) -> list[int]:
    return [int(path.read_text())] if path.exists() and path.read_text() else []


def _notes(supervise, what: str) -> list[dict]:
    if not (supervise.home / "run" / "audit.log").exists():
        return []
    return [
        r for r in supervise.records("run") if r["kind"] == "note" and r["data"].get("what") == what
    ]


def _memory(supervise) -> list[Path]:
    run = supervise.records("run")[0]["run"]
    return [path for path in Path("/dev/shm").iterdir() if run in path.name]


def _until(check):
    deadline = time.monotonic() + 120.0
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_rank_that_trains_on_is_watched_to_its_end(orphaned, supervise, tmp_path):
    """Its shell ended before it had begun; the shell's exit code is the result."""
    popen = orphaned("10m", "--steps", 150, "--sleep", 0.02)

    _, err = popen.communicate(timeout=200)

    (rank,) = _pids(tmp_path / "rank")
    assert popen.returncode == 3
    assert re.search(rf"process {rank}( \(rank 0\))? goes on without it", err)
    assert f"kill {rank}" in err
    assert "exit code 3 at step 149" in err
    assert [len(_notes(supervise, what)) for what in ("orphans", "orphans-left")] == [1, 0]
    assert _memory(supervise) == []
    supervise.prove("run")


@pytest.mark.parametrize("watch", ["2s", "0s"])
def test_a_rank_that_is_left_running_is_told_and_keeps_its_segment(
    orphaned, supervise, tmp_path, watch
):
    """With the command that ends it; it trains on."""
    popen = orphaned(watch, "--steps", 10**6, "--sleep", 0.02, gate=BY_STEPS)

    popen.wait(200)

    (rank,) = _pids(tmp_path / "rank")
    (left,) = _notes(supervise, "orphans-left")
    assert popen.returncode == 3
    assert left["data"]["details"]["processes"] == {str(rank): 0}
    assert psutil.Process(rank).status() != psutil.STATUS_ZOMBIE
    (directory,) = _memory(supervise)
    assert list(directory.glob(f"rank-0.{rank}*.seg"))
    os.kill(rank, signal.SIGKILL)
    _, err = popen.communicate()  # which the rank held open
    assert f"left running: process {rank} (rank 0)" in err
    assert f"to end them: kill {rank}" in err
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    supervise.prove("run")


@pytest.mark.parametrize("before", [False, True], ids=["meanwhile", "before"])
def test_a_signal_ends_who_trains_on(orphaned, supervise, tmp_path, before):
    """TERM goes to those that are left, also the one that ended the first process."""
    gate = "while :; do sleep 0.05; done" if before else BY_STEPS
    popen = orphaned("10m", "--steps", 10**6, "--sleep", 0.02, gate=gate)

    def steps() -> bool:
        return (tmp_path / "out").exists() and "step 50" in (tmp_path / "out").read_text()

    _until(steps if before else lambda: _notes(supervise, "orphans"))

    popen.send_signal(signal.SIGTERM)
    popen.communicate(timeout=200)

    assert popen.returncode == (143 if before else 3)
    assert not psutil.pid_exists(_pids(tmp_path / "rank")[0])
    assert _notes(supervise, "orphans-left") == []


@pytest.mark.parametrize("well", [True, False], ids=["ended well", "crashed"])
def test_a_launcher_that_is_killed_is_started_again_only_when_its_rank_fails(
    supervise, comes_back, resuming_job, well, tmp_path
):
    """A rank that lives is not killed for it, and a training that came to its end is over."""
    drill = [] if well else ["--drill", "crash@120"]
    job = resuming_job("--pause_s=0.05")  # slower than a look at the state
    launcher = ["sh", "-c", 'echo $$ > first; "$@"; exit $?', "sh"]
    popen = supervise.start(
        "--policy", comes_back, "--run-dir", "run", *drill, "--", *launcher, *job
    )
    state = tmp_path / "run" / "state.json"
    _until(lambda: state.exists() and json.loads(state.read_text())["step"] > 60)

    os.kill(_pids(tmp_path / "first")[0], signal.SIGKILL)
    popen.communicate(timeout=250)

    starts = [r for r in supervise.records("run") if r["data"].get("what") == "launched"]
    assert len(starts) == (0 if well else 1)
    assert popen.returncode == (137 if well else 0)
    supervise.prove("run")
