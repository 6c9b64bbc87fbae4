"""Ranks that train on after the job's first process has ended are watched, reported, and ended."""

from __future__ import annotations

import os
import re
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
mode: observe
use: [nonfinite]
job: {orphans: {watch: WATCH}}
"""
LEAVES = 'echo $$ > first; "$@" > out & echo $! > rank; GATE; exit 3'
BY_STEPS = "until grep -qs 'step 50' out; do sleep 0.05; done"
FOREVER = ("--steps", 10**6, "--sleep", 0.01)


@pytest.fixture
def orphaned(supervise, tmp_path):
    """Start a shell that leaves a rank behind; end whatever of it is left."""

    def start(watch: str, *args: object, gate: str = ":"):
        (tmp_path / "p.yaml").write_text(POLICY.replace("WATCH", watch))
        job = ["sh", "-c", LEAVES.replace("GATE", gate), "sh", *tiny(*args)]
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


def test_a_rank_that_is_left_running_is_reported_and_keeps_its_segment(
    orphaned, supervise, tmp_path
):
    """With the command that ends it; it trains on."""
    popen = orphaned("1s", *FOREVER, gate=BY_STEPS)
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


@pytest.mark.parametrize("before", [False, True], ids=["meanwhile", "before"])
def test_a_signal_ends_the_ranks_that_train_on(orphaned, supervise, tmp_path, before):
    """TERM goes to those that are left, also the one that ended the first process."""
    gate = "while :; do sleep 0.05; done" if before else BY_STEPS
    popen = orphaned("10m", *FOREVER, gate=gate)
    out, run = tmp_path / "out", supervise.run_of()
    stepped = lambda: out.exists() and "step 50" in out.read_text()  # noqa: E731
    wait_until(stepped if before else lambda: run.kinds("note", "orphans"), "the rank")
    popen.send_signal(signal.SIGTERM)
    popen.communicate(timeout=200)

    assert popen.returncode == (143 if before else 3)
    assert not psutil.pid_exists(_pids(tmp_path / "rank")[0])
    assert run.kinds("note", "orphans-left") == []


@pytest.mark.chaos
@pytest.mark.parametrize("well", [True, False], ids=["ended well", "crashed"])
def test_a_launcher_that_is_killed_is_relaunched_only_when_its_rank_fails(
    supervise, comes_back, resuming_job, well, tmp_path
):
    """A rank that lives is not killed for it, but watched to its end, and people are told how to
    end it; a training that came to its end is over."""
    drill = [] if well else ["--drill", "crash@160"]
    words = resuming_job("--max_iters=200", "--pause_s=0.02")  # `state` is a second old
    job = ["sh", "-c", 'echo $$ > first; "$@"; exit $?', "sh", *words]
    options = ("--policy", comes_back, "--run-dir", "run", *drill)
    popen = supervise.start(*options, "--", *job)
    run = supervise.run_of()
    wait_until(lambda: run.state.get("step", -1) > 60, "step 60")  # at 150 the job waits
    os.kill(_pids(tmp_path / "first")[0], signal.SIGKILL)
    _, err = popen.communicate(timeout=250)

    assert len(run.kinds("note", "launched")) == (0 if well else 1)
    assert popen.returncode == (137 if well else 0)
    assert re.search(r"process \d+( \(rank 0\))? goes on without it", err) and "kill " in err
    assert len(run.kinds("note", "orphans")) == 1 and not run.kinds("note", "orphans-left")
    assert _memory(run) == []
    run.prove()
