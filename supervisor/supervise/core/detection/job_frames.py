"""One frame of the job per step, made of the frames of its ranks.

The frame of the rank that leads is held until all ranks have sent that step, and then says of the
metrics in `JOB` what the job says: what each rank has of them is in its own frame. What lacks ranks
after `HOLD_NS` is made without them: then means are of those that are there, and sums and norms are
absent; `job_ranks` says how many they are. Ranks of other machines, which nobody here can see,
count as those of this one.

Folds events in the order of the journal and looks at no clock, so that a replay makes the same.
Source: the design of the ranks, section 2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from ..analysis.job_numbers import MEANS, NORMS, SUMS, Values, fold
from ..model.events import Frame

JOB = frozenset((*MEANS, *SUMS, *NORMS, "step_time"))
COLUMNS = ("job_ranks", "nonfinite_rank")  # in front of those that a rank announces
HOLD_NS = 5_000_000_000  # while the leader goes on, or nobody does; project default
MISSES = 8  # steps in a row without a rank, after which nobody waits for it; project default
LAG = 64  # frames that are held at most

Key = tuple[int, int]


class JobFrames:
    """The frames of a job's ranks that are not judged yet.

    Attributes:
        leader: the lowest rank that has sent a frame, None before the first.
    """

    def __init__(self) -> None:
        self.leader: int | None = None
        self._names: dict[int, tuple[str, ...]] = {}
        self._missed: dict[int, int] = {}
        self._steps: dict[Key, dict[int, Values]] = {}
        self._held: deque[tuple[Frame, int]] = deque()  # with the time when it came
        self._made_last: Key = (-1, -1)
        self._newest_ns = 0

    def copy(self) -> JobFrames:
        twin = JobFrames()
        twin.leader, twin._newest_ns = self.leader, self._newest_ns
        twin._made_last = self._made_last
        twin._names, twin._missed = dict(self._names), dict(self._missed)
        twin._steps = {key: dict(rows) for key, rows in self._steps.items()}
        twin._held = self._held.copy()
        return twin

    def announce(self, rank: int, names: tuple[str, ...]) -> tuple[str, ...]:
        """A rank announced its columns; return those that its frames have from now on."""
        self._names[rank], self._missed[rank] = names, 0
        return COLUMNS + names

    def forget(self, rank: int) -> None:
        """Another program is that rank now, and may begin again at any step."""
        for rows in self._steps.values():
            rows.pop(rank, None)
        self._made_last = (-1, -1)

    def add(self, frame: Frame, at_ns: int, world_size: int) -> list[Frame]:
        """Take a rank's frame; return what can be judged, the job's own behind those of ranks."""
        rank, key, ready = frame.rank, (frame.attempt, frame.step), list[Frame]()
        self._newest_ns = at_ns
        if self.leader is None or rank < self.leader:
            ready += [_plain(held) for held, _ in self._held]
            self._held.clear()
            self.leader = rank
        if rank == self.leader:
            self._held.append((frame, at_ns))
        else:
            ready.append(_plain(frame))
        if key > self._made_last:
            names = self._names.get(rank, ())
            self._steps.setdefault(key, {})[rank] = dict(zip(names, frame.values, strict=False))
            self._missed[rank] = 0
            while len(self._steps) > LAG:
                del self._steps[min(self._steps)]
        return ready + self._ready(world_size, at_ns)

    def late(self, at_ns: int, world_size: int) -> list[Frame]:
        """Return the frames that waited for other ranks for too long."""
        return self._ready(world_size, at_ns)

    def flush(self, world_size: int) -> list[Frame]:
        """Return all frames that wait for other ranks, of what is there."""
        return self._ready(world_size, None)

    def _ready(self, world_size: int, at_ns: int | None) -> list[Frame]:
        ready: list[Frame] = []
        while self._held:
            first, came_ns = self._held[0]
            rows = self._steps.get(_key(first), {})
            missing = {r for r, count in self._missed.items() if count < MISSES} - rows.keys()
            if missing and at_ns is not None and not self._is_overdue(came_ns, at_ns):
                break
            self._held.popleft()
            for rank in missing:
                self._missed[rank] += 1
            self._made_last = _key(first)
            self._steps = {key: each for key, each in self._steps.items() if key > _key(first)}
            ready.append(self._made(first, rows, world_size, whole=not missing))
        return ready

    def _is_overdue(self, came_ns: int, at_ns: int) -> bool:
        """Return whether the oldest frame is held for too long; a recording has a row a second."""
        idle = len(self._held) > 1 or at_ns - self._newest_ns > HOLD_NS
        return len(self._held) > LAG or (at_ns - came_ns > HOLD_NS and idle)

    def _made(
        self, frame: Frame, rows: Mapping[int, Values], world_size: int, *, whole: bool
    ) -> Frame:
        names = self._names.get(frame.rank, ())
        rows = {**rows, frame.rank: dict(zip(names, frame.values, strict=False))}
        found = fold(rows, frame.rank, names, world_size, whole=whole)
        odd = next((r for r in sorted(rows) if not _finite(rows[r])), None)
        own = zip(names, frame.values, strict=False)
        values = tuple(found.get(name, value) for name, value in own)
        more = (float(len(rows)), None if odd is None else float(odd))
        return replace(frame, values=more + values)


def _finite(values: Values) -> bool:
    known = (values.get(name) for name in (MEANS[0], *NORMS))
    return all(value is None or math.isfinite(value) for value in known)


def _key(frame: Frame) -> Key:
    return frame.attempt, frame.step


def _plain(frame: Frame) -> Frame:
    """Return the frame of a rank beside the job's."""
    return replace(frame, values=(None, None, *frame.values))
