"""Runs actions off the main loop, one at a time, each with a deadline.

The main loop calls `start` once an intent is on disk, and `poll` in each iteration, which returns
exactly one `Finished` per start. An action that overruns its deadline is reported as failed; its
thread is abandoned (a daemon, so that it cannot delay the exit) and its later result is dropped.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from ..core.model.action import Action, Job
from ..core.model.events import Finished
from ..errors import ActionError
from ..threads import Thread

_log = logging.getLogger(__name__)

SLACK_S = 2.0  # time beyond the deadline for an action to report its own failure


class Performer:
    """Performs actions on `job`. All methods are for the main loop's thread."""

    def __init__(self, job: Job, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` makes the main loop call `poll` at once."""
        self._wake = wake
        self._job = job
        self._running: str | None = None
        self._done: SimpleQueue[Finished] = SimpleQueue()
        self._deadline_ns = 0
        self._deadline_s = 0.0

    @property
    def running(self) -> str | None:
        """Id of the action under way, None if there is none."""
        return self._running

    def start(self, action_id: str, action: Action, args: Mapping[str, Any], *, key: str) -> None:
        """Start `action.perform(job, args, key=key)` on a thread of its own.

        Raises:
            RuntimeError: another action is running; the engine never does that.
        """
        if self._running is not None:
            raise RuntimeError(f"{action_id} was started while {self._running} is running")
        self._running = action_id
        self._deadline_s = action.limit_s(args)
        self._deadline_ns = time.monotonic_ns() + int((self._deadline_s + SLACK_S) * 1e9)
        # A new queue: the late result of an abandoned thread goes into one that is never read.
        self._done = SimpleQueue()
        thread = Thread(
            target=_perform,
            args=(self._job, action_id, action, dict(args), key, self._done, self._wake),
            name=f"action {action_id}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:  # at the limit of processes and threads
            text, facts = f"no thread for the action: {error}", {"retryable": True}
            self._done.put(Finished(time.monotonic_ns(), action_id, False, facts, text))

    def poll(self) -> Finished | None:
        """Return the result of the action once it has finished or overrun its deadline."""
        if self._running is None:
            return None
        try:
            finished = self._done.get_nowait()
        except Empty:
            now_ns = time.monotonic_ns()
            if now_ns < self._deadline_ns:
                return None
            error = f"did not finish within {self._deadline_s:g} s; its effect is unknown"
            finished = Finished(now_ns, self._running, ok=False, error=error)
        self._running = None
        return finished


def _perform(
    job: Job,
    action_id: str,
    action: Action,
    args: Mapping[str, Any],
    key: str,
    done: SimpleQueue[Finished],
    wake: Callable[[], None],
) -> None:
    try:
        result = action.perform(job, args, key=key)
    except ActionError as error:
        facts: dict[str, Any] = {"retryable": error.retryable}
        if error.refused:
            facts["refused"] = True
        if error.inconsistent:
            facts["inconsistent"] = True
        if error.unfenceable:
            facts["unfenceable"] = error.unfenceable
        if error.no_space:
            facts["no_space"] = True
        if error.hint:
            facts["hint"] = error.hint
        finished = Finished(time.monotonic_ns(), action_id, False, facts, str(error))
    except Exception as error:  # a bug of ours must not leave the incident without an outcome
        _log.exception("action %s failed with an internal error", action_id)
        facts = {"retryable": False, "traceback": traceback.format_exc()}
        text = f"internal error: {type(error).__name__}: {error}"
        finished = Finished(time.monotonic_ns(), action_id, False, facts, text)
    else:
        finished = Finished(time.monotonic_ns(), action_id, True, result)
    done.put(finished)
    wake()
