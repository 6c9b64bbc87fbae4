"""Stopping the gang and starting it again from a checkpoint, at most once per order.

First of all, with the job still alive, it is made sure that the checkpoint can be put back; that
takes as long as reading and copying it. Then three stages, each written down before the next
begins: the old gang is dead (`how`), the checkpoint is in its place (`path`), the new process runs
(`pid`). A supervisor that is asked for the same order again, after it or its predecessor died, goes
on where the marks end. Between the start and its mark there is the process itself, which carries
the number of its launch (see `launching`).

From the stop to the start the run's exit code is `HUMAN`: should it end there, a policy stopped it.

Runs on the performer's thread; the start is made on the main loop, which owns signals, terminal and
segments.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from ..actions.stop import HUMAN
from ..errors import ActionError, StoreError, SuperviseError
from ..job.control import Control
from ..job.halting import LOOP_S, halt
from ..store.rundir import RunDir
from .launching import Launch

GRACE_S, TERM_S = 10.0, 20.0  # enough for exit hooks; what the job would save now is set aside
STOP_S = LOOP_S + GRACE_S + TERM_S + 20.0  # until everybody is dead, KILL included
MARGIN_S = 5.0  # no start so shortly before the deadline: its outcome might not be heard of


class Guard(Protocol):
    """What this needs of the guard, see `inputs.checkpoints.Guard`."""

    def prepare(self, name: str) -> None: ...
    def put_back(self, name: str) -> Mapping[str, Any]: ...


class Relauncher:
    """Carries out `Control.relaunch` for one run.

    Args:
        guard: of the job's checkpoints.
        start: on the main loop, makes the launch the job's and returns its pid.
    """

    def __init__(self, run: RunDir, guard: Guard, start: Callable[[Launch], int]) -> None:
        self._run = run
        self._guard = guard
        self._start = start

    def __call__(
        self, job: Control, args: Mapping[str, Any], key: str, deadline_s: float
    ) -> dict[str, Any]:
        """Stop, put back, start; see `core.action.Job.relaunch` for what is returned.

        Raises:
            ActionError: the checkpoint cannot be put back, and the job goes on; the old gang is
                still alive; or the checkpoint is not in its place, or the command could not be
                started, and the job has ended.
        """
        until = time.monotonic() + deadline_s
        name = f"relaunch/{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        done = self._read(name, key)
        if "how" not in done:
            self._carefully(lambda: self._guard.prepare(str(args["checkpoint"])))
            if time.monotonic() > until - STOP_S - MARGIN_S:
                raise ActionError("preparing took so long that the job was not stopped any more")
            done |= self._stop(job)
            self._write(name, done)
        job.exit_code = None if done["how"] == "ended" else HUMAN
        if "path" not in done:
            back = self._carefully(lambda: self._guard.put_back(str(args["checkpoint"])))
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
                job.exit_code = None
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
