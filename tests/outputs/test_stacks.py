"""What a hung job is doing, seen from outside."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from supervise.runtime import ask_for_stacks, py_spy_dump
from tests.support.waiting import wait_until


def test_where_python_waits_the_probe_shows_every_thread(hung, tmp_path):
    job = hung(tmp_path)

    first = ask_for_stacks(job.pid, tmp_path, timeout_s=30.0)
    again = ask_for_stacks(job.pid, tmp_path, timeout_s=30.0)

    assert first.count("in stuck_in_here") == again.count("in stuck_in_here") == 2
    assert job.poll() is None


@pytest.mark.slow
def test_where_c_code_stands_still_it_shows_the_main_thread(hung, tmp_path):
    job = hung(tmp_path, "c")

    while (text := ask_for_stacks(job.pid, tmp_path, timeout_s=2.0)).count("in stuck_in_here") != 1:
        pass  # it was not there yet: all threads answer

    assert text.count("in stuck_in_here") == 1
    assert text.count("in <module>") == 1
    assert job.poll() is None


@pytest.mark.slow
def test_a_job_that_is_silent_but_works_survives_every_look(hung, tmp_path):
    """Reading its frames as they change, and those of threads that end, would kill it."""
    job = hung(tmp_path, "python")

    for _ in range(100):
        assert ask_for_stacks(job.pid, tmp_path, timeout_s=30.0).count("in stuck_in_here") == 2

    assert job.poll() is None


@contextmanager
def forking(program, marks):
    """Start a program that prints the pids of its children; give these and its own."""
    argv = [sys.executable, "-c", program, str(marks)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as job:
        children = [int(pid) for pid in job.stdout.readline().split()]
        try:
            yield *children, job.pid
        finally:
            for pid in (*children, job.pid):
                os.kill(pid, signal.SIGKILL)


FORKED = """
import os, sys, time
from supervise_probe.runtime import evidence
evidence.dump_stacks_on_signals(sys.argv[1])
if os.fork() == 0:
    evidence.dump_stacks_on_signals(sys.argv[1])
    evidence.dump_stacks_on_signals(sys.argv[1])  # each training of a process does
    print(os.getpid(), flush=True)
    while True: time.sleep(600)
time.sleep(600)
"""


def test_a_process_that_was_forked_listens_for_itself(tmp_path):
    with forking(FORKED, tmp_path) as pids:
        of_child, of_parent = (ask_for_stacks(pid, tmp_path, timeout_s=30.0) for pid in pids)
        opened = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]

    assert opened[0] == opened[1] + 1
    assert any(f"line {number} in" in of_child for number in (8, 9)), of_child
    assert any(f"line {number} in" in of_parent for number in (5, 10)), of_parent


FORKS = """
import os, subprocess, sys, threading, time
from supervise_probe.runtime import evidence
evidence.dump_stacks_on_signals(sys.argv[1])
def stuck_in_here(lock):
    lock.acquire()
    lock.acquire()
pids = [subprocess.Popen(["sleep", "600"]).pid]
for closes in (True, False):
    pids.append(os.fork())
    if pids[-1] == 0:
        if closes: os.closerange(3, 64)
        stuck_in_here(threading.Lock())
print(*pids, flush=True)
time.sleep(600)
"""


def test_only_a_fork_that_has_the_handlers_and_their_file_is_asked(tmp_path):
    """What runs another program, or writes elsewhere under that number, is not sent a signal."""
    with forking(FORKS, tmp_path) as (afresh, closed, fork, _):
        with pytest.raises(OSError, match="the probe registered no handler"):
            ask_for_stacks(fork, tmp_path)  # somebody may work there
        text = wait_until(lambda: answer(fork, tmp_path), "an answer of the fork")
        for pid in (afresh, closed):
            with pytest.raises(OSError, match="the probe registered no handler"):
                ask_for_stacks(pid, tmp_path, forks=True)
        states = [psutil.Process(pid).status() for pid in (afresh, closed, fork)]

    assert text.count("in stuck_in_here") == 1
    assert states == [psutil.STATUS_SLEEPING] * 3


def answer(pid, marks):
    """Return its stacks, "" while it is so young that it may be about to run another program."""
    try:
        return ask_for_stacks(pid, marks, forks=True)
    except OSError:
        return ""


@pytest.mark.parametrize("listens", [False, True], ids=["no handler", "another handler"])
def test_a_process_without_the_handler_or_its_file_is_never_sent_the_signal(
    hung, tmp_path, listens
):
    job = hung(tmp_path if listens else None)
    file = tmp_path / f"stacks.{job.pid}.txt"
    file.unlink() if listens else file.touch()

    with pytest.raises(OSError, match="the probe registered no handler"):
        ask_for_stacks(job.pid, tmp_path)

    assert job.poll() is None


def test_a_stopped_process_does_not_answer(hung, tmp_path):
    job = hung(tmp_path)
    job.send_signal(signal.SIGSTOP)

    with pytest.raises(OSError, match=r"no answer to the signal within 0\.2 s"):
        ask_for_stacks(job.pid, tmp_path, timeout_s=0.2)


def test_a_tool_that_hangs_is_cut_off(hung, tmp_path, monkeypatch):
    tool = tmp_path / "py-spy"
    tool.write_text("#!/bin/sh\nexec sleep 600\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    with pytest.raises(OSError, match=r"took longer than 0\.2 s"):
        py_spy_dump(hung().pid, timeout_s=0.2)
