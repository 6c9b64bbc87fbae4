"""Actions off the main loop."""

import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import ClassVar

from supervise.core.model import Action
from supervise.errors import ActionError
from supervise.runtime import PERFORMER_SLACK_S, Performer

JOB = object()


@dataclass(frozen=True)
class Calls(Action):
    """Does what the test says."""

    deadline_s: ClassVar[float] = 30.0
    call: object = None

    def perform(self, job, args, *, key):
        return self.call(job, args, key)


@dataclass(frozen=True)
class Hurried(Calls):
    """Has no time at all."""

    deadline_s: ClassVar[float] = -PERFORMER_SLACK_S


def finished(performer):
    deadline = time.monotonic() + 60
    while (found := performer.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def test_what_was_observed_comes_back_once():
    performer = Performer(JOB)
    performer.start(
        "inc-1/1/x",
        Calls(lambda job, args, key: {"got": [job is JOB, args, key]}),
        {"a": 1},
        key="k",
    )

    assert performer.running == "inc-1/1/x"
    found = finished(performer)

    assert (found.action_id, found.ok, found.error) == ("inc-1/1/x", True, None)
    assert found.result == {"got": [True, {"a": 1}, "k"]}
    assert performer.running is None
    assert performer.poll() is None


def test_the_loop_goes_on_while_an_action_runs():
    release = threading.Event()
    performer = Performer(JOB)
    performer.start("a", Calls(lambda *_: release.wait(20) and {}), {}, key="k")

    assert [performer.poll() for _ in range(3)] == [None] * 3
    release.set()
    assert finished(performer).ok


def test_an_actions_own_error_is_its_outcome():
    def fail(*_):
        raise ActionError("no space", retryable=True, hint="make some")

    performer = Performer(JOB)
    performer.start("a", Calls(fail), {}, key="k")
    found = finished(performer)

    assert (found.ok, found.error) == (False, "no space")
    assert found.result == {"retryable": True, "hint": "make some"}


def test_a_bug_in_an_action_is_an_outcome_too():
    performer = Performer(JOB)
    performer.start("a", Calls(lambda *_: 1 / 0), {}, key="k")
    found = finished(performer)

    assert not found.ok
    assert found.error == "internal error: ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in found.result["traceback"]


def test_an_overrun_fails_and_what_it_says_later_is_dropped():
    """The deadline stands; the next action can start, and gets its own outcome only."""
    release, late = threading.Event(), threading.Event()

    def slow(*_):
        release.wait(20)
        late.set()
        return {"late": True}

    performer = Performer(JOB)
    performer.start("slow", Hurried(slow), {}, key="k")
    found = finished(performer)
    assert (found.action_id, found.ok) == ("slow", False)
    assert "its effect is unknown" in found.error

    performer.start("next", Calls(lambda *_: late.wait(20) and {"next": True}), {}, key="k2")
    release.set()

    assert finished(performer).result == {"next": True}
    assert performer.poll() is None


def test_an_abandoned_action_does_not_hold_up_our_exit():
    code = """
import time
from dataclasses import dataclass
from supervise.core.model.action import Action
from supervise.runtime.processor import Performer
@dataclass(frozen=True)
class Hang(Action):
    def perform(self, job, args, *, key):
        time.sleep(600)
Performer(None).start("a", Hang(), {}, key="k")
"""

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_a_thread_the_action_fails(no_threads):
    performer = Performer(JOB)
    performer.start("a", Calls(lambda job, args, key: {}), {}, key="k")

    found = finished(performer)

    assert (found.ok, found.result) == (False, {"retryable": True})
    assert found.error == "no thread for the action: can't start new thread"
    assert performer.running is None
