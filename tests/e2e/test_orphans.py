"""Ranks that train on after the job's first process has ended are watched, reported, and ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.supervised_run import tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: orphans
mode: enforce
job: {on_crash: restart, relaunch: {args: ["--seed", "1"]}, orphans: {watch: WATCH}}
budgets: {all: {max: 2}, restart: {max: 2}}
"""
LEAVES = '"$@" > out & echo $! > rank; until grep -qs "WORDS" out; do sleep 0.05; done; exit 3'


@pytest.fixture
def orphaned(supervise, tmp_path):
    """Start a shell that leaves a rank behind; end whatever of it is left."""

    def start(watch: str, steps: int = 10**6, until: str = "step 50"):
        (tmp_path / "p.yaml").write_text(POLICY.replace("WATCH", watch))
        rank = tiny("--steps", steps, "--sleep", 0.01)
        job = ["sh", "-c", LEAVES.replace("WORDS", until), "sh", *rank]
        return supervise.start("--policy", tmp_path / "p.yaml", "--run-dir", "run", "--", *job)

    yield start
    for pid in _pids(tmp_path / "rank"):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def _pids(path: Path) -> list[int]:
    return [int(path.read_text())] if path.exists() and path.read_text() else []


def _memory(run) -> list[Path]:
    """The run's directories in shared memory."""
    return [path for path in Path("/dev/shm").iterdir() if run.records[0]["run"] in path.name]


def test_a_rank_that_is_left_running_is_reported(orphaned, supervise, tmp_path):
    popen = orphaned("1s")
    popen.wait(200)

    (rank,) = _pids(tmp_path / "rank")
    run = supervise.run_of()
    (left,) = run.kinds("note", "orphans-left")
    assert popen.returncode == 3
    assert left["data"]["details"]["processes"] == {str(rank): 0}
    assert psutil.Process(rank).status() != psutil.STATUS_ZOMBIE
    (directory,) = _memory(run)
    assert list(directory.glob(f"rank-0.{rank}*.seg"))
    os.kill(rank, signal.SIGKILL)
    _, err = popen.communicate()  # the rank held it open
    assert f"left running: process {rank} (rank 0)" in err
    assert f"to end them: kill {rank}" in err
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    run.prove()


@pytest.mark.parametrize(("until", "code"), [("step 50", 3), ("step 50000", 143)])
def test_a_signal_ends_the_ranks_that_train_on(orphaned, supervise, tmp_path, until, code):
    """Also the signal that ended the first process."""
    popen, run, out = orphaned("10m", until=until), supervise.run_of(), tmp_path / "out"
    wait_until(lambda: out.exists() and "step 50" in out.read_text(), "step 50")
    wait_until(lambda: code == 143 or run.kinds("note", "orphans"), "the end of the first process")
    popen.send_signal(signal.SIGTERM)
    popen.communicate(timeout=200)

    assert popen.returncode == code
    rank = _pids(tmp_path / "rank")[0]
    wait_until(lambda: not psutil.pid_exists(rank), "the end of the rank")
    assert run.kinds("note", "orphans-left") == []


def test_a_launcher_that_failed_is_not_started_again_where_its_rank_ends_well(orphaned, supervise):
    popen, run = orphaned("10m", steps=200), supervise.run_of()
    popen.communicate(timeout=200)

    assert popen.returncode == 3
    assert run.kinds("note", "orphans") and not run.kinds("note", "launched")
    run.prove()
