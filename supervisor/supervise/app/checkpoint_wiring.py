"""Connects the checkpoint service to the run: where the run is, what was saved, what is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..checkpoints.service import VERIFY_NOW_S, CheckpointService
from ..checkpoints.tracker import RunPosition
from ..core.handlers.job_lifecycle import ASKED, MEANT
from ..core.model.decisions import ACTING_MODES
from ..core.model.events import Event, Frame, Notice
from ..core.model.policy import Policy
from ..core.runbooks import checkpoint_choice
from ..core.state.incident import HELD
from ..core.state.run_state import State
from ..inputs import clock
from ..job.process import Process
from ..store.run_directory import RUNS
from .event_processor import EventProcessor
from .run_recovery import RecoveredRun
from .settings import Settings

FIRST_NS, EVERY_NS = 2_000_000_000, 10_000_000_000  # between two lines of progress; our choice
RANKS = 64  # of more, each counts on as the one that saved: the register must stay small
Window = Iterable[tuple[Sequence[str], Frame]]


def service(settings: Settings, processor: EventProcessor) -> CheckpointService:
    """Return the checkpoint service of the policy that the job was started with.

    Raises:
        StoreError: the register of this run cannot be read.
    """
    policy = settings.policy
    facts = {"argv": list(settings.argv), "policy": policy.name, "policy_digest": policy.digest}
    return CheckpointService(
        policy.job["checkpoints"],
        settings.run.path,
        Path.cwd(),
        lambda: position(processor),
        facts=facts,
        code=settings.identity.code,
        data=policy.job["manifest"],
        runs=RUNS,
    )


def forward_saves(
    checkpoints: CheckpointService, events: Sequence[Event], processor: EventProcessor
) -> None:
    """Pass on the saves among processed events: ranks are read in turn, now all counted as far."""
    for event in events:
        forward_save(checkpoints, event, processor.policy, processor.window)


def forward_save(
    checkpoints: CheckpointService, event: Event, policy: Policy, window: Window
) -> None:
    """Pass a save that a probe reported to the checkpoint service.

    Args:
        window: the newest frames, each with its names, oldest first.
    """
    if isinstance(event, Notice) and event.kind == "checkpoint-saved":
        checkpoints.on_save(_with_counters(event, window))


def _with_counters(event: Notice, window: Window) -> Notice:
    """Return the notice with what `checkpoints.registry.Entry` has as `counters` and `values`.

    The rank that saved reports its own counters. Another one's are those of its newest frame by
    then, plus what the rank that saved has counted since that step.
    """
    reported = event.data.get("counters", {})
    saver = {name: count for name, count in reported.items() if type(count) in (int, float)}
    counted = {
        (frame.rank, frame.step): dict(zip(names, frame.values, strict=False))
        for names, frame in (window if saver else ())
        if frame.step < (event.step or 0)
    }
    newest = {rank: step for rank, step in counted if rank != event.rank}
    by_rank = {"all": saver} if saver else {}
    for rank, step in newest.items() if len(newest) < RANKS else ():
        seen, was = counted[rank, step], counted.get((event.rank or 0, step), saver)
        pairs = {name: (seen.get(name), was.get(name)) for name in saver}
        ahead = {
            n: own - its for n, (own, its) in pairs.items() if own is not None and its is not None
        }
        if any(ahead.values()):
            by_rank[str(rank)] = {n: count + ahead.get(n, 0.0) for n, count in saver.items()}
    last = counted.get((event.rank or 0, (event.step or 0) - 1), {})
    values = {name: value for name, value in last.items() if value is not None}
    return replace(event, data={**event.data, "counters": by_rank, "values": values})


def verify_awaited(checkpoints: CheckpointService, processor: EventProcessor) -> None:
    """Have the checkpoint verified now that a refused relaunch waits for, if one does.

    The engine is told when the number of those that it may be changes.
    """
    before = checkpoint_choice.needed_before(processor.policy, processor.state)
    if before is None:
        return
    left = checkpoints.candidates(before)
    for event in checkpoints.poll():  # the last verdict comes before "none is left"
        processor.process(event)
    if (awaited := checkpoint_choice.awaited(processor.policy, processor.state)) is None:
        return
    if left is not None and left != awaited.candidates:
        text = f"{left} checkpoints from before step {before} are to be verified"
        data = {"candidates": left}
        processor.process(Notice(clock.monotonic_ns(), "checkpoint-search", text, data=data))
    checkpoints.verify_awaited(before)


class LastLook:
    """Has the guard verify at once what a process of the job left, once per process."""

    def __init__(
        self,
        checkpoints: CheckpointService,
        processor: EventProcessor,
        print_line: Callable[[str], object],
    ) -> None:
        self._checkpoints, self._processor, self._print_line = checkpoints, processor, print_line
        self._process: Process | None = None  # the newest whose checkpoints were looked at
        self._next_ns = self._began_ns = 0

    def begin(self, process: Process) -> bool:
        """Begin with what a process left that has ended; False: that was done, or must not be.

        A job that may come back needs a good checkpoint; of another one the newest is verified,
        because nobody would look at it before it is needed. Whoever asked for the end, or has set
        a time for it, does not wait.
        """
        state = self._processor.state
        if process is self._process or state.job.end_requested or state.job.preempted:
            return False
        self._process = process
        back = may_come_back(self._processor.policy, state, process.returncode or 0)
        self._checkpoints.verify_now(patient=back, newest=not back)
        self._began_ns = clock.monotonic_ns()
        self._next_ns = self._began_ns + FIRST_NS
        return True

    def choose_between(self, process: Process, steps: tuple[int, int], within_s: float) -> None:
        """Begin with what a relaunch may go back to: between these steps, both exclusive."""
        if process is not self._process:
            self._process = process
            within_s = min(VERIFY_NOW_S, within_s)
            self._checkpoints.verify_now(within_s, above=steps[0], before=steps[1])

    def show(self, now_ns: int) -> bool:
        """Return whether it is under way; if so, tell people now and then how far it is."""
        under_way = self._checkpoints.is_verifying_now
        if under_way and now_ns >= self._next_ns and (name := self._checkpoints.being_verified()):
            self._next_ns = now_ns + EVERY_NS
            since_s = (now_ns - self._began_ns) / 1e9
            self._print_line(
                f"supervise: the job has ended; {name} is being verified, for {since_s:.0f} s "
                "until now; Ctrl-C ends that"
            )
        return under_way


def may_come_back(policy: Policy, state: State, returncode: int) -> bool:
    """Whether a job that ended with this code may be started again by the policy's `on_crash`.

    The engine decides that once it knows of the end; here it is only about being in time.
    """
    job = state.job
    able = policy.mode in ACTING_MODES and "relaunch" not in job.unavailable
    if not returncode or not policy.job.get("on_crash") or not able:
        return False
    meant = job.stopping or job.end_requested or returncode in (*ASKED, *MEANT)
    held = state.incident is not None and state.incident.phase == HELD
    return not (meant or held or state.step in job.restarts.crashes)


def resume(checkpoints: CheckpointService, past: RecoveredRun, policy: Policy) -> None:
    """Resume the checkpoint service of a supervisor that died."""
    checkpoints.resume(past.checkpoints)
    for notice in past.saves.values():
        forward_save(checkpoints, notice, policy, past.window)


def position(processor: EventProcessor) -> RunPosition:
    """Return where the run is."""
    state = processor.state
    leader = state.leader()
    newest = next((row for row in reversed(processor.window) if row[1].rank == leader), None)
    values = {}
    if newest is not None:
        names, frame = newest
        pairs = zip(names, frame.values, strict=False)
        values = {name: value for name, value in pairs if value is not None}
    known = state.checkpoints
    return RunPosition(
        state.step, state.attempt, values, known.suspects(), state.job.world_size, known.on_trial()
    )
