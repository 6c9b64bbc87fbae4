"""Signals sent to us are meant for the job."""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from supervise.runtime import SignalForwarder, is_handled
from tests.support.waiting import wait_until

PYTHON = sys.executable
# Says every signal that it gets, unlike `print` also within the last one; ends when its stdin does.
# One that comes just before a `read` would be said behind it only: the wakeup pipe ends the wait.
LISTENER = """
import os, select, signal
def say(number, _): os.write(1, signal.Signals(number).name.encode() + b"\\n")
woken, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)
for name in "TERM INT HUP QUIT USR1 USR2 WINCH CONT".split():
    signal.signal(getattr(signal, "SIG" + name), say)
os.write(1, b"listening\\n")
while True:
    ready, _, _ = select.select([0, woken], [], [])
    if woken in ready:
        os.read(woken, 100)
    if 0 in ready and not os.read(0, 100):
        break
"""


@pytest.fixture(autouse=True)
def without_nohup():
    """Who runs the tests under nohup ignores SIGHUP, and so would every child."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_each_signal_is_passed_on_once(wrapped):
    listener = wrapped(PYTHON, "-c", LISTENER)
    assert listener.stdout.readline() == "listening\n"
    for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT"):
        listener.send_signal(getattr(signal, f"SIG{name}"))
        assert listener.stdout.readline() == f"SIG{name}\n"

    assert listener.communicate("")[0] == ""
    assert listener.returncode == 0


def test_the_third_kills_the_whole_tree(wrapped):
    sleeps = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    popen = wrapped(PYTHON, "-c", f"{sleeps}\n{LISTENER}")
    popen.stdout.readline()
    tree = psutil.Process(popen.pid).children(recursive=True)

    for _ in range(3):
        popen.send_signal(signal.SIGTERM)
        popen.stdout.readline()

    assert popen.wait() == 137
    assert len(tree) == 2
    assert psutil.wait_procs(tree, timeout=60)[1] == []


SAVES = """
import os, signal, subprocess, sys, time
worker = subprocess.Popen(["sleep", "60"])
def save(*_):
    time.sleep(0.2); os.write(1, b"%r\\n" % worker.poll()); worker.kill(); sys.exit(7)
signal.signal(signal.SIGTERM, save); os.write(1, b"on\\n"); time.sleep(60)
"""


def test_term_reaches_the_job_but_not_its_workers(wrapped):
    popen = wrapped(PYTHON, "-c", SAVES)
    assert popen.stdout.readline() == "on\n"

    popen.send_signal(signal.SIGTERM)

    assert popen.stdout.readline() == "None\n"
    assert popen.wait() == 7


@pytest.fixture
def forwarder():
    names = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT", "TSTP", "CHLD")
    numbers = [getattr(signal, f"SIG{name}") for name in names]
    before = list(map(signal.getsignal, numbers))
    made = SignalForwarder()
    made.install()
    yield made
    made.restore()
    assert list(map(signal.getsignal, numbers)) == before


def test_the_third_is_known_as_what_it_was(forwarder, start):
    process = start("sh", "-c", "trap '' TERM INT; echo; while :; do sleep 0.1; done")
    forwarder.attach(process)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), signum)

    assert process.wait(60.0) is not None
    notices = forwarder.take_notices()
    assert [notice.data["signal"] for notice in notices] == ["SIGTERM", "SIGINT", "SIGTERM"]
    assert [notice.data["killed"] for notice in notices] == [False, False, True]
    assert "passed on" in notices[1].message
    text = "SIGTERM came as number 3 of INT and TERM: all of the job was killed"
    assert notices[2].message == text


def test_signals_that_come_faster_than_they_are_passed_on_do_not_nest(forwarder):
    """None is lost, and there are more than Python's calls may nest."""
    passed, count = [], sys.getrecursionlimit() + 100

    def pass_on(signum, *, group):
        passed.append(signum)
        if len(passed) < count:
            signal.raise_signal(signum)

    forwarder.attach(SimpleNamespace(returncode=None, signal=pass_on))
    signal.raise_signal(signal.SIGUSR1)

    assert passed == [signal.SIGUSR1] * count
    assert forwarder.notices_waiting == count


def test_a_burst_kills_once(forwarder):
    """A kill looks at every process of the host: one for each signal would never come to an end."""
    kills = []

    def end(signum, within_s):
        kills.append(signum)
        if len(kills) == 1:  # the burst goes on meanwhile
            for _ in range(200):
                signal.raise_signal(signal.SIGTERM)

    job = {"returncode": None, "tree": SimpleNamespace(end=end)}
    forwarder.attach(SimpleNamespace(**job, signal=lambda signum, *, group: None))
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)

    assert kills == [signal.SIGKILL]
    assert forwarder.notices_waiting == 203  # none is lost


def test_what_comes_between_two_processes_is_kept_for_the_second(forwarder, start):
    forwarder.attach(start("true"))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert forwarder.final is None
    forwarder.detach()
    os.kill(os.getpid(), signal.SIGTERM)
    second = start("sleep", "60")
    forwarder.attach(second)

    assert second.wait(60.0) == -signal.SIGTERM
    assert forwarder.final == "SIGTERM"


@pytest.fixture
def holding(forwarder, start):
    """A process that handles no TERM, behind its exec, and a forwarder that may hold signals."""
    forwarder.allow_holding()
    process = start("sleep", "60")
    forwarder.attach(process)
    wait_until(lambda: not is_handled(process.pid, signal.SIGTERM))
    return process


@pytest.mark.parametrize(
    ("grace_s", "release"),
    [
        (0.05, lambda held: (time.sleep(0.06), held.forward_overdue())),
        (60.0, lambda held: held.settle_request()),
        (60.0, lambda _: os.kill(os.getpid(), signal.SIGTERM)),
    ],
    ids=["after-its-grace", "after-the-checkpoint", "with-a-second"],
)
def test_a_held_signal_reaches_the_job(forwarder, holding, monkeypatch, grace_s, release):
    monkeypatch.setattr("supervise.core.model.preemption.ECHO_S", 0.0)
    forwarder.hold_signals_for(grace_s, 5.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert forwarder.take_notices()[-1].data["held"]
    assert holding.wait(0.0) is None
    release(forwarder)

    assert holding.wait(60.0) == -signal.SIGTERM


@pytest.mark.parametrize("first", ["the supervisor", "the job"])
def test_a_signal_to_all_processes_counts_once(forwarder, holding, first):
    kept = []
    forwarder.keep = kept.append
    forwarder.hold_signals_for(60.0, 5.0)
    assert kept == [0]  # of a process below the first
    forwarder.hold_signals_for(60.0, 5.0, ["SIGTERM"])
    assert time.monotonic_ns() < kept[-1] < time.monotonic_ns() + 5_000_000_000
    ways = [
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        lambda: forwarder.on_signal_kept_by_probe("SIGTERM"),
    ]
    for way in ways if first == "the supervisor" else ways[::-1]:
        way()
    os.kill(os.getpid(), signal.SIGTERM)
    (notice,) = forwarder.take_notices()
    assert notice.data["held"] and holding.wait(0.0) is None
    forwarder.settle_request()

    assert holding.wait(60.0) == -signal.SIGTERM and kept[-1] == 0
    forwarder.hold_signals_for(60.0, 5.0, ["SIGTERM"])
    assert kept[-1] == 0


def test_what_the_job_handles_does_not_wait_even_behind_one_that_does(forwarder, start):
    forwarder.allow_holding()
    handler = "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))"
    process = start(PYTHON, "-c", f"{handler}\nwhile True: signal.pause()")
    forwarder.attach(process)
    wait_until(lambda: not is_handled(process.pid, signal.SIGUSR2))  # behind its exec
    wait_until(lambda: is_handled(process.pid, signal.SIGUSR1))
    forwarder.hold_signals_for(60.0, 60.0)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert forwarder.take_notices()[-1].data["held"]
    os.kill(os.getpid(), signal.SIGUSR1)

    assert process.wait(60.0) == 7
    assert forwarder.take_notices()[-1].data["handled"]


def test_a_stop_signal_stops_the_job_and_continue_continues_it(wrapped, job_pid):
    popen = wrapped("sleep", "60", start_new_session=True)
    job = psutil.Process(job_pid(popen))

    popen.send_signal(signal.SIGTSTP)
    wait_until(lambda: job.status() == psutil.STATUS_STOPPED)
    assert psutil.Process(popen.pid).status() != psutil.STATUS_STOPPED
    popen.send_signal(signal.SIGCONT)

    wait_until(lambda: job.status() != psutil.STATUS_STOPPED)


# ── the wake-up of a thread that waits for all this ──────────────────────────────────────────────


def test_another_thread_and_the_end_of_the_job_wake_a_sleeper_once(forwarder, start):
    wakeup = forwarder.wakeup
    wakeup.set()  # one before the call is not lost
    assert wakeup.wait(60.0)
    threading.Timer(0.1, wakeup.set).start()
    assert wakeup.wait(60.0)
    assert not wakeup.wait(0.0)
    process = start("sleep", "0.1")
    while process.wait(0.0) is None:
        assert wakeup.wait(60.0, process)
    while wakeup.wait(0.0, process):  # what SIGCHLD left
        pass
    assert not wakeup.wait(0.01, process)


@pytest.mark.parametrize("how", [signal.SIGUSR1, signal.SIGSTOP], ids=["to us", "to the job"])
def test_signals_and_stopped_children_wake_the_main_thread(forwarder, start, how):
    process = start("sleep", "60")
    target = process.pid if how == signal.SIGSTOP else os.getpid()
    began_s = time.monotonic()
    threading.Timer(0.1, lambda: os.kill(target, how)).start()
    while not (process.poll() or process.stopped or forwarder.notices_waiting):
        assert forwarder.wakeup.wait(60.0, process)
    assert time.monotonic() - began_s < 30.0
