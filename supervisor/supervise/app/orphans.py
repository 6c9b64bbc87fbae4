"""Processes that train on when the job's first process has ended: a launcher that was killed, a
shell that did not wait.

Their training is what the run is about, so the run goes on with them, for as long as the policy
says (`job.orphans.watch`): they are read and judged as before, and signals go to them. They are
never ended by us for having lost their parent. What is left when that time is over is told, with
the command that ends it, and keeps its segments.

What counts is a process that writes a segment, or that has loaded torch under our probe and may
soon. One that was only just started has a moment to show what it is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from signal import Signals

import psutil

from ..core.model.events import Notice
from ..core.model.policy import Policy
from ..inputs import clock
from ..inputs.segment.directory import Segments
from ..job.process import Process
from ..job.ranks.pending_command import ending
from .event_processor import EventProcessor

WATCH_S = 600.0  # for policies of older runs; project default
GRACE_S = 1.0  # ranks may end a moment after their launcher: no news
IMPORT_S = 30.0  # a Python that is older than this and has not loaded torch trains nothing
FORK_S = 2.0  # a process that is older than this is what it is
LOOK_S = 0.5  # between two looks


class Orphans:
    """Says how long to watch on without the first process. For the main loop.

    Args:
        marks: directory of the probe's marks, which tell how far a Python got.

    Attributes:
        left: processes were left running. ended_well: those that went on ended with code 0.
    """

    def __init__(self, segments: Segments, marks: Path, processor: EventProcessor) -> None:
        self.left = self.ended_well = False
        self._segments = segments
        self._marks = marks
        self._processor = processor
        self._process: Process | None = None  # whose orphans these are
        self._since_s = self._look_s = 0.0
        self._is_reported = self._over = False

    def continue_run(self, process: Process, final: str | None, *, comes_back: bool) -> bool:
        """Whether others train on after `process` has ended, and are to be watched.

        Args:
            final: the signal that asked for the end of the job, if one did: it was meant for all.
            comes_back: the policy may start the job again, which ends all of it first. That waits
                for a launcher's ranks, not for those that a dead rank keeps waiting.
        """
        now_s = time.monotonic()
        if process is not self._process:
            self._process, self._since_s, self._look_s = process, now_s, 0.0
            self._is_reported = self._over = self.left = self.ended_well = False
            self._over = comes_back and self._segments.wrote(process.pid)
        if self._over or now_s < self._look_s:
            return not self._over
        self._look_s = now_s + LOOK_S
        trains, may = self._look(process)
        watch_s = _watch_s(self._processor.policy)
        if trains and now_s - self._since_s >= min(watch_s, GRACE_S):
            if now_s - self._since_s >= watch_s:
                self._leave(process, trains)
            elif not self._is_reported:
                self._report_orphans(process, trains, watch_s)
        elif not trains and not (may and watch_s):
            self._over = True
            if self._is_reported and self._segments.ended_well():
                self.ended_well = True
                self._report("relaunch-unavailable", "the processes that went on ended with code 0")
        if not self._over and not process.outlived:
            process.outlived = True
            if final is not None:
                process.signal(Signals[final])
        process.outlived = not self._over
        if self._over:
            process.tree.reap(every_s=0.0)
        return not self._over

    def _look(self, process: Process) -> tuple[dict[int, int | None], bool]:
        """Return who trains, pid to rank if that is known, and whether others may yet."""
        trains: dict[int, int | None] = dict(self._segments.living())
        may = False
        for member in process.tree.members():
            if member.pid in trains:
                continue
            with suppress(psutil.Error):
                age_s = time.time() - member.create_time()
                if self._marked("armed", member.pid) and not self._marked("off", member.pid):
                    trains[member.pid] = None
                else:
                    booted = self._marked("boot", member.pid)
                    may |= age_s < (IMPORT_S if booted else FORK_S)
        return trains, may

    def _marked(self, mark: str, pid: int) -> bool:
        return (self._marks / f"{mark}.{pid}").exists()

    def _report_orphans(
        self, process: Process, trains: Mapping[int, int | None], watch_s: float
    ) -> None:
        self._is_reported = True
        message = f"the job's first process ended ({ending(process.returncode or 0)}), and "
        message += f"{_named(trains)} without it"
        verdict = f"the run goes on with what is left, for at most {watch_s / 60:g} minutes"
        self._report("orphans", message, trains, verdict=verdict)

    def _leave(self, process: Process, trains: Mapping[int, int | None]) -> None:
        self._over = self.left = True
        message = f"left running: {_named(trains)} without the job's first process"
        verdict = "nobody watches them any more, and the job is not started again"
        self._report("orphans-left", message, trains, verdict=verdict)

    def _report(
        self, kind: str, message: str, trains: Mapping[int, int | None] | None = None, **more: str
    ) -> None:
        data: dict[str, object] = dict(more)
        if trains:
            data["processes"] = {str(pid): rank for pid, rank in trains.items()}
            data["end"] = " ".join(["kill", *map(str, sorted(trains))])
        self._processor.process(Notice(clock.monotonic_ns(), kind, message, data=data))


def _watch_s(policy: Policy) -> float:
    return float((policy.job.get("orphans") or {}).get("watch", WATCH_S))


def _named(trains: Mapping[int, int | None]) -> str:
    names = [
        f"process {pid}" + ("" if rank is None else f" (rank {rank})")
        for pid, rank in sorted(trains.items())
    ]
    return f"{', '.join(names)} {'goes' if len(names) == 1 else 'go'} on"
