"""Stopping the gang and starting it again from a checkpoint, at most once per order.

Three stages, each written down before the next begins: the old gang is dead (`how`), the checkpoint
is in its place (`path`), the new process runs (`pid`). A supervisor that is asked for the same
order again, after it or its predecessor died, goes on where the marks end. Between the start and
its mark there is the process itself, which carries the number of its launch (see `launching`).

Runs on the performer's thread; the start is made on the main loop, which owns signals, terminal and
segments.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..errors import ActionError, StoreError, SuperviseError
from ..job.control import Control
from ..job.halting import LOOP_S, halt
from ..store.rundir import RunDir
from .launching import Launch

GRACE_S, TERM_S = 10.0, 20.0  # enough for exit hooks; what the job would save now is set aside
MARGIN_S = 5.0  # no start so shortly before the deadline: its outcome might not be heard of

PutBack = Callable[[str], Mapping[str, Any]]


class Relauncher:
    """Carries out `Control.relaunch` for one run.

    Args:
        put_back: puts the checkpoint of this id in its place; returns `path` and `moved`.
        start: on the main loop, makes the launch the job's and returns its pid.
    """

    def __init__(self, run: RunDir, put_back: PutBack, start: Callable[[Launch], int]) -> None:
        self._run = run
        self._put_back = put_back
        self._start = start

    def __call__(
        self, job: Control, args: Mapping[str, Any], key: str, deadline_s: float
    ) -> dict[str, Any]:
        """Stop, put back, start; see `core.action.Job.relaunch` for what is returned.

        Raises:
            ActionError: the old gang is still alive, the checkpoint is not in its place, or the
                command could not be started.
        """
        until = time.monotonic() + deadline_s
        name = f"relaunch/{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        done = self._read(name, key)
        if "how" not in done:
            done |= self._stop(job)
            self._write(name, done)
        if "path" not in done:
            back = self._carefully(lambda: self._put_back(str(args["checkpoint"])))
            done |= {"path": str(back["path"]), "moved": list(back["moved"])}
            self._write(name, done)
        if "pid" not in done:
            launch = Launch(
                int(args["attempt"]), int(args["step"]), done["path"], args["rewarm"], args["skip"]
            )

            def start() -> None:
                if time.monotonic() > until - MARGIN_S:
                    raise ActionError("it came too late to be started again")
                pid = self._carefully(lambda: self._start(launch))
                done.update(pid=pid, attempt=launch.attempt)
                with suppress(ActionError):  # it runs, whatever the disk says
                    self._write(name, done)

            job.on_loop(start, max(0.0, until - time.monotonic()))
        del done["key"]
        return {**done, "checkpoint": args["checkpoint"], "step": args["step"]}

    def _stop(self, job: Control) -> dict[str, Any]:
        job.on_loop(job.process.step_back, LOOP_S)  # a Ctrl-C from now on is about the whole run
        seen = halt(job, grace_s=GRACE_S, term_s=TERM_S)
        if seen["returncode"] is None or seen["survivors"]:
            raise ActionError(f"processes of the job are still alive after KILL: {seen}")
        return {"how": seen["how"], "returncode": seen["returncode"]}

    def _read(self, name: str, key: str) -> dict[str, Any]:
        """Return the stages that are done; the file says whose they are."""
        if not (self._run.path / name).exists():
            return {"key": key}
        return dict(self._carefully(lambda: self._run.read_json(name)))

    def _write(self, name: str, done: Mapping[str, Any]) -> None:
        try:
            (self._run.path / name).parent.mkdir(exist_ok=True)
            self._run.write_json(name, done, durable=True)
        except (OSError, StoreError) as error:
            raise ActionError(f"the relaunch cannot be written down: {error}") from error

    def _carefully(self, call: Callable[[], Any]) -> Any:
        """Turn any refusal into the action's own error."""
        try:
            return call()
        except ActionError:
            raise
        except SuperviseError as error:
            raise ActionError(str(error), hint=error.hint) from error
