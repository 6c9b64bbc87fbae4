"""The probe of one process: its parts, its life from import of torch to exit.

It is quiet until the job runs its first backward or optimizer step, and only then becomes a rank
with a segment; data-loader workers and compilers never do. It is off for good when it cannot work,
with the reason in a mark file and in its status. A forked child starts anew.
"""

from __future__ import annotations

import atexit
import os
from collections import deque
from threading import Lock, get_ident
from time import monotonic_ns
from typing import Any, Deque, Dict, Optional

from . import collectors as catalog
from . import config as settings
from . import sampling
from .collectors.timing import Times
from .control import evidence, reporting, status, verbs
from .control.commands import Commands
from .faults.injector import Drills
from .ipc.publisher import Publisher
from .patches import install
from .runtime import exit_status, files
from .runtime.guard import Guard, Part
from .runtime.scalars import Scalars
from .safeguards import Tools
from .stepping.step_tracker import Boundary
from .stepping.training_thread import Threads
from .torch_state import forward_patch
from .torch_state.batch_observer import Batches
from .torch_state.grad_scaler import Scaling
from .torch_state.learning_rate import LearningRate
from .torch_state.registry import Registry

BATCHES = 64  # fingerprints kept for a snapshot
STATUS_EVERY = 64  # steps between two statuses when nothing happened


class Probe:
    """Everything that watches one process.

    Attributes:
        on: false once the probe is off for good.
        inside: an optimizer's step is running. in_backward, in_forward: likewise.
        calls: for each call of a collector, the (part, method) pairs of the step under way.
        fingerprints: the newest batches, oldest first.
        adapted: whether the job reports values of its own.
        finite: whether the newest frame held finite values only.
        phase: of the newest beat.
        thread: the one that is watched, None before any backward; `pristine`: counters then.
        has_cuda: this torch was built for such devices.
    """

    def __init__(self, torch: Any, config: settings.Config) -> None:
        self.torch = torch
        self.config = config
        self.on = True
        self.inside = self.in_backward = self.in_forward = False
        self.rank, self.world_size = 0, 1
        self.guard = Guard(self._part_off)
        self.core = self.guard.part("core", vital=True)
        self.reporting = self.guard.part("report", share=1.0)
        self.registry = Registry()
        self.writer: Any = None
        self.has_cuda = bool(torch.version.cuda or getattr(torch.version, "hip", None))
        self._transforming = getattr(torch._C, "_are_functorch_transforms_active", bool)
        self._tracing = torch._C._get_tracing_state
        self._set_grad_enabled = torch._C._set_grad_enabled
        self._is_grad_enabled = torch.is_grad_enabled
        self._modules = catalog.modules()
        self._before_forward = install.before_forward(self)
        self.watching = sampling.around_forward(self)
        self._start_clean()

    def _start_clean(self) -> None:
        """Become a process that has not trained yet."""
        self.scalars = Scalars(self.torch, late=self.config.late)
        self.scaling = Scaling(self.scalars)
        self.rate = LearningRate(self.torch, self.config)
        self.times = Times()
        self.boundary = Boundary(self)
        self.drills = Drills(self, [])
        self.tools = Tools(self)
        self.collectors: Dict[str, Any]
        self.collectors, self.plan = catalog.start(self, self._modules)
        self.calls = self.plan.usual
        self.batches = Batches(self.guard, self.collectors)
        self.fingerprints: Deque[Dict[str, Any]] = deque(maxlen=BATCHES)
        self.sampling, self.sampler, self.snapshots = sampling.start(self)
        self.publisher: Any = None
        self.commands: Any = None
        self._mailbox: Any = None
        self.rollbacks: Any = None
        self.on_demand: Any = None
        self._phases: Dict[str, int] = {}
        self.finite, self.phase, self.adapted = True, "", False
        self.thread: Optional[int] = None
        self.threads = Threads(self)
        self._opening = Lock()
        self._status_due, self._status_age = True, 0
        self.pristine = self.state()

    def install(self) -> None:
        """Patch torch, and be told of forks and of the exit. To be called once."""
        self.registry.install(self.torch)
        install.install(self.torch, self)
        exit_status.install()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._exit)

    # ── when to keep still ────────────────────────────────────────────────────────────────────

    def absent(self) -> bool:
        """Whether a hook must do nothing where no functorch transform can be at work.

        Off; in another thread than the one that trains; while a tracer or a capture is at work.
        """
        return (
            not self.on
            or (self.thread is not None and get_ident() != self.thread)
            or self._tracing() is not None
            or (self.has_cuda and self._captures())
        )

    def _captures(self) -> bool:
        cuda = self.torch.cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def off_duty(self) -> bool:
        """Whether a hook must do nothing: as `absent`, or inside a functorch transform."""
        return self.absent() or self._transforming()

    def open(self) -> bool:
        """Become a rank, if this process is none yet; whether it is one."""
        if self.writer is not None or not self.on:
            return self.on
        if not self._opening.acquire(blocking=False):
            return False  # another thread is at it
        try:
            return self._open()
        finally:
            self._opening.release()

    def _open(self) -> bool:
        from . import wire
        from .ipc.mailbox import Mailbox
        from .ipc.writer import Writer

        config = self.config
        self.rank, self.world_size = settings.place(dict(os.environ), self.torch)
        try:
            self.writer = Writer.create(
                config.shm, config.run, self.rank, self.world_size, config.slots, config.capacity
            )
        except (OSError, wire.WireError) as error:
            self.off(f"no segment in {config.shm}: {error}")
            return False
        self.threads.begins()
        self._phases = {name: index for index, name in enumerate(wire.PHASES)}
        self._mailbox = Mailbox(self.writer)
        try:
            self.commands = Commands(self, self._mailbox, self.world_size, config.lease_s)
            self.publisher = Publisher(self.writer, self.scalars, self._finish, self.notice)
            verbs.start(self)
            self.drills = Drills(self, config.drills)
            self.drills.begin(self.boundary.number)
        except Exception as error:  # half a probe would only tell a later, stranger error
            self.off(f"probe.json cannot be followed: {type(error).__name__}: {error}")
            return False
        evidence.listen(config.marks)
        self._write_status()
        return True

    def off(self, reason: str) -> None:
        """Switch the whole probe off; the job goes on as if it had never been there."""
        if not self.on:
            return
        self.on = False
        try:
            path = os.path.join(self.config.marks, f"off.{os.getpid()}")
            text = reason.replace("\n", " ") + "\n"
            files.replace(path, text.encode("utf-8", "replace"))
            self._write_status()
        except Exception:  # nobody is left to tell
            pass

    # ── words to the supervisor ───────────────────────────────────────────────────────────────

    def beat(self, phase: str) -> None:
        """Show a sign of life."""
        if self.writer is not None:
            self.phase = phase
            self.writer.beat(monotonic_ns(), self._phases[phase])

    def notice(self, kind: str, message: str, data: Any = None, step: int = -1) -> None:
        """Say something about the watching itself, at the step under way or at `step`."""
        if self._mailbox is not None:
            at = self.boundary.number if step < 0 else step
            self._mailbox.notice(kind, message, at, data or {})
            self.status_changed()

    def status_changed(self) -> None:
        """The status is to be written at the next boundary; at once while the job is held."""
        self._status_due = True
        if self.commands is not None and self.commands.paused:
            self._write_status()

    def _write_status(self) -> None:
        self._status_due, self._status_age = False, 0
        if self.writer is not None:
            self.writer.status(status.describe(self))

    def _part_off(self, part: Part, reason: str) -> None:
        if part.vital:
            self.off(f"{part.name}: {reason}")
        else:
            self.notice("collector-off", f"{part.name} is off: {reason}", {"collector": part.name})

    def without_grad(self, function: Any, *args: Any) -> Any:
        """Call `function` with gradients off. As `torch.no_grad`, at a tenth of its cost."""
        enabled = self._is_grad_enabled()
        self._set_grad_enabled(False)
        try:
            return function(*args)
        finally:
            self._set_grad_enabled(enabled)

    # ── a step ────────────────────────────────────────────────────────────────────────────────

    def optimizer_appeared(self, optimizer: Any) -> None:
        """An optimizer steps for the first time: look which modules it trains."""
        self.registry.saw_optimizer(optimizer)
        for root in self.registry.roots():
            forward_patch.attach(self, root, self._before_forward)
        self.rollbacks.probe_batch.optimizer_appeared()

    def at_boundary(self, result: Any) -> Any:
        """If a step has just ended on time: keep a savepoint, obey commands.

        Args:
            result: what the optimizer's step is about to return.

        Returns:
            What it shall return: after a rollback, the result of the step that was gone back to.

        Raises:
            KeyboardInterrupt: the supervisor wants the job to stop.
        """
        if not self.boundary.on_time or not self.on:
            return result
        self.boundary.on_time = False
        self.boundary.spent_ns = self.guard.turn()
        self.rollbacks.result = result
        if self.rollbacks.due():
            self.guard.run(self.guard.part("savepoints", share=1.0), self.rollbacks.regular)
        self._status_age += 1
        if self._status_due or self._status_age >= STATUS_EVERY:
            self.guard.run(self.core, self._write_status)
        self.commands.run()
        result, self.rollbacks.result = self.rollbacks.result, None
        return result

    def state(self) -> Dict[str, float]:
        """Return the counters that go back with a rollback."""
        state: Dict[str, float] = {}
        for collector in self.collectors.values():
            state.update(collector.state())
        return state

    def _finish(self, step: int, attempt: int, values: Dict[str, float]) -> None:
        self.guard.run_all(self.calls["finish"], values)
        self.finite = not values.get("nan_inf_events")
        self.rollbacks.finished(step, attempt, values)

    # ── the ends of a process ─────────────────────────────────────────────────────────────────

    def _forked(self) -> None:
        self.writer = None  # the parent's; its `Writer` is inert in a child
        self.inside = self.in_backward = self.in_forward = False
        self.guard.reset()
        if self.on:
            try:
                self._start_clean()
            except Exception:  # the child must run
                self.on = False

    def _exit(self) -> None:
        if self.writer is None or not self.on:
            return
        try:
            self.boundary.end()
            self.tools.end()
            self.publisher.flush()
            reporting.tell_rest(self)
            self.beat("exiting")
            self.writer.last_words(*exit_status.last_words())
            self.rollbacks.close()
            self.writer.close()
        except Exception:  # at exit nobody is left to tell
            pass
        self.on = False
