"""The job as a process: its end, its tree, being stopped."""

from __future__ import annotations

import signal
import sys
import threading
from types import SimpleNamespace

import psutil

from supervise.runtime import JobEnd, Process
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
    """A thread that waits and the loop that polls learn the same returncode."""
    process = start("sh", "-c", "sleep 0.2; exit 9")
    seen = []
    waiter = threading.Thread(target=lambda: seen.append(process.wait(60.0)))
    waiter.start()

    while process.poll() is None:
        pass
    waiter.join()

    assert process.returncode == 9
    assert seen == [9]


def test_a_signal_to_an_ended_job_goes_nowhere(start):
    """Its pid may belong to somebody else by now."""
    process = start("true")

    process.wait(60.0)

    assert not process.signal(signal.SIGTERM)
    assert not process.signal(signal.SIGTERM, group=True)


def test_workers_in_sessions_of_their_own_belong_to_the_tree(start):
    """Grandchildren that left group and session are found, and end with the job."""
    process = start(PYTHON, "-c", WORKERS)
    members = wait_until(lambda: len(found := process.tree.members()) == 5 and found)

    seen = process.stop(term_s=5.0)

    assert seen == JobEnd("term", -signal.SIGTERM, [])
    assert psutil.wait_procs(members, timeout=60)[1] == []


def test_a_worker_that_lost_its_parent_still_belongs_to_the_tree(start):
    """The orphan comes to us as its subreaper, so stopping reaches it after the job has ended."""
    code = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    process = start(PYTHON, "-c", code)

    assert process.wait(60.0) == 0
    orphan = wait_until(lambda: [p for p in process.tree.members() if p.name() == "sleep"])[0]
    assert orphan.ppid() == psutil.Process().pid
    seen = process.stop(term_s=5.0)

    assert seen.returncode == 0
    assert not psutil.pid_exists(orphan.pid)


def test_orphans_that_ended_are_collected(start):
    """A daemonised helper of the job that ends leaves no zombie with us."""
    code = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    process = start("sh", "-c", f'{PYTHON} -c "{code}"; sleep 60')
    ours = psutil.Process().pid

    def orphans():
        members = process.tree.members()
        return [p for p in members if p.ppid() == ours and p.pid != process.pid]

    orphan = wait_until(orphans)[0]
    orphan.kill()

    assert wait_until(lambda: process.poll() is None and not psutil.pid_exists(orphan.pid))


def test_children_that_are_not_the_jobs_are_left_alone(start):
    """A helper we started before or start now is not in the tree and survives the stop."""
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
    """So that a Ctrl-C that is typed meanwhile reaches us, who know that it ends the run."""
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
    """KILL goes on until nobody is left."""
    process = start("sh", "-c", "trap '' TERM; while true; do sleep 0.01 & sleep 0.01; done")
    wait_until(lambda: len(process.tree.members()) > 1)

    process.stop(term_s=0.1)

    assert process.tree.members() == []
