"""The job as a process: its end, its tree, being stopped."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from supervise.runtime import AdoptedProcess, Process, start_ticks
from tests.support.waiting import wait_until

PYTHON = sys.executable
# A worker in a session of its own, as torchrun starts its ranks, with a child of its own.
WORKERS = f"""
import subprocess, sys, time
for _ in range(2):
    subprocess.Popen([{PYTHON!r}, "-c", "import subprocess; subprocess.run(['sleep', '60'])"],
                     start_new_session=True)
time.sleep(60)
"""


def test_the_end_is_seen_by_every_thread(start):
    process = start("sh", "-c", "sleep 0.2; exit 9")
    seen = []
    waiter = threading.Thread(target=lambda: seen.append(process.wait(60.0)))
    waiter.start()

    while process.poll() is None:
        pass
    waiter.join()

    assert process.returncode == 9
    assert seen == [9]
    for group in (False, True):  # its pid may belong to somebody else by now
        assert not process.signal(signal.SIGTERM, group=group)


def test_workers_in_sessions_of_their_own_belong_to_the_tree(start):
    process = start(PYTHON, "-c", WORKERS)
    members = wait_until(lambda: len(found := process.tree.members()) == 5 and found)

    seen = process.stop(term_s=5.0)

    assert (seen.how, seen.returncode, seen.survivors) == ("term", -signal.SIGTERM, [])
    assert psutil.wait_procs(members, timeout=60)[1] == []


ORPHANS = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"


def orphan_of(process):
    def orphans():
        with contextlib.suppress(psutil.NoSuchProcess):  # its parent ends meanwhile
            members = [p for p in process.tree.members() if p.pid != process.pid]
            return [p for p in members if p.ppid() == psutil.Process().pid]

    return wait_until(orphans)[0]


def test_a_worker_that_lost_its_parent_still_belongs_to_the_tree(start):
    process = start(PYTHON, "-c", ORPHANS)

    assert process.wait(60.0) == 0
    orphan = orphan_of(process)

    assert process.stop(term_s=5.0).returncode == 0
    assert not psutil.pid_exists(orphan.pid)


def test_orphans_that_ended_are_collected(start):
    process = start("sh", "-c", f'{PYTHON} -c "{ORPHANS}"; sleep 60')

    orphan = orphan_of(process)
    orphan.kill()

    assert wait_until(lambda: process.poll() is None and not Path(f"/proc/{orphan.pid}").exists())


def test_children_that_are_not_the_jobs_are_left_alone(start):
    before = psutil.Popen(["sleep", "60"], start_new_session=True)
    process = start("sleep", "60")
    helper = psutil.Popen(["sleep", "60"])

    process.stop(term_s=5.0)

    for popen in (before, helper):
        assert popen.poll() is None
        popen.kill()
        popen.wait()


def test_a_job_that_is_to_be_started_again_gives_the_foreground_back(start):
    process, asked = start("sleep", "60"), []
    terminal = SimpleNamespace(take_back=asked.append)

    for each in (Process(process.pid, process.group, terminal), process):  # the second has none
        each.return_terminal()

    assert asked == [process.group]


def test_a_stopped_job_can_be_ended(start):
    process = start("sleep", "60")
    process.signal(signal.SIGSTOP)
    wait_until(lambda: process.poll() is None and process.stopped)

    assert process.stop(term_s=5.0).how == "term"


def test_a_job_that_forks_while_it_dies_is_still_killed(start):
    process = start("sh", "-c", "trap '' TERM; while true; do sleep 0.01 & sleep 0.01; done")
    wait_until(lambda: len(process.tree.members()) > 1)

    process.stop(term_s=0.1)

    assert process.tree.members() == []


# ── a job that is not our child: whether it lives, who belongs to it, how it ended ────────────────


RUN = "20310504-030201-abcdef"
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
@pytest.mark.parametrize("killed", [True, None], ids=["killed", "before us"])
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
