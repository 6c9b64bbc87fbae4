"""Stopping the gang and starting it again from a checkpoint, at most once per order.

First of all, with the job still alive, it is made sure that the checkpoint can be put back; that
takes as long as reading and copying it. Then three stages, each written down before the next
begins: the old gang is dead (`how`), a checkpoint is in its place (`path`), the new process runs
(`pid`). `args` are the order, and from the second stage on those that were followed. A supervisor
that is asked for the same order again, after it or its predecessor died, goes on where the marks
end. Between the start and its mark there is the process itself, which carries the number of its
launch (see `launcher`).

Before the job is stopped, and again before it is started, the host is examined (see `host`): on
one that is not fit nothing is started.

Before a checkpoint is put in its place, the engine chooses once more, among what is verified by
then. Whatever fails there costs the choice and not the run: the order that was given is the last
resort.

From the stop to the start the run's exit code is `HUMAN`: should it end there, a policy stopped it.
So it is when what was started fails before its first step, and when a crash is to be answered with
a start and cannot be: nobody came back.

Runs on the performer's thread; the start is made on the main loop, which owns the segments.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..actions.job_control import HUMAN
from ..actions.recovery import SLOWEST_RELAUNCH
from ..checkpoints.registry import BatchFacts, RankCounters
from ..checkpoints.service import CheckpointService
from ..core import host_health, reasons
from ..core.job_lifecycle import MEANT, has_crashed, has_start_failed
from ..core.model.events import Notice
from ..core.model.failure import FailureClass
from ..core.model.payload import NOTHING, Payload, RelaunchArgs
from ..core.model.policy import Policy
from ..core.run_state import State
from ..errors import ActionError, StoreError, SuperviseError, reading_recorded_data
from ..store import files
from ..store.run_directory import RunDir
from .controller import Control
from .hardware import Hardware
from .host import HealthGate, Start
from .idleness import explain_movement
from .launcher import UNFIT, Launch
from .process import LOOP_S, halt_job

GRACE_S, TERM_S = 10.0, 20.0  # enough for exit hooks; what the job would save now is set aside
STOP_S = LOOP_S + GRACE_S + TERM_S + 20.0  # until everybody is dead, KILL included
MARGIN_S = 5.0  # no start so shortly before the deadline: its outcome might not be seen
LOOK_S = 0.05  # between two looks whether the guard is done

T = TypeVar("T")
_log = logging.getLogger(__name__)


def was_stopped_for(run: RunDir, key: str) -> bool:
    """Whether the job was stopped for this order, and was not started again. Raises StoreError."""
    marks = Marks.read(run, _marks(key), key)
    return marks.how not in (None, "ended") and marks.pid is None


def exit_code_by_policy(job: Control | None, state: State, policy: Policy) -> int | None:
    """Return the exit code that a policy makes the run end with; None: the job's own counts.

    A start that failed came to nothing, unless the job itself says what is wrong. A crash that the
    policy answers with a start, and that none followed, needs a person too.
    """
    if policy.job.on_crash and state.job.no_restart_reason and has_crashed(state.job):
        return HUMAN
    if has_start_failed(state) and state.job.returncode not in MEANT:
        return HUMAN
    return None if job is None else job.exit_code


def _marks(key: str) -> str:
    return f"relaunch/{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


class Marks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stages of an order that are done; what is not is None.

    Attributes:
        key: of the order. stopping: the job is being stopped, and lived before.
        how, returncode: how the old gang ended. args: what is followed.
        path, moved, probe_batch, counters: see `RestoredCheckpoint`.
        failed: what was passed over, and why. pid, attempt: of the new process.
    """

    key: str
    stopping: bool | None = None
    how: str | None = None
    returncode: int | None = None
    args: Payload | None = None
    path: str | None = None
    moved: list[str] | None = None
    probe_batch: BatchFacts | None = None
    counters: RankCounters | None = None
    failed: dict[str, str] | None = None
    pid: int | None = None
    attempt: int | None = None

    @classmethod
    def read(cls, run: RunDir, name: str, key: str) -> Marks:
        """Return the marks of an order, none before it was begun. Raises StoreError."""
        if not (run.path / name).exists():
            return cls(key=key)
        with reading_recorded_data(f"the marks in {run.path / name}", "supervise why RUN"):
            fields = run.read_json(name)
            return msgspec.convert(fields, cls, dec_hook=lambda form, value: form(value))

    @property
    def order(self) -> RelaunchArgs:
        """The order that is followed."""
        return (self.args or NOTHING).parse(RelaunchArgs)

    def document(self) -> Payload:
        """Return them as JSON."""
        return Payload(msgspec.to_builtins(self, enc_hook=dict))


def health_gate(
    policy: Callable[[], Policy], environ: Mapping[str, str], machine: Callable[[], Hardware]
) -> HealthGate:
    """Return what looks at this host for a run with this policy and the job's environment."""

    def failure_classes() -> Sequence[FailureClass]:
        from ..catalog.loader import failure_classes  # most jobs need no other start

        return failure_classes(policy().job.failures)

    return HealthGate(lambda: policy().job.health, environ, machine, failure_classes)


class Loop(Protocol):
    """What this needs of the main loop, and only there. The job's processes are dead."""

    def verify_candidates(self, within_s: float) -> bool:
        """Let the guard verify at once what the relaunch may go back to; False: it is settled."""
        ...

    def choose_relaunch_checkpoint(self) -> Payload:
        """Let the engine choose among what is verified by now; return the order's arguments."""
        ...

    def restart(self, launch: Launch) -> int:
        """Make the launch the job's; return its pid."""
        ...


@dataclass(frozen=True)
class Relauncher:
    """Carries out `Control.relaunch` for one run.

    Attributes:
        guard: of the job's checkpoints.
        gate: looks at the host. process: takes what it reports, on the main loop.
    """

    run: RunDir
    guard: CheckpointService
    loop: Loop
    gate: HealthGate
    process: Callable[[Notice], object]

    def __call__(self, job: Control, args: Payload, key: str, deadline_s: float) -> Payload:
        """Stop, put back, start; see `core.model.action.Job.relaunch` for what is returned.

        Raises:
            ActionError: the checkpoint cannot be put back, the host is not fit, the training that
                it was for is over, or it works, and the job goes on; the old gang is still alive;
                or the checkpoint is not in its place, the host is not fit, or the command could not
                be started, and the job has ended.
        """
        until = time.monotonic() + deadline_s
        name = _marks(key)
        marks: Marks = self._carefully(lambda: Marks.read(self.run, name, key))
        prepared = ""
        if marks.how is None:
            order = args.parse(RelaunchArgs)
            prepared = order.checkpoint
            self._carefully(lambda: self.guard.prepare_restore(prepared))
            if job.process.returncode is None:
                self._check_host(job, prepared, until - STOP_S, alive=True)
                if works := self._movement(job, order.if_idle_s):
                    reason = f"the job makes no steps but works ({works}): not restarted"
                    raise ActionError(reason)
            if time.monotonic() > until - STOP_S - MARGIN_S:
                raise ActionError("preparing took so long that the job was not stopped any more")
            job.raise_if_withdrawn()
            marks = replace(self._stop(job, name, marks), args=args)
            self._write(name, marks)
        job.exit_code = None if marks.how == "ended" else HUMAN
        if marks.path is None:
            marks = self._put_back(job, marks, prepared, until)
            self._write(name, marks)
        order = marks.order
        if marks.pid is None:
            self._check_host(job, order.checkpoint, until - 2.0 * MARGIN_S)
            marks = self._start(job, name, marks, until)
        result = {k: v for k, v in marks.document().items() if k not in ("key", "args")}
        return Payload({**result, "checkpoint": order.checkpoint, "step": order.step})

    def _movement(self, job: Control, idle_s: float) -> str:
        """Return why a job that lives cannot count as idle, "" where it can or need not."""
        works = explain_movement(job, idle_s) if idle_s else ""
        return works if job.process.returncode is None else ""

    def _check_host(
        self, job: Control, checkpoint: str, until: float, *, alive: bool = False
    ) -> None:
        """Look at the host, and report it; a look that fails costs the look and not the start.

        Raises:
            ActionError: it is not fit.
        """
        try:
            path, size, python = self.guard.checkpoint_origin(checkpoint)
            start = Start(Path(path).parent, size, python)
            findings = self.gate.check_host(start, max(0.0, until - time.monotonic()), alive=alive)
            text, data = host_health.health_summary(findings)
            notice = Notice(time.monotonic_ns(), host_health.HEALTH_NOTICE, text, data=data)
            job.on_loop(lambda: self.process(notice), LOOP_S)
        except Exception:
            _log.exception("the health of this host is not known")
            return
        if reason := host_health.explain_unfit(findings):
            if not alive:
                with suppress(StoreError):
                    memo = self.gate.unfit_host_record(start, reason)
                    self.run.write_json(UNFIT, msgspec.to_builtins(memo))
            raise ActionError(str(reasons.HostUnfit(trouble=reason)))

    def _put_back(self, job: Control, marks: Marks, prepared: str, until: float) -> Marks:
        """Put back what the engine chooses, or else what was ordered; return the marks of that.

        Args:
            prepared: the checkpoint that is, "" for none.
        """
        failed: dict[str, Exception] = {}
        order = marks.args or NOTHING
        while True:
            try:
                args = self._choose(job, order, until)
            except Exception as error:  # the job is dead: nothing that is optional may keep it so
                args, failed["checkpoint-choice"] = order, error
            args = order if args["checkpoint"] in failed else args
            name = args.parse(RelaunchArgs).checkpoint
            if isinstance(newest_error := failed.get(name), SuperviseError):
                raise ActionError(str(newest_error), hint=newest_error.hint) from newest_error
            try:
                if name != prepared:
                    self.guard.prepare_restore(name)
                back = self.guard.restore(name)
            except SuperviseError as error:
                failed[name], prepared = error, ""  # the guard forgets what was prepared before
                continue
            return replace(
                marks,
                args=args,
                path=back.path,
                moved=back.moved,
                probe_batch=back.probe_batch or None,
                counters=back.counters or None,
                failed={stage: str(error) for stage, error in failed.items()} or None,
            )

    def _choose(self, job: Control, order: Payload, until: float) -> Payload:
        """Return the order as the engine wants it once the rest is verified.

        As it was given where people approved it, or when nothing else could be prepared in time.

        Raises:
            ActionError: the main loop was busy as long as that, or nobody waits any more.
        """

        def latest(args: Payload) -> float:
            return until - MARGIN_S - args.parse(RelaunchArgs).bytes / SLOWEST_RELAUNCH

        def in_time(call: Callable[[float], T]) -> T:
            def work() -> T:  # what comes too late must not take effect any more
                if (left_s := latest(order) - time.monotonic()) <= 0.0:
                    raise ActionError("there is no time to choose")
                return call(left_s)

            return job.on_loop(work, max(0.0, latest(order) - time.monotonic()))

        if not in_time(self.loop.verify_candidates):
            return order
        while self.guard.is_verifying_now and time.monotonic() < latest(order):
            time.sleep(LOOK_S)
        args = in_time(lambda _: self.loop.choose_relaunch_checkpoint())
        return args if time.monotonic() < latest(args) else order

    def _start(self, job: Control, name: str, marks: Marks, until: float) -> Marks:
        order = marks.order
        launch = Launch(
            order.attempt,
            order.step,
            marks.path or "",
            order.rewarm,
            order.skip,
            marks.probe_batch,
            marks.counters,
        )

        def start() -> Marks:
            if time.monotonic() > until - MARGIN_S:
                raise ActionError("it came too late to be started again")
            pid = self._carefully(lambda: self.loop.restart(launch))
            started = replace(marks, pid=pid, attempt=launch.attempt)
            job.exit_code = None
            with suppress(ActionError):  # it runs, whatever the disk says
                self._write(name, started)
            return started

        return job.on_loop(start, max(0.0, until - time.monotonic()))

    def _stop(self, job: Control, name: str, marks: Marks) -> Marks:
        """End the job, and say how it ended: `stopped` by one who died over that cannot be told."""
        before_us = bool(marks.stopping)
        stopping = before_us or job.process.returncode is None
        self._write(name, replace(marks, stopping=stopping))
        job.on_loop(job.process.return_terminal, LOOP_S)  # a Ctrl-C from now on ends the whole run
        end = halt_job(job, grace_s=GRACE_S, term_s=TERM_S)
        if end.returncode is None or end.survivors:
            raise ActionError(f"processes of the job are still alive after KILL: {end}")
        outcome = "stopped" if before_us and end.how == "ended" else end.how
        return replace(marks, stopping=None, how=outcome, returncode=end.returncode)

    def _write(self, name: str, marks: Marks) -> None:
        try:
            files.make_directory((self.run.path / name).parent)
            self.run.write_json(name, marks.document(), durable=True)
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
