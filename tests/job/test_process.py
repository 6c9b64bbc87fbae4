"""The job as a process: its end, its tree, being stopped."""

import signal
import sys
import threading
from types import SimpleNamespace

import psutil

from supervise.runtime import Process
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
    """Return what came to us, the subreaper of the job, when it had lost its parent."""

    def orphans():
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

    assert wait_until(lambda: process.poll() is None and not psutil.pid_exists(orphan.pid))


def test_children_that_are_not_the_jobs_are_left_alone(start):
    before = psutil.Popen(["sleep", "60"], start_new_session=True)
    process = start("sleep", "60")
    helper = psutil.Popen(["sleep", "60"])

    members = process.tree.members()
    process.stop(term_s=5.0)

    assert [member.pid for member in members] == [process.pid]
    for popen in (before, helper):
        assert popen.poll() is None
        popen.kill()
        popen.wait()


def test_a_job_that_is_to_be_started_again_gives_the_foreground_back(start):
    process, asked = start("sleep", "60"), []
    terminal = SimpleNamespace(take_back=asked.append)

    Process(process.pid, process.group, terminal).return_terminal()
    process.return_terminal()  # without a terminal there is nothing to give

    assert asked == [process.group]


def test_a_stopped_job_can_be_ended(start):
    """A process under SIGSTOP hears TERM only once it is continued."""
    process = start("sleep", "60")
    process.signal(signal.SIGSTOP)
    wait_until(lambda: process.poll() is None and process.stopped)

    assert process.stop(term_s=5.0).how == "term"


def test_a_job_that_forks_while_it_dies_is_still_killed(start):
    process = start("sh", "-c", "trap '' TERM; while true; do sleep 0.01 & sleep 0.01; done")
    wait_until(lambda: len(process.tree.members()) > 1)

    process.stop(term_s=0.1)

    assert process.tree.members() == []
