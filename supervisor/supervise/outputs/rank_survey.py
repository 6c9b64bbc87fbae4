"""Looks at the processes of a job that stands still, for `core.analysis.standstill` to explain."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any

import psutil

from ..core.analysis.standstill import Collective, LoaderWorker, RankStand, Standstill, explain
from .stacks import ask, waits_for_lock

_STATES = {
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped",
    psutil.STATUS_ZOMBIE: "exited",
    psutil.STATUS_DEAD: "exited",
    psutil.STATUS_DISK_SLEEP: "disk",
}
# faulthandler's, newest call first; then py-spy's.
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_PY_SPY = re.compile(r"^    (?P<name>.+) \((?P<file>.+):(?P<line>\d+)\)$")
_MAIN = re.compile(r"^(Current thread|Stack \(most recent|Thread .*MainThread)")
_FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python\d|supervise_probe/|^<frozen")
_ENGINE = "_engine_run_backward"
_LOADER = re.compile(r"torch/utils/data/dataloader\.py$")
_WORKER = "_worker_loop"  # of torch's data loader; what is above it in a fork is its parent's
_SPAWNED = "--multiprocessing-fork"  # in the command of a worker that is no fork


class RankSurvey:
    """The processes of the ranks, as they are found; `finish` says what became of them.

    Args:
        ranks: what `Control.ranks` returns. members: the processes of the job.
        clock: returns CLOCK_MONOTONIC in nanoseconds.
    """

    def __init__(
        self,
        ranks: Mapping[int, Mapping[str, Any]],
        members: Sequence[psutil.Process] = (),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._ranks, self._clock = ranks, clock
        self._workers = _descendants({view["pid"] for view in ranks.values()}, members)
        self._found = {
            pid: _observe(pid)
            for pid in (*(view["pid"] for view in ranks.values()), *self._workers)
        }
        self._at_ns = clock()

    def has_exited(self) -> bool:
        """Return whether the process of any rank does not exist any more."""
        return any(self._found[view["pid"]][0] == "exited" for view in self._ranks.values())

    def silent_s(self) -> float:
        """Return for how long no rank has shown a sign of life, 0 where there is none."""
        newest: int = max((view["seen_ns"] for view in self._ranks.values()), default=self._at_ns)
        return (self._at_ns - newest) / 1e9

    def finish(self, steps: Mapping[int, int], stacks: Callable[[int], str]) -> Standstill:
        """Return who holds the job up.

        Args:
            steps: the newest of each rank. stacks: returns the text of a process's stacks.
        """
        passed = max((self._clock() - self._at_ns) / 1e9, 1e-3)
        stands = {}
        for rank, view in self._ranks.items():
            state, used = self._usage(view["pid"], passed)
            frames = main_frames(stacks(view["pid"]).splitlines())
            in_loader = any(
                frame["name"] == "__next__" and _LOADER.search(frame["file"]) for frame in frames
            )
            stands[rank] = RankStand(
                state,
                used,
                steps.get(rank, -1),
                (self._at_ns - view["seen_ns"]) / 1e9,
                Collective(**view["collective"]) if view.get("collective") else None,
                own_place(frames),
                any(frame["name"] == _ENGINE for frame in frames),
                in_loader,
                tuple(self._loaders(view["pid"], passed, stacks)) if in_loader else (),
            )
        return explain(stands, {rank: view["pid"] for rank, view in self._ranks.items()})

    def _usage(self, pid: int, passed_s: float) -> tuple[str, float | None]:
        """Return the state of a process, and how many cores it has used since."""
        state, before = self._found[pid]
        _, after = _observe(pid)
        return state, None if before is None or after is None else (after - before) / passed_s

    def _loaders(
        self, rank: int, passed_s: float, stacks: Callable[[int], str]
    ) -> Iterator[LoaderWorker]:
        """Yield the workers of the rank with this pid."""
        for pid, (parent, command) in self._workers.items():
            frames = main_frames(stacks(pid).splitlines())
            inner = list(takewhile(lambda frame: frame["name"] != _WORKER, frames))
            if parent != rank or len(inner) == len(frames) > 0:
                continue
            if not frames and _SPAWNED not in command:
                continue
            state, used = self._usage(pid, passed_s)
            idle = bool(inner) and inner[-1]["name"] == "get"  # from the queue of what is asked for
            place = own_place(inner) or (_place(inner[0]) if inner else "")
            activity = "" if not frames else "idle" if idle else "busy"
            yield LoaderWorker(pid, state, used, activity, place, waits_for_lock(pid))


def _descendants(
    ranks: set[int], members: Sequence[psutil.Process]
) -> dict[int, tuple[int, Sequence[str]]]:
    """Return the rank and the command of each process that ranks started, by pid."""
    found: dict[int, tuple[int, Sequence[str]]] = {}
    for process in members:  # parents come first
        if process.pid not in ranks:
            with suppress(psutil.Error):
                parent = process.ppid()
                rank = parent if parent in ranks else found.get(parent, (0, ()))[0]
                if rank:
                    found[process.pid] = rank, process.cmdline()
    return found


def _observe(pid: int) -> tuple[str, float | None]:
    """Return the state of a process, and the seconds of CPU time that it has used."""
    try:
        process = psutil.Process(pid)
        used = process.cpu_times()
        return _STATES.get(process.status(), ""), used.user + used.system
    except psutil.NoSuchProcess:
        return "exited", None
    except psutil.Error:
        return "", None


def own_place(frames: Sequence[re.Match[str]]) -> str:
    """Return the deepest frame outside installed packages, "" where there is none."""
    own = next((frame for frame in frames if not _FOREIGN.search(frame["file"])), None)
    return "" if own is None else _place(own)


def _place(frame: re.Match[str]) -> str:
    return f"{PurePath(frame['file']).name}:{frame['line']} in {frame['name']}"


def main_stack(marks: Path, pid: int) -> str:
    """Return the frames of a process's main thread, "" where they cannot be read."""
    try:
        found = main_frames(ask(pid, marks).splitlines())
    except OSError:
        return ""
    return "\n".join(frame[0].strip() for frame in found)


def main_frames(lines: Iterable[str]) -> list[re.Match[str]]:
    """Return the calls of the main thread, the newest first."""
    found: list[re.Match[str]] = []
    inside = False
    for line in lines:
        frame = _FRAME.match(line) or _PY_SPY.match(line)
        if frame is None:
            if inside and not line.strip():
                break
            inside = bool(_MAIN.match(line)) or (inside and line.startswith(" "))
        elif inside:
            found.append(frame)
    return found
