"""Actions off the main loop."""

import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import ClassVar

import pytest

from supervise.core.model import Action
from supervise.errors import ActionError
from supervise.runtime import Performer
from tests.support.waiting import wait_until

JOB = object()


@dataclass(frozen=True)
class Calls(Action):
    deadline_s: ClassVar[float] = 30.0
    call: object = None

    def perform(self, job, args, *, key):
        return self.call(job, args, key)


@dataclass(frozen=True)
class Hurried(Calls):
    deadline_s: ClassVar[float] = -600.0


@pytest.fixture
def performer():
    return Performer(JOB)


def finished(performer):
    return wait_until(performer.poll, "the end of the action", every_s=0.001)


def test_the_loop_goes_on_while_an_action_runs_and_its_result_comes_back_once(performer):
    release = threading.Event()

    def call(job, args, key):
        release.wait(20)
        return {"got": [job is JOB, args, key]}

    performer.start("inc-1/1/x", Calls(call), {"a": 1}, key="k")

    assert performer.running == "inc-1/1/x"
    assert [performer.poll() for _ in range(3)] == [None] * 3
    release.set()
    found = finished(performer)
    assert (found.action_id, found.ok, found.error) == ("inc-1/1/x", True, None)
    assert found.result == {"got": [True, {"a": 1}, "k"]}
    assert performer.running is None
    assert performer.poll() is None


def test_an_error_of_an_action_and_a_bug_in_it_are_outcomes(performer):
    """With its hint and whether a retry can help; an incident never waits for our own bug."""

    def fail(*_):
        raise ActionError("no space", retryable=True, hint="make some")

    performer.start("a", Calls(fail), {}, key="k")
    found = finished(performer)
    assert (found.ok, found.error) == (False, "no space")
    assert found.result == {"retryable": True, "hint": "make some"}

    performer.start("a", Calls(lambda *_: 1 / 0), {}, key="k")
    found = finished(performer)
    assert not found.ok
    assert found.error == "internal error: ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in found.result["traceback"]


def test_an_overrun_fails_and_what_it_says_later_is_dropped(performer):
    """The deadline stands; the next action can start, and gets its own outcome only."""
    release, late = threading.Event(), threading.Event()

    def slow(*_):
        release.wait(20)
        late.set()
        return {"late": True}

    performer.start("slow", Hurried(slow), {}, key="k")
    found = finished(performer)
    assert (found.action_id, found.ok) == ("slow", False)
    assert "its effect is unknown" in found.error

    performer.start("next", Calls(lambda *_: late.wait(20) and {"next": True}), {}, key="k2")
    release.set()

    assert finished(performer).result == {"next": True}
    assert performer.poll() is None


HANGS = """
import time
from dataclasses import dataclass
from supervise.core.model import Action
from supervise.runtime import Performer
@dataclass(frozen=True)
class Hang(Action):
    def perform(self, job, args, *, key):
        time.sleep(600)
Performer(None).start("a", Hang(), {}, key="k")
"""


@pytest.mark.slow
def test_an_abandoned_action_does_not_hold_up_our_exit():
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=60)


def test_without_a_thread_the_action_fails_and_may_be_tried_again(performer, no_threads):
    performer.start("a", Calls(lambda job, args, key: {}), {}, key="k")

    found = finished(performer)

    assert (found.ok, found.result) == (False, {"retryable": True})
    assert found.error == "no thread for the action: can't start new thread"
    assert performer.running is None
