"""Looks at the processes of a job that stands still, for `core.analysis.standstill` to explain."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import psutil

from ..core.analysis.standstill import Collective, RankStand, Standstill, explain
from .stacks import ask

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


class RankSurvey:
    """The processes of the ranks, as they are found; `finish` says what became of them.

    Args:
        ranks: what `Control.ranks` returns. clock: returns CLOCK_MONOTONIC in nanoseconds.
    """

    def __init__(
        self, ranks: Mapping[int, Mapping[str, Any]], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._ranks, self._clock = ranks, clock
        self._found = {rank: _observe(view["pid"]) for rank, view in ranks.items()}
        self._at_ns = clock()

    def has_exited(self) -> bool:
        """Return whether the process of any rank does not exist any more."""
        return any(state == "exited" for state, _ in self._found.values())

    def silent_s(self) -> float:
        """Return for how long no rank has shown a sign of life, 0 where there is none."""
        newest: int = max((view["seen_ns"] for view in self._ranks.values()), default=self._at_ns)
        return (self._at_ns - newest) / 1e9

    def finish(self, steps: Mapping[int, int], stacks: Mapping[int, str]) -> Standstill:
        """Return who holds the job up.

        Args:
            steps: the newest of each rank. stacks: text of each rank's stacks.
        """
        passed = max((self._clock() - self._at_ns) / 1e9, 1e-3)
        stands = {}
        for rank, view in self._ranks.items():
            state, before = self._found[rank]
            _, after = _observe(view["pid"])
            used = None if before is None or after is None else (after - before) / passed
            place, in_backward = main_thread(stacks.get(rank, ""))
            stands[rank] = RankStand(
                state,
                used,
                steps.get(rank, -1),
                (self._at_ns - view["seen_ns"]) / 1e9,
                Collective(**view["collective"]) if view.get("collective") else None,
                place,
                in_backward,
            )
        return explain(stands, {rank: view["pid"] for rank, view in self._ranks.items()})


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


def main_thread(stacks: str) -> tuple[str, bool]:
    """Return where the main thread is in the job's own code, and whether it is in a backward.

    The place is `file.py:line in function` of its deepest frame outside installed packages, ""
    where there is none.
    """
    frames = list(_main_frames(stacks.splitlines()))
    in_backward = any(frame["name"] == _ENGINE for frame in frames)
    own = next((frame for frame in frames if not _FOREIGN.search(frame["file"])), None)
    if own is None:
        return "", in_backward
    return f"{PurePath(own['file']).name}:{own['line']} in {own['name']}", in_backward


def main_stack(marks: Path, pid: int) -> str:
    """Return the frames of a process's main thread, "" where they cannot be read."""
    try:
        found = _main_frames(ask(pid, marks).splitlines())
    except OSError:
        return ""
    return "\n".join(frame[0].strip() for frame in found)


def _main_frames(lines: Iterable[str]) -> Iterable[re.Match[str]]:
    inside = False
    for line in lines:
        frame = _FRAME.match(line) or _PY_SPY.match(line)
        if frame is None:
            if inside and not line.strip():
                return
            inside = bool(_MAIN.match(line)) or (inside and line.startswith(" "))
        elif inside:
            yield frame


def stacks_of(bundle: Path, rank: int, pid: int) -> str:
    """Return the text of a rank's stacks in an evidence bundle, "" where there is none."""
    for name in (f"rank-{rank}-stacks.txt", f"stacks-{pid}.txt"):
        path = bundle / name
        if path.exists():
            return path.read_text(errors="replace")
    return ""
