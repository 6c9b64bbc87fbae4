"""A checkpoint of the job before it is ended from outside: by a signal, walltime, or a drain file.

`core.model.preemption` decides how long a signal waits, and the main thread passes it on in time.
Here, in the loop, the checkpoint is ordered from the probe, and its outcome becomes a notice: the
engine notifies people. After a checkpoint for walltime or a drain file the job is ended as by an
operator's `stop --requeue`, so that is decided, recorded and replayed as any other stop.

A signal waits only where a checkpoint can be expected: see `refusal`. A request without a signal
delays nothing, so it is repeated until its deadline; one that ends without a checkpoint ends
nothing, and the job goes on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import system
from ..core.model.decisions import ACTING_MODES
from ..core.model.events import Event, Notice, OperatorCommand
from ..core.model.payload import NOTHING, Json, Payload
from ..core.model.policy import Preempt
from ..core.model.preemption import HOLDABLE, Settled
from .controller import Control
from .fencing import PendingCommand
from .process import Process
from .processor import EventProcessor
from .signals import SignalForwarder

PREEMPT_NOTICE = "preempt"  # of the notices
OFFER_S = 4.0  # the loop renews it each second; in a loop that hangs no signal waits
RETRY_S = 5.0  # between two orders where no signal waits; project default
END_TIME = "SLURM_JOB_END_TIME"  # of the environment: when the allocation ends, in Unix seconds
LEFT_SHARE = 4  # the margin is at most this part of the time that was left at the start
ENDING = ("relaunch", "stop")  # actions behind which this process trains no further
WALLTIME, DRAIN = "walltime", "drain"


class Preemptor:
    """Orders checkpoints for one run; for the loop's thread.

    Args:
        run: the run directory. environ: the supervisor's. unix_s: reads the time of day.
    """

    def __init__(
        self,
        forwarder: SignalForwarder,
        processor: EventProcessor,
        run: Path,
        environ: Mapping[str, str],
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._forwarder, self._processor = forwarder, processor
        self._run, self._unix_s = run, unix_s
        self._began_s = unix_s()
        self._end_s = _end_time(environ)
        self._asked: PendingCommand | None = None
        self._is_active = False  # the policy asks for it
        self._reports: list[Notice] = []  # of saves, since the order
        self._orders = 0
        self._next_order_s = 0.0
        self._refusal = ""  # why no signal is held now
        self._answer = ""  # why the newest order came to nothing
        self._reported = ""  # the refusal that people know
        self._has_saved = False  # since the probe's status was looked at
        self._requested: set[str] = set()  # causes without a signal, each asked for once

    def adopt(self, process: Process) -> None:
        """Pass on what the supervisor before us held when it died."""
        held_signals = self._processor.state.job.held_signals
        for name in held_signals:
            process.signal(signal.Signals[name])
        if held_signals:
            self._report_failure(
                held_signals[0], "the supervisor that held it died", signals=list(held_signals)
            )

    # ── what happens ──────────────────────────────────────────────────────────────────────────────

    def observe(self, event: Event) -> None:
        """Take what was just processed: a save, or a signal."""
        if not isinstance(event, Notice):
            return
        if event.kind in ("checkpoint-saved", "checkpoint-refused") and self._asked is not None:
            self._reports.append(event)
        self._has_saved |= event.kind == "checkpoint-saved"
        if event.kind == "signal-kept" and self._processor.performing not in ENDING:
            self._forwarder.on_signal_kept_by_probe(str(event.data.get("signal")))
        if event.kind == "signal" and self._is_lost(event.data):
            self._report_failure(str(event.data["signal"]), self._refusal)

    def _is_lost(self, data: Payload) -> bool:
        """Whether a signal was passed on without a checkpoint that the policy asks for."""
        passed = not (data.get("held") or data.get("killed") or data.get("handled"))
        was_held = self._processor.policy.job.preemption is not None and data["signal"] in HOLDABLE
        return was_held and passed and bool(self._refusal)

    def run_every_second(self, job: Control) -> None:
        """Once a second: offer to hold signals, and look at the clock and the drain file."""
        terms = self._processor.policy.job.preemption
        if terms is None:
            if self._is_active:  # until a reload
                self._forwarder.withdraw()
            self._is_active = False
            return
        self._is_active, self._has_saved = True, False
        self._offer(job, terms)
        self._report_unavailable(job)
        for cause in (WALLTIME, DRAIN):
            if cause not in self._requested and self._is_due(cause, terms):
                self._requested.add(cause)
                if self._forwarder.request_checkpoint(cause, terms.margin_s):
                    self._notice(
                        f"{cause}: a checkpoint of the job is requested", "requested", cause
                    )

    def run_round(self, job: Control, *, ended: bool) -> None:
        """Process the signals that came, and follow the request that waits.

        Each round, after the segments were read and the answers filed.

        Args:
            ended: the job's first process has.
        """
        for notice in self._forwarder.take_notices():
            self._processor.process(notice)
            self.observe(notice)
        request = self._forwarder.request
        if request is not None:
            if ended:
                self._forwarder.settle_request("the job ended first")
            else:
                self._follow(job, *request[1:])
        elif self._is_active and (self._processor.performing in ENDING or job.paused):
            self._forwarder.withdraw()
        elif self._is_active and self._has_saved and self._refusal:  # the first makes more possible
            self._offer(job, self._processor.policy.job.preemption or Preempt())
        for settled in self._forwarder.take_settled_requests():
            self._drop(job)
            self._conclude(settled)

    def _offer(self, job: Control, terms: Preempt) -> None:
        """Offer to hold signals, unless no checkpoint can be made."""
        self._refusal = explain_refusal(self._processor, job)
        if self._refusal:
            self._forwarder.withdraw()
        else:
            self._forwarder.hold_signals_for(terms.grace_s, OFFER_S, self._kept_signals(job))

    def _kept_signals(self, job: Control) -> list[str]:
        """Return what the probe has taken in the process that signals are passed on to."""
        pid = self._forwarder.pid
        views = (rank for rank in job.ranks().values() if rank.pid == pid)
        return [name for rank in views for name in rank.status.kept_signals]

    # ── one request ───────────────────────────────────────────────────────────────────────────────

    def _follow(self, job: Control, deadline_s: float, holds: bool) -> None:
        """Order the checkpoint, and follow the order to its outcome."""
        if self._asked is None:
            if time.monotonic() >= self._next_order_s or holds:
                self._order(job, deadline_s)
            return
        if self._asked.withdrawn:  # another action is, at this moment: order it again
            self._drop(job)
            return
        outcome = self._outcome(self._asked)
        if outcome is None:
            return
        if outcome and not holds:  # nothing is delayed by another try
            self._answer = outcome
            self._next_order_s = time.monotonic() + RETRY_S
            self._drop(job)
        else:
            self._forwarder.settle_request(outcome)

    def _order(self, job: Control, deadline_s: float) -> None:
        self._orders += 1
        args = Payload({"path": None, "until_ns": int(deadline_s * 1e9)})
        key = f"{self._run.name}:preempt-{int(self._began_s)}-{self._orders}"
        self._reports.clear()
        self._asked = job.send_command("checkpoint", args, key=key)

    def _drop(self, job: Control) -> None:
        if self._asked is not None:
            job.stop_waiting(self._asked)
        self._asked = None

    def _outcome(self, pending: PendingCommand) -> str | None:
        """Return "" for a checkpoint that was written, why there is none, None: not known yet."""
        if pending.refusal is not None:
            return pending.refusal
        if pending.lost:
            return next(iter(pending.lost.values()))
        for ack in pending.answers.values():
            if not ack.ok:
                return ack.error or "the probe refused it"
            for report in self._reports:
                if report.kind == "checkpoint-refused":
                    return str(report.data.get("why", report.message))
                if _answers(ack.result, report.data):
                    return ""
        return None

    def _conclude(self, settled: Settled) -> None:
        """Report how a request ended, and end the job where no signal does."""
        if settled.refusal:
            answer = "" if settled.signals else self._answer  # says more than that time is up
            self._report_failure(settled.cause, answer or settled.refusal)
            return
        save_report: Payload = next(
            (
                report.data
                for report in reversed(self._reports)
                if report.kind == "checkpoint-saved"
            ),
            NOTHING,
        )
        text = f"{settled.cause}: the job wrote a checkpoint in {settled.waited_s:.1f} s"
        path, step = save_report.get("path"), save_report.get("step")
        facts = {"path": path, "step": step, "signals": list(settled.signals)}
        self._notice(text, "saved", settled.cause, **facts)
        if not settled.signals:
            args: dict[str, Json] = {"requeue": True, "key": f"{PREEMPT_NOTICE}-{settled.cause}"}
            stop = OperatorCommand(system.monotonic_ns(), settled.cause, "stop", Payload(args))
            self._processor.process(stop)

    # ── notices ───────────────────────────────────────────────────────────────────────────────────

    def _report_failure(self, cause: str, reason: str, **facts: Any) -> None:
        text = f"{cause}: the job wrote no checkpoint: {reason}"
        self._notice(text, "failed", cause, why=reason, **facts)

    def _report_unavailable(self, job: Control) -> None:
        """Report once what will not change by itself: the mode, or the number of ranks."""
        reason = explain_lasting_refusal(self._processor)
        if reason and reason != self._reported and job.ranks():
            self._reported = reason
            self._notice(f"job.preempt has no effect: {reason}", "unavailable", "", why=reason)

    def _notice(self, message: str, phase: str, cause: str, **facts: Any) -> None:
        data = {"phase": phase, "cause": cause, **facts}
        self._processor.process(
            Notice(system.monotonic_ns(), PREEMPT_NOTICE, message, data=Payload(data))
        )

    # ── causes without a signal ───────────────────────────────────────────────────────────────────

    def _is_due(self, cause: str, terms: Preempt) -> bool:
        if cause == DRAIN:
            return self._is_drained(Path(terms.drain) if terms.drain else self._run / "drain")
        if self._end_s is None:
            return False
        margin_s = min(terms.margin_s, (self._end_s - self._began_s) / LEFT_SHARE)
        return self._end_s - margin_s <= self._unix_s() < self._end_s

    def _is_drained(self, path: Path) -> bool:
        """Whether the drain file was written since the start; one left over means nothing."""
        try:
            return path.stat().st_mtime >= int(self._began_s)
        except OSError:
            return False


def explain_refusal(processor: EventProcessor, job: Control) -> str:
    """Return why no checkpoint can be ordered now, "" where it can."""
    reason = explain_lasting_refusal(processor)
    if reason:
        return reason
    if processor.performing in ENDING:
        return f"a {processor.performing} is in progress"
    if job.paused:
        return "the job is paused"
    ranks = job.ranks()
    if not ranks:
        return "no probe is attached to the job"
    return ranks[min(ranks)].status.unavailable.get("checkpoint", "")


def explain_lasting_refusal(processor: EventProcessor) -> str:
    """Return why `job.preempt` has no effect in this run, "" where it has."""
    policy, world_size = processor.policy, processor.state.job.world_size
    if policy.mode not in ACTING_MODES:
        return f"mode {policy.mode} changes nothing in the job"
    if world_size > 1:
        return (
            f"{world_size} ranks would have to save at the same step; signals are passed on at "
            "once, for a framework that handles them on all ranks"
        )
    return ""


def _end_time(environ: Mapping[str, str]) -> float | None:
    text = environ.get(END_TIME, "")
    return float(text) if text.isascii() and text.isdigit() else None


def _answers(ordered: Payload, save_report: Payload) -> bool:
    """Whether a save is the one that was ordered: by its path, or, from a library, by its step."""
    path = ordered.get("path")
    if path:
        return bool(save_report.get("path") == path)
    return save_report.get("how") == "its library"
