"""What the loop and the main thread sleep on."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from supervise.runtime import Forwarder, Process, Wakeup

FOREVER_S = 60.0


@pytest.fixture
def wakeup():
    made = Wakeup()
    yield made
    made.close()


def test_another_thread_wakes_the_sleeper_and_a_call_before_is_not_lost(wakeup):
    """So a command of an action is sent at once."""
    wakeup.set()
    assert wakeup.wait(FOREVER_S)

    threading.Timer(0.1, wakeup.set).start()
    assert wakeup.wait(FOREVER_S)
    assert not wakeup.wait(0.0)


def test_the_end_of_the_job_wakes_the_sleeper_once(wakeup):
    """A process that has ended must not keep the loop spinning."""
    process = Process.start(["sleep", "0.1"], os.environ)

    while process.wait(0.0) is None:
        assert wakeup.wait(FOREVER_S, process)
    assert not wakeup.wait(0.01, process)


@pytest.mark.parametrize("how", [signal.SIGUSR1, signal.SIGSTOP], ids=["to us", "to the job"])
def test_signals_and_stopped_children_wake_the_main_thread(how):
    """Ctrl-Z must reach our shell as fast as it stops the job."""
    forwarder = Forwarder()
    forwarder.install()
    process = Process.start(["sleep", "60"], os.environ)
    try:
        target = process.pid if how == signal.SIGSTOP else os.getpid()
        began_s = time.monotonic()
        threading.Timer(0.1, lambda: os.kill(target, how)).start()
        while not (process.poll() or process.stopped or forwarder.waiting):
            assert forwarder.wakeup.wait(FOREVER_S, process)
        assert time.monotonic() - began_s < FOREVER_S / 2
    finally:
        forwarder.restore()
        process.tree.end(signal.SIGKILL, 5.0)
        process.wait(60.0)
