"""Facts of a run in its journal: its steps, the healthy values of each signal, and its gaps.

Of the leading rank, the lowest that published a frame. Memory is bounded: of each signal at most
`2 * MAX_VALUES` values are held, every 1st, 2nd, 4th, ... healthy one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.analysis.job_numbers import tokens_of
from ..core.model.events import Adopted, Announced, Exited, Frame, Gap
from ..errors import StoreError
from ..store import journal
from ..store.run_directory import RunDir
from .stability_record import Baseline

MAX_VALUES = 2048  # values of each signal, for its quantiles; project default
LEAST = 16  # healthy values for a baseline
Interval = tuple[int, float]  # of CLOCK_MONOTONIC, in nanoseconds


class Sample:
    """An even selection of the values of one signal."""

    __slots__ = ("_stride", "_turn", "present", "values")

    def __init__(self) -> None:
        self.values: list[float] = []
        self.present = 0  # frames that hold the signal, healthy or not
        self._stride, self._turn = 1, 0

    def add(self, value: float) -> None:
        """Add the next healthy value."""
        if self._turn == 0 and math.isfinite(value):
            self.values.append(value)
            if len(self.values) == 2 * MAX_VALUES:
                self.values = self.values[::2]
                self._stride *= 2
        self._turn = (self._turn + 1) % self._stride

    def baseline(self) -> Baseline | None:
        """Return median, 5th and 95th percentile; None of too few values."""
        ordered, count = sorted(self.values), len(self.values)
        if count < LEAST:
            return None
        low, middle, high = (ordered[round(share * (count - 1))] for share in (0.05, 0.5, 0.95))
        return Baseline(low, middle, high, count)


@dataclass
class Frames:
    """What the frames of a run show.

    Attributes:
        frames, missing: steps of the leading rank that were seen, and numbers that were skipped.
        redone: steps that were undone, since a later attempt made them again.
        skipped: updates that were skipped. tokens: of all ranks, each batch once.
        first_step, last_step: -1 without any. attempts: distinct ones.
        ranks: that published a frame. lost: frames of any rank that were overwritten unread.
        unwatched_s: time between supervisors. down_s: from an end of the job to its next frame.
        span_s: from the first frame to the last.
        unreadable: why the journal does not show all of that, None if it does.
    """

    frames: int = 0
    missing: int = 0
    first_step: int = -1
    last_step: int = -1
    redone: int = 0
    skipped: int = 0
    tokens: float = 0.0
    lost: int = 0
    unwatched_s: list[float] = field(default_factory=list)
    down_s: float = 0.0
    span_s: float = 0.0
    attempts: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    announced: dict[str, None] = field(default_factory=dict)
    samples: dict[str, Sample] = field(default_factory=dict)
    unreadable: str | None = None
    _leader: int | None = None
    _previous: tuple[int, int] = (-1, -1)  # attempt and step
    _first_ns: int = 0
    _ended_ns: int | None = None

    def add(self, event: Frame, names: Sequence[str], *, healthy: bool) -> None:
        """Count a frame of the leading rank."""
        self.frames += 1
        attempt, step = event.attempt, event.step
        if self._previous[0] == attempt:
            self.missing += max(0, step - self._previous[1] - 1)
        elif self.frames > 1:
            self.redone += max(0, self._previous[1] - step + 1)
        self._previous = attempt, step
        self.attempts.add(attempt)
        if self.first_step < 0:
            self.first_step, self._first_ns = step, event.at_ns
        self.last_step, self.span_s = step, (event.at_ns - self._first_ns) / 1e9
        if self._ended_ns is not None:
            self.down_s += (event.at_ns - self._ended_ns) / 1e9
            self._ended_ns = None
        for name, value in zip(names, event.values, strict=False):
            if value is None:
                continue
            sample = self.samples.get(name)
            if sample is None:
                sample = self.samples[name] = Sample()
            sample.present += 1
            if healthy:
                sample.add(value)
            if name == "update_skipped" and value > 0.0:
                self.skipped += 1

    def median(self, signal: str) -> float | None:
        """Return the healthy median of a signal, None where it is not known."""
        baseline = self.samples[signal].baseline() if signal in self.samples else None
        return None if baseline is None else baseline.median


def read_frames(run: RunDir, incidents: Sequence[Interval]) -> Frames:
    """Read the journal of a run.

    Args:
        incidents: when incidents were open; what lies in them is not healthy.
    """
    frames = Frames()
    names: dict[int, tuple[str, ...]] = {}
    kinds = (Announced, Frame, Gap, Adopted, Exited)
    try:
        for begin, end in journal.thinned(run.journal_path)[:1]:
            frames.unreadable = (
                f"frames of events {begin} to {end - 1} were removed (journal.max_gb)"
            )
        for _, event in journal.read(run.journal_path, only=kinds):
            if isinstance(event, Announced):
                names[event.rank] = event.names
                frames.announced.update(dict.fromkeys(event.names))
            elif isinstance(event, Frame):
                frames.ranks.add(event.rank)
                columns = names.get(event.rank, ())
                frames.tokens += tokens_of(dict(zip(columns, event.values, strict=False)))
                if frames._leader is None:
                    frames._leader = event.rank
                if event.rank == frames._leader:
                    is_inside = any(start <= event.at_ns <= end for start, end in incidents)
                    frames.add(event, columns, healthy=not is_inside)
            elif isinstance(event, Gap):
                frames.lost += event.count
            elif isinstance(event, Adopted):
                frames.unwatched_s.append(event.unwatched_ns / 1e9)
            elif isinstance(event, Exited):
                frames._ended_ns = event.at_ns
    except StoreError as error:
        frames.unreadable = str(error)
    return frames
