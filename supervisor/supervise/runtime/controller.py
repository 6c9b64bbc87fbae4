"""The job as actions see it: commands to its ranks, evidence, and its end.

Two threads meet here, and the segments belong to one of them. Actions run on the performer's
thread, which may wait; the segments are polled by the main loop, which may not. So an action puts
work into a queue and waits for its answers; the main loop calls `run_pending_work` after every
`segments.poll()`, which does the queued work (sending commands), files the acks that the poll read,
and wakes the waiting thread. Never call `command`, `snapshot`, `stop` or `relaunch` from the main
loop: they would wait for themselves. While the job is paused, a third thread renews the pause.

A command is sent once, to every rank or to none; one that changes the training of several ranks
comes behind a fence, see `fencing`, and one that only reads goes to the next step that all ranks
can end together. Its key makes it idempotent: the probe answers a known key with the same ack. All
ranks must answer within the deadline; when only some did, the ranks may differ, and the error says
so. The end of the job ends every wait at once. A command cannot be recalled: an answer after its
deadline is reported by `late_answers`, since it took effect. Of a quarantine the next generation is
on disk before any rank is asked to read it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec
import psutil

from supervise_probe.ipc import fences
from supervise_probe.wire import WireError

from ..core.model.payload import EndArgs, Outcome, Payload, WeightsArgs
from ..errors import ActionError, StoreError, SuperviseError
from ..store.quarantine_list import Quarantine, QuarantineGeneration
from .evidence import BundleSummary
from .fencing import (
    NONE,
    TRIP_S,
    PauseLease,
    PendingCommand,
    Standing,
    carry_out_at_one_step,
    check_acknowledged,
    common_step,
    explain_unready,
)
from .idleness import Looks, measure_work
from .process import LOOP_S, Process, halt_job
from .process_tree import explain_halted, is_suspended
from .segment_reader import Ack, RankView, Segment
from .segments import Segments

LOOKS = ("snapshot",)  # verbs that are of one step where that is possible
LOOK_TRIP_S = 0.02  # until their letter is written: no rank vetoes; project default


NOW, LATER = "now", "at the next launch"
WHEN = {
    "asks": NOW,
    "lists": "from the next pass over the data on",
}  # by how a rank leaves shards out
LEAST_S = 5.0  # for a command whose deadline the one before it took


def carry_out_quarantine(
    job: Control, manifest: Quarantine | None, args: Payload, key: str, deadline_s: float
) -> Payload:
    """Carry out `core.model.action.Job.quarantine`.

    With one rank it takes effect at the next step boundary. With several it is kept for the next
    launch, and takes effect before that where all ranks can take it up at the end of one step:
    ranks that pass over different numbers of batches would wait for each other for ever.
    """
    job.raise_if_withdrawn()
    if manifest is None:
        raise ActionError("this run keeps no quarantine")
    until = time.monotonic() + deadline_s
    live = job.world_size == 1
    try:
        generation = manifest.change(args, key=key, live=live)
    except StoreError as error:
        raise ActionError(str(error), hint=error.hint) from error
    result = job.command("quarantine", _order(manifest, generation), key=key, deadline_s=deadline_s)
    result = result.extended(generation=generation.generation, entries=len(generation.entries))
    if live:
        return result.extended(takes_effect=NOW)
    return result.extended(**_at_one_step(job, manifest, generation, key, until))


def _order(manifest: Quarantine, generation: QuarantineGeneration) -> Payload:
    return Payload({"generation": generation.generation, "path": str(manifest.path)})


def _at_one_step(
    job: Control, manifest: Quarantine, generation: QuarantineGeneration, key: str, until: float
) -> Payload:
    """Let all ranks take it up at one step; where one cannot, it stays with the next launch.

    The file says so when they have: of a supervisor that dies before, the next one goes on here.

    Args:
        until: CLOCK_MONOTONIC in seconds.
    """
    left_s = max(LEAST_S, until - time.monotonic())
    try:
        order = _order(manifest, generation)
        agreement = job.command("quarantine_now", order, key=f"{key}/now", deadline_s=left_s)
    except ActionError as error:
        if not error.refused:
            raise
        return Payload({"takes_effect": LATER, "why": str(error)})
    try:
        hastened = manifest.hasten(key)
    except StoreError as error:
        raise ActionError(str(error), hint=error.hint) from error
    left_s = max(LEAST_S, until - time.monotonic())
    result = job.command(
        "quarantine", _order(manifest, hastened), key=f"{key}/kept", deadline_s=left_s
    )
    effect = WHEN[str(agreement["way"])]
    return result.extended(generation=hastened.generation, takes_effect=effect)


T = TypeVar("T")

Collect = Callable[["Control", str, str, float], BundleSummary]
Relaunch = Callable[["Control", Payload, str, float], Payload]


class Control:
    """Implements `core.model.action.Job` over a process and its segments.

    Args:
        process: the running job.
        segments: its ranks; touched inside `run_pending_work` only, but for what is for any thread.
        collect: `(control, incident, key, deadline_s) -> bundle`, makes the evidence bundle.
        relaunch: `(control, args, key, deadline_s) -> result`, starts the job again.
        manifest: of the quarantine; None: this run keeps none.
        lease: renews pauses.
        wake: lets the main loop come to `run_pending_work` at once.

    Attributes:
        process: the job's, the newest if it was started again; changed by `replace` only.
        exit_code: what the supervisor exits with because a policy stopped the job; None when the
            job's own result counts.
        withdrawn: why the action under way is to ask nothing more of the job, "" while it may.
        standstill: the action under way answers a job that stands still.
        looks: what is read of the job from outside.
    """

    def __init__(
        self,
        process: Process,
        segments: Segments,
        collect: Collect,
        relaunch: Relaunch,
        manifest: Quarantine | None = None,
        lease: PauseLease | None = None,
        wake: Callable[[], None] = lambda: None,
        looks: Looks | None = None,
    ) -> None:
        self.process = process
        self.exit_code: int | None = None
        self.withdrawn = ""
        self.standstill = False
        self._segments = segments
        self._collect = collect
        self._relaunch = relaunch
        self._manifest = manifest
        self._world_size = 1
        self._wakeup = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._letters: deque[Callable[[], None]] = deque()  # what is sent between events, too
        self._open: list[PendingCommand] = []
        self._overdue: dict[str, str] = {}  # key -> verb of commands that were given up
        self._late: deque[str] = deque()
        self._earlier_acks: dict[tuple[int, str], Ack] = {}  # answers to a supervisor before us
        self._lease = lease or PauseLease()
        self._wake, self.looks = wake, looks or Looks()

    # ── the main loop's side ─────────────────────────────────────────────────────────────────────

    def run_pending_work(
        self, now_ns: int, *, withdrawn: str = "", standstill: bool = False
    ) -> None:
        """File acks, and send what is queued. Call after every `segments.poll()`.

        In that order: who looks in two rounds where a rank is, has what it answered by the first.
        """
        self.standstill = standstill
        self._lease.beat(now_ns, self._segments.ranks.values())
        self._count_ranks()
        self.file_acks()
        self.send_commands(withdrawn)
        for _ in range(len(self._work)):  # what that adds waits for the next round
            self._work.popleft()()

    def file_acks(self) -> None:
        """File the acks that `segments.poll()` has read; ranks may stand until that is done."""
        ranks = self._segments.ranks
        acks = [(rank, ack) for rank, segment in ranks.items() for ack in segment.acks()]
        if self._open or acks:
            with self._wakeup:
                self._file(acks, ranks)
                self._wakeup.notify_all()

    @property
    def has_unsent_commands(self) -> bool:
        """Whether orders wait to be sent."""
        return bool(self._letters)

    def send_commands(self, withdrawal_reason: str) -> None:
        """Send what is queued. Call it also between events: each step until then may be lost.

        Args:
            withdrawal_reason: why the action under way is to ask nothing more of the job, by now.
        """
        self.withdrawn = withdrawal_reason
        while self._letters:
            self._letters.popleft()()

    def _count_ranks(self) -> None:
        sizes = [rank.world_size for rank in self._segments.ranks.values()]
        self._world_size = max(sizes, default=self._world_size)

    @property
    def busy(self) -> bool:
        """Whether somebody waits for the main loop, or for the answer to a command."""
        return bool(self._letters or self._work or self._open)

    @property
    def paused(self) -> bool:
        """True between an acknowledged `pause` and `resume`, or `on_pause_ended`."""
        return self._lease.is_held

    def has_unpaused(self) -> bool:
        """On the main loop: whether the job says that it goes on, though nobody said resume."""
        return self.paused and any(view.status.paused is False for view in self.ranks().values())

    def on_pause_ended(self) -> None:
        """The pause has ended by itself."""
        self._lease.end()

    def resume_after_crash(self, paused_until_ns: int | None, exit_code: int | None) -> None:
        """On the main loop, first of all: go on for a supervisor that died, with what it knew.

        Args:
            paused_until_ns: how long the pause in force may be renewed, None without one.

        Answers that lie there stand for themselves: a command that has one is not sent again.
        """
        self.exit_code = exit_code
        self._count_ranks()
        if paused_until_ns is not None:
            self._lease.beat(time.monotonic_ns(), self._segments.ranks.values())
            self._lease.start_renewing(paused_until_ns)
        for rank, segment in self._segments.ranks.items():
            self._earlier_acks |= {(rank, ack.key): ack for ack in segment.acks()}

    def is_answered(self, key: str) -> bool:
        """Whether every rank has answered this order to a supervisor before us."""
        ranks = self._segments.ranks
        return bool(ranks) and all((rank, key) in self._earlier_acks for rank in ranks)

    def replace(self, process: Process) -> None:
        """On the main loop: the job is another process from now on; the old one has ended."""
        self.process = process
        self._lease.end()

    def _file(self, acks: list[tuple[int, Ack]], ranks: Mapping[int, Segment]) -> None:
        ended = self.process.returncode
        for pending in self._open:
            for rank, ack in acks:
                if ack.key == pending.key and pending.sent is not None and rank in pending.sent:
                    pending.answers[rank] = ack
            for rank, segment in (pending.sent or {}).items():
                if ranks.get(rank) is not segment:  # after an exec the pid would be the same
                    pending.lost.setdefault(rank, f"rank {rank} went away")
            if ended is not None:
                pending.refuse_after_end(ended)
        for rank, ack in acks:
            if ack.key in self._overdue:
                outcome = "was done" if ack.ok else f"was refused: {ack.error}"
                verb = self._overdue[ack.key]
                self._late.append(f"{verb} by rank {rank} after its deadline {outcome}")

    def late_answers(self) -> list[str]:
        """Return a sentence for each answer that came after its command was given up, once."""
        return [self._late.popleft() for _ in range(len(self._late))]

    def _send(self, pending: PendingCommand, args: Payload, *, partly: bool, trip_s: float) -> None:
        """On the main loop: send to every rank, or refuse before anything was sent."""
        if pending not in self._open:
            return  # given up before the main loop came to it
        ranks = self._segments.ranks
        if self.is_answered(pending.key):
            pending.answers |= {rank: self._earlier_acks[rank, pending.key] for rank in ranks}
            pending.sent = dict(ranks)
        elif self.process.returncode is not None:
            pending.refuse_after_end(self.process.returncode)
        elif self.withdrawn:
            pending.refusal, pending.withdrawn = self.withdrawn, True
        elif not ranks:
            pending.refusal = "no probe is attached to the job"
            pending.not_now = pending.verb == "fence"
        elif len(ranks) < self._world_size and not partly and pending.verb != "fence":
            pending.refusal = f"only {len(ranks)} of {self._world_size} ranks have a probe attached"
        else:
            if pending.verb == "fence" or (pending.verb in LOOKS and len(ranks) > 1):
                args = self._name_step(pending, args, trip_s)
            if pending.refusal is None:
                self._write(pending, ranks, args)
        with self._wakeup:
            self._wakeup.notify_all()

    def _name_step(self, pending: PendingCommand, args: Payload, trip_s: float) -> Payload:
        """Return the arguments with the step at whose end all ranks do it."""
        standings = self._look()
        trip_s = trip_s if pending.verb == "fence" else LOOK_TRIP_S
        pending.step = common_step(standings, trip_s)
        if pending.verb != "fence":
            return args.extended(at_step=pending.step)  # NONE is past: each when it can
        unready = explain_unready(standings, self._world_size)
        if unready or pending.step == NONE:
            pending.refusal, pending.not_now = unready or "the ranks do not train", True
        return args.extended(step=pending.step)

    def _write(self, pending: PendingCommand, ranks: Mapping[int, Segment], args: Payload) -> None:
        sent_ids = {}
        for rank, segment in ranks.items():
            sent_ids[rank] = segment
            try:
                segment.send(pending.key, pending.verb, args)
            except (SuperviseError, WireError, OSError, ValueError) as error:
                pending.lost[rank] = f"rank {rank} cannot be written to: {error}"
        pending.sent = sent_ids

    def _look(self) -> dict[int, Standing]:
        """On the main loop: return where each rank is."""
        results = {}
        for number, rank in self._segments.ranks.items():
            with suppress(SuperviseError, OSError):  # a broken segment, told by the poll
                collective = rank.collective()
                results[number] = Standing(
                    rank.boundary(),
                    rank.beat().phase,
                    (rank.step_ns() or 0) / 1e9,
                    waits=collective is not None and collective.inside,
                    halted=explain_halted(rank.pid),
                )
        return results

    # ── the performer's side ─────────────────────────────────────────────────────────────────────

    @property
    def world_size(self) -> int:
        """Number of ranks of the job, as its probes report it; 1 before the first one did."""
        return self._world_size

    def send_command(
        self, verb: str, args: Payload, *, key: str, partly: bool = False, trip_s: float = TRIP_S
    ) -> PendingCommand:
        """Send `verb` without waiting. With `partly` the ranks that are there are enough. What only
        looks is done at the end of one step where that is possible, and a fence stands there."""
        pending = PendingCommand(verb, key, self._wakeup)
        with self._wakeup:
            self._open.append(pending)
        self._letters.append(lambda: self._send(pending, args, partly=partly, trip_s=trip_s))
        self._wake()
        return pending

    def expect_answers(self, verb: str, key: str) -> PendingCommand:
        """Take the answers of all ranks to an order that reaches them by another way."""
        pending = PendingCommand(verb, key, self._wakeup)

        def begin() -> None:
            pending.sent = dict(self._segments.ranks)

        pending.answers |= {r: a for (r, k), a in self._earlier_acks.items() if k == key}
        with self._wakeup:
            self._open.append(pending)
        self._letters.append(begin)  # before what is asked after this
        self._wake()
        return pending

    def standing(self) -> dict[int, Standing]:
        """Return where each rank is; what it answered by then is filed before the next look."""
        return self.on_loop(self._look, LOOP_S)

    def stop_waiting(self, pending: PendingCommand) -> None:
        """Wait no longer for `asked`; an answer that still comes is reported by `late_answers`."""
        with self._wakeup:
            self._open.remove(pending)
            if pending.verb not in ("fence", "outcome") and set(pending.sent or {}) - set(
                pending.answers
            ):
                self._overdue[pending.key] = pending.verb

    def on_loop(self, call: Callable[[], T], timeout_s: float) -> T:
        """Run `call` on the main loop, behind the events of a round, and return its result.

        Raises:
            ActionError: the main loop did not get to it within `timeout_s`.
        """
        result: list[T] = []
        failure: list[Exception] = []
        finished = threading.Event()

        def work() -> None:
            try:
                result.append(call())
            except Exception as error:
                failure.append(error)
            finished.set()

        self._work.append(work)
        self._wake()
        if not finished.wait(timeout_s):
            raise ActionError("the supervisor's main loop is busy", retryable=True)
        if failure:
            raise failure[0]
        return result[0]

    def raise_if_withdrawn(self) -> None:
        """Raise ActionError when the action under way is withdrawn; before it ends the job."""
        pids: list[int] = []
        for _ in range(2):  # the second round began after this call: it has read what came before
            with suppress(ActionError):  # a loop that is stuck withdraws nothing
                pids = self.on_loop(lambda: [r.pid for r in self._segments.ranks.values()], LOOP_S)
        if self.withdrawn:
            raise ActionError(self.withdrawn, refused=True)
        if self.standstill and any(is_suspended(pid) for pid in pids):
            # The next tick withdraws it; without that, the refusal would count as a failure.
            until = time.monotonic() + LOOP_S
            while not self.withdrawn and time.monotonic() < until:
                time.sleep(0.05)
            raise ActionError("the job was stopped by a signal: it does not hang", refused=True)

    def command(self, verb: str, args: Payload, *, key: str, deadline_s: float) -> Payload:
        """Send `verb` to every rank; return rank 0's ack (the lowest here), `ranks` and `ack_step`.

        Of `check_weights` that of the rank whose probe batch is farthest off.

        Raises:
            ActionError: the job has ended, ranks are missing, one refused, or did not answer.
        """
        if verb == "resume":
            self._lease.end()  # also when it fails: then the lease itself ends the pause
        # A command that the job meets only after we gave up must not take effect unseen.
        until_ns = time.monotonic_ns() + int(deadline_s * 1e9)
        sent_args = Payload({**args, "until_ns": until_ns})
        pause_s = sent_args.read(EndArgs).lease_s or 0.0
        if verb == "pause":
            sent_args = sent_args.extended(lease_s=min(self._lease.lease_s, pause_s))
        if self._world_size > 1 and verb in fences.FENCED:
            directory = self._segments.directory
            result = carry_out_at_one_step(
                self, directory, verb, sent_args, key=key, deadline_s=deadline_s
            )
        else:
            pending = self.send_command(verb, sent_args, key=key)
            try:
                answers = pending.wait(deadline_s)
            finally:
                self.stop_waiting(pending)
            check_acknowledged(pending, answers, deadline_s)
            answer = answers[min(answers)]
            if verb == "check_weights":  # ranks may differ: one with good weights speaks for itself
                before = args.read(WeightsArgs).before_step
                ordered = (answers[rank] for rank in sorted(answers))
                answer = max(
                    ordered, key=lambda ack: ack.result.read(Outcome).loss_growth_factor(before)
                )
            result = answer.result.extended(ranks=len(answers), ack_step=answer.step)
        if verb == "pause":
            self._lease.start_renewing(time.monotonic_ns() + int(pause_s * 1e9))
        return result

    def snapshot(self, incident: str, *, key: str, deadline_s: float) -> Payload:
        """Collect the evidence bundle; return its summary."""
        return Payload(msgspec.to_builtins(self._collect(self, incident, key, deadline_s)))

    def quarantine(self, args: Payload, *, key: str, deadline_s: float) -> Payload:
        """Write the quarantine's next generation, tell every rank; see the function."""
        return carry_out_quarantine(self, self._manifest, args, key, deadline_s)

    def ranks(self) -> dict[int, RankView]:
        """Return the state of each rank. Call it on the main loop."""
        views = {}
        for number, rank in self._segments.ranks.items():
            view = RankView(rank.pid)
            with suppress(SuperviseError, OSError):  # a broken segment, which the poll tells of
                beat = rank.beat()
                view = RankView(
                    rank.pid, beat.phase, beat.seen_ns, rank.status(), rank.collective()
                )
            views[number] = view
        return views

    def release_signals(self) -> None:
        """Let a signal that comes to the job do what it does by default."""
        self._segments.defer_job_signals(0)

    def processes(self) -> list[psutil.Process]:
        """Return the living processes of the job."""
        return self.process.tree.members()

    def stop(self, *, grace_s: float, term_s: float, exit_code: int) -> Payload:
        """End the job: interrupt at a step boundary, then TERM, then KILL over the whole tree.

        Returns:
            the fields of a `JobEnd`, and `exit_code`.
        """
        self.raise_if_withdrawn()
        end = halt_job(self, grace_s=grace_s, term_s=term_s)
        if end.how != "ended":
            self.exit_code = exit_code
        return Payload(msgspec.to_builtins(end)).extended(exit_code=self.exit_code)

    def relaunch(self, args: Payload, *, key: str, deadline_s: float) -> Payload:
        """Stop the gang, put a checkpoint in its place, and start the job again from it."""
        return self._relaunch(self, args, key, deadline_s)

    def work(self, within_s: float) -> dict[str, float]:
        """Watch the job for `within_s` seconds; return what it used and moved."""
        return measure_work(self.process, within_s, self.looks.device)

    def pids(self) -> dict[int, int]:
        """Return the process of each rank."""
        return {rank: view.pid for rank, view in self.on_loop(self.ranks, LOOP_S).items()}
