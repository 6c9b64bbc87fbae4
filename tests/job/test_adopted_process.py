"""A job that is not our child: whether it lives, who belongs to it, how it ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from supervise.runtime import LAUNCH_FILE, AdoptedProcess, start_ticks
from tests.support.waiting import wait_until

RUN = "20310504-030201-abcdef"
PYTHON = sys.executable
# Linux 6.15 keeps the code of a collected process for those who held a pidfd of it.
REMEMBERS = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 15)
# Its child lives in a session of its own, and outlives it.
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([{PYTHON!r}, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
sys.stdin.read(1)
sys.exit(5)
"""


@pytest.fixture
def job():
    """A job of the run, with a child; both are killed at the end."""
    environ = {**os.environ, LAUNCH_FILE: f"{RUN}:0"}
    pipe = subprocess.PIPE
    popen = subprocess.Popen([PYTHON, "-c", PARENT], env=environ, stdin=pipe, stdout=pipe)
    popen.child = psutil.Process(int(popen.stdout.readline()))
    yield popen
    if popen.child.is_running():
        popen.child.kill()
    popen.kill()
    popen.communicate()


def adopt(pid: int, recorded: int | None = None, ticks: int | None = None) -> AdoptedProcess:
    return AdoptedProcess(
        pid, start_ticks(pid) if ticks is None else ticks, RUN, lambda *_: recorded
    )


def end(job: subprocess.Popen) -> None:
    job.stdin.write(b"x")
    job.stdin.flush()


def test_a_living_job_is_watched_and_its_end_read_from_the_kernel(job):
    """As long as nobody has collected it, a zombie still tells how it ended."""
    process = adopt(job.pid)
    assert process.poll() is None
    assert process.signal(0)

    end(job)

    assert wait_until(lambda: process.poll() is not None)
    assert (process.returncode, process.unknown) == (5, False)
    assert not process.signal(signal.SIGTERM)


@pytest.mark.parametrize(("recorded", "seen"), [(3, (3, False)), (None, (255, True))])
def test_a_job_collected_before_ended_as_it_recorded_itself(job, recorded, seen):
    """Without a record nobody can tell, which is said."""
    ticks = start_ticks(job.pid)
    end(job)
    job.wait()
    process = adopt(job.pid, recorded, ticks)

    assert process.poll() == seen[0]
    assert (process.returncode, process.unknown) == seen


@pytest.mark.parametrize(("recorded", "seen"), [(3, (3, False)), (None, (255, True))])
@pytest.mark.parametrize("killed", [False, True])
def test_a_job_collected_since_is_known_to_newer_kernels(job, recorded, seen, killed):
    """Which outranks what it recorded: a `raise SystemExit(5)` looks like an end in peace to it."""
    process = adopt(job.pid, recorded)
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    job.kill() if killed else end(job)
    job.wait()
    remembered = (-9 if killed else 5, False)

    assert process.poll() is not None
    assert (process.returncode, process.unknown) == (remembered if REMEMBERS else seen)
    assert len(list(Path("/proc/self/fd").iterdir())) < open_files


def test_another_process_with_its_pid_is_not_the_job():
    """Pids are given away again; the start time is not."""
    process = adopt(os.getpid(), recorded=4, ticks=start_ticks(os.getpid()) - 1)

    assert process.returncode == 4
    assert not process.signal(signal.SIGTERM)


def test_orphans_of_the_job_belong_to_it(job):
    """What its first process left behind carries the run's mark, and is stopped with it."""
    process = adopt(job.pid, recorded=0)
    assert [member.pid for member in process.tree.members()] == [job.pid, job.child.pid]
    end(job)
    job.wait()
    assert [member.pid for member in process.tree.members()] == [job.child.pid]

    stopped = process.stop(term_s=5.0)

    assert (stopped.how, [*stopped.survivors]) == ("term", [])
    assert process.tree.members() == []
