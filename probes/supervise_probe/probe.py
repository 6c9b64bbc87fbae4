"""The probe of one process: its life from import of torch to exit.

It is quiet until the job runs its first backward or optimizer step, and only then becomes a rank
with a segment; data-loader workers and compilers never do. It is off for good when it cannot work,
with the reason in a mark file and in its status. A forked child starts again.
"""

from __future__ import annotations

import atexit
import os
import platform
from threading import Lock
from typing import Any, Mapping

from . import context as settings
from .context import ProbeContext, Reporter
from .hooks import calls, install
from .hooks.listeners import Listeners
from .runtime import evidence, failure, files
from .runtime.guard import Gate, Guard, Part
from .runtime.scalars import Scalars
from .torch_state.records import Position, Times
from .torch_state.registry import Registry
from .wiring import Life, Parts, RankParts

# What forked children have of their parents. Pinned memory that is freed calls CUDA, which a child
# must not; while nobody writes to it, it is memory of the parent.
_INHERITED: list[Parts] = []


class Probe:
    """What stays when a process forks, and the parts of this one.

    Attributes:
        gate: whether hooks must keep still. guard: runs the pieces. The patches hold both.
        parts: of this process; a forked child makes its own.
    """

    def __init__(self, torch: Any, config: settings.Config) -> None:
        self._torch = torch
        self.gate, self.guard = Gate(torch), Guard(self._part_off, torch)
        self._report_part = self.guard.part("report", share=1.0)
        self._registry, self._times = Registry(), Times()
        self.parts = self._fresh(config)
        self._listeners = Listeners()
        self._put_listeners()
        self._around = calls.make_around(torch, self.gate, self._times, self._listeners)

    def _fresh(self, config: settings.Config) -> Parts:
        """Return the parts of a process that has not trained yet."""
        self._opening = Lock()
        position = Position(config.first_step, config.attempt)
        context = ProbeContext(
            self._torch,
            config,
            self.guard,
            self.gate,
            self._registry,
            Scalars(self._torch, late=config.late),
            position,
            Reporter(position),
        )
        life = Life(self.become_rank, self._another_training, self._attach, self._attach_inside)
        return Parts(context, self._times, life)

    def start_process(self, config: settings.Config) -> None:
        """Become a process that has not trained yet, as after a fork."""
        self.gate.reset()
        self.guard.reset()
        self._times.reset()
        if self.parts.rank is not None:
            self.parts.rank.rollbacks.become_inert()
        _INHERITED.append(self.parts)
        self.parts = self._fresh(config)
        self._put_listeners()

    def _put_listeners(self) -> None:
        """Have the patched functions call those of this process."""
        parts, put = self.parts, self._listeners
        put.step, put.forward, put.loader = parts.steps, parts.forward, parts.loader
        put.saves, put.trainer = parts.saves, parts.trainer

    def install(self) -> None:
        """Patch torch, and register for forks and the exit. Call it once."""
        self._registry.install(self._torch)
        install.install_patches(self._torch, self.gate, self.guard, self._times, self._listeners)
        failure.record_exit_calls()
        failure.watch_threads(self._location)
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._exit)

    def listen(self, library: Any) -> None:
        """Hear what a training library, which was just imported, will do."""
        from .hooks.libraries import HookContext, patch_imported_library

        patch_imported_library(
            HookContext(self.gate, self.guard, self._times, self._listeners), library
        )

    def _attach(self) -> None:
        for root in self._registry.roots():
            calls.watch_calls(root, self._around)

    def _attach_inside(self) -> None:
        calls.attach_to_wrapped_modules(self._registry, self._around)

    # ── a rank ────────────────────────────────────────────────────────────────────────────────

    def become_rank(self) -> bool:
        """Become a rank, if this process is none yet; whether it is one."""
        if self.parts.context.reporter.writer is not None or not self.gate.on:
            return self.gate.on
        if not self._opening.acquire(blocking=False):
            return False  # another thread is at it
        try:
            return self._open()
        finally:
            self._opening.release()

    def _open(self) -> bool:
        from . import wire
        from .ipc.segment import Mailbox, Writer

        parts, context = self.parts, self.parts.context
        config, position = context.config, context.position
        position.rank, position.world_size = settings.rank_and_world(dict(os.environ), self._torch)
        try:
            writer = Writer.create(
                config.shm,
                config.run,
                position.rank,
                position.world_size,
                config.slots,
                config.capacity,
            )
        except (OSError, wire.WireError) as error:
            self.switch_off(f"no segment in {config.shm}: {error}")
            return False
        mailbox = Mailbox(writer)
        phases = {name: index for index, name in enumerate(wire.PHASES)}
        context.reporter.connect(writer, mailbox, phases, self._describe)
        self._times.show = writer.write_collective
        parts.threads.claim_rank()
        parts.collectors.count_on(config.counters_of(position.rank))
        try:
            RankParts(parts, mailbox, self._times).connect()
        except Exception as error:  # half a probe would fail later in a stranger way
            self.switch_off(f"probe.json cannot be followed: {type(error).__name__}: {error}")
            return False
        evidence.dump_stacks_on_signals(config.marks)
        context.reporter.write_status()
        return True

    def _another_training(self) -> None:
        """Another training begins with the step under way; what is known of that stays."""
        parts, context = self.parts, self.parts.context
        parts.rank.publisher.flush()
        parts.rank.close()
        context.reporter.writer.close()
        context.reporter.writer = None
        # What this launch was to begin with was for the one before.
        context.config = context.config._replace(
            first_step=0, counters={}, resume=None, rewarm=None, skip=()
        )
        parts.collectors.rewind(parts.pristine)
        parts.wired.limits.forget_norms()
        parts.safeguards.on_rollback(-1)  # to before its first step
        parts.trainings += 1
        if self.become_rank():
            step = context.position.step
            message = f"a new training starts with step {step}: its optimizer has other parameters"
            context.reporter.notice("note", message)

    def switch_off(self, reason: str) -> None:
        """Switch the whole probe off; the job goes on as if it had never been there."""
        if not self.gate.on:
            return
        self.gate.on = False
        try:
            path = os.path.join(self.parts.context.config.marks, f"off.{os.getpid()}")
            text = reason.replace("\n", " ") + "\n"
            files.replace_file(path, text.encode("utf-8", "replace"))
            self.parts.context.reporter.write_status()
        except Exception:  # nothing is left to report to
            pass

    def _part_off(self, part: Part, reason: str) -> None:
        if part.vital:
            self.switch_off(f"{part.name}: {reason}")
        else:
            message = f"{part.name} is off: {reason}"
            collector = self.parts.collectors.by_name.get(part.name)
            metrics = [metric.id for metric in collector.METRICS] if collector else []
            data = {"collector": part.name, "metrics": metrics}
            self.parts.context.reporter.notice("collector-off", message, data)

    def _describe(self) -> dict[str, Any]:
        """Return the status, which the supervisor shows to people: one small JSON object.

        `self_us` is what the probe cost from the last frame to the one before, in microseconds.
        """
        parts, safeguards, guard = self.parts, self.parts.safeguards, self.guard
        rollbacks = None if parts.rank is None else parts.rank.rollbacks
        steps = [] if rollbacks is None else rollbacks.steps
        rollback = "ready" if steps else "none yet"
        if rollbacks is not None and rollbacks.why_not:
            rollback = f"unavailable: {rollbacks.why_not}"
        unavailable = safeguards.unavailable()
        if parts.rank is not None and rollbacks is not None:
            checkpoint_refusal = parts.rank.on_demand.explain_refusal()
            unavailable.update(rollback=rollbacks.why_not, checkpoint=checkpoint_refusal)
        states = {name: guard.part(name) for name in parts.collectors.by_name}
        reason = parts.explain_without_optimizer()
        if_any = {
            "library": parts.wired.framework.trainer,
            "planned_steps": parts.wired.framework.planned_steps,
            "steps": reason and f"inferred from backward: {reason}",
            "shards": parts.wired.shards.newest(),
            "sources": {s: round(part, 4) for s, part in parts.wired.shards.mix.shares.items()},
            "unseen": parts.wired.batch_sanity.unseen,
            "quarantine": parts.wired.quarantine.describe(),
            "kept_signals": parts.rank is not None and parts.kept_signals.names(),
            "unavailable": {name: reason for name, reason in unavailable.items() if reason},
            "in_force": safeguards.describe(),
        }
        return {
            "tier": "T0" if not self.gate.on else "T2" if parts.reports.adapted else "T1",
            "torch": str(self._torch.__version__),
            "python": platform.python_version(),
            "collectors": {n: "on" if p.on else f"off: {p.reason}" for n, p in states.items()},
            "self_us": round(guard.newest_ns / 1e3, 1),
            "update_to_weight": parts.wired.updates.mode,
            "mfu": parts.wired.flops.description,
            "savepoints": steps,
            "rollback": rollback,
            "paused": parts.context.reporter.held,
            "drills": parts.drills.names(),
            "sampling": parts.sampling.describe(),
            "thinned": parts.sampling.thinned(),
            **{name: value for name, value in if_any.items() if value},
        }

    # ── what the job says itself ──────────────────────────────────────────────────────────────

    def report(self, values: Mapping[str, Any]) -> None:
        """See the package's `report`."""
        self.guard.run(self._report_part, self.parts.reports.add_values, values)

    def shard(self, name: Any, offset: Any) -> None:
        """See the package's `shard`."""
        self.guard.run(self._report_part, self.parts.reports.shard, name, offset)

    def is_quarantined(self, name: Any) -> bool:
        """See the package's `is_quarantined`."""
        return bool(
            self.guard.run(self._report_part, self.parts.wired.quarantine.is_quarantined, name)
        )

    # ── the ends of a process ─────────────────────────────────────────────────────────────────

    def _forked(self) -> None:
        if self.gate.on:
            try:
                self.start_process(self.parts.context.config)
            except Exception:  # the child must run
                self.gate.on = False

    def _location(self) -> dict[str, Any]:
        """Return where a record of a failure goes, and what is known of this process."""
        context = self.parts.context
        location: dict[str, Any] = {"marks": context.config.marks}
        if context.reporter.writer is not None:
            position = context.position
            location.update(rank=position.rank, world_size=position.world_size, step=position.step)
        return location

    def _exit(self) -> None:
        parts, reporter = self.parts, self.parts.context.reporter
        try:
            failure.record_end(*failure.requested_exit(), **self._location())
        except Exception:  # a full disk, for instance: the segment has the last words
            pass
        if reporter.writer is None or not self.gate.on:
            return
        try:
            parts.steps.end()
            parts.safeguards.end()
            parts.rank.publisher.flush()
            parts.reports.end()
            parts.wired.framework.record_loop_end()
            reporter.beat("exiting")
            reporter.writer.write_end(*failure.end_summary())
            parts.rank.close()
            reporter.writer.close()
        except Exception:  # at exit nothing is left to report to
            pass
        self.gate.on = False
