"""A job that is not our child: whether it lives, who belongs to it, how it ended."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from supervise.runtime import AdoptedProcess, start_ticks
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
    environ = {**os.environ, "SUPERVISE_LAUNCH": f"{RUN}:0"}
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
    process = adopt(job.pid)
    assert process.poll() is None
    assert process.signal(0)

    end(job)

    assert wait_until(lambda: process.poll() is not None)
    assert (process.returncode, process.unknown) == (5, False)
    assert not process.signal(signal.SIGTERM)


@pytest.mark.parametrize(("recorded", "seen"), [(3, (3, False)), (None, (255, True))])
@pytest.mark.parametrize("killed", [False, True, None], ids=["ended", "killed", "before us"])
def test_a_job_that_was_collected_is_known_to_newer_kernels_or_by_its_record(
    job, recorded, seen, killed
):
    """A `raise SystemExit(5)` looks like an end in peace to its record, so kernels outrank it."""
    ticks = start_ticks(job.pid)
    process = adopt(job.pid, recorded) if killed is not None else None
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    job.kill() if killed else end(job)
    job.wait()
    remembered = REMEMBERS and process is not None
    process = process or adopt(job.pid, recorded, ticks)

    assert process.poll() is not None
    known = (-9 if killed else 5, False) if remembered else seen
    assert (process.returncode, process.unknown) == known
    assert killed is None or len(list(Path("/proc/self/fd").iterdir())) < open_files


def test_another_process_with_its_pid_is_not_the_job():
    process = adopt(os.getpid(), recorded=4, ticks=start_ticks(os.getpid()) - 1)

    assert process.returncode == 4
    assert not process.signal(signal.SIGTERM)


def test_orphans_of_the_job_belong_to_it(job):
    process = adopt(job.pid, recorded=0)
    assert [member.pid for member in process.tree.members()] == [job.pid, job.child.pid]
    end(job)
    job.wait()
    assert [member.pid for member in process.tree.members()] == [job.child.pid]

    stopped = process.stop(term_s=5.0)

    assert (stopped.how, [*stopped.survivors]) == ("term", [])
    assert process.tree.members() == []
