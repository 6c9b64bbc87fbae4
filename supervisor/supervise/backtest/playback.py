"""A recording as the events of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.model.events import Announced, Event, Exited, Frame, Launched, Tick
from ..recordings.table import Recording

TICK_ROWS = 64  # rows between two ticks; live they come once a second
SECOND = 1_000_000_000  # ns; a step, where the recording has no step time
MOST_S = 86_400.0  # a longer step time is a mistake in the recording
GONE = 4  # times its longest absence; project default
PID = 1


def events_of(piece: Recording) -> Iterator[Event]:
    """Yield a piece of a recording as the events of a run that was launched for it.

    The clock is the step time where there is one, else a second per row: rows that were logged
    less often than every step are judged as if each were the next step.
    """
    at, pending = 1, False
    world = 1 + max(row[1] for row in piece.rows)
    time_at = piece.names.index("step_time") if "step_time" in piece.names else None
    sampled: Sampled | None = None  # made at the first tick that finds something missing
    yield Launched(at, PID, piece.rows[0][2])
    for rank in sorted({row[1] for row in piece.rows}):
        yield Announced(at, rank, world, PID + rank, piece.names)
    for number, (step, rank, attempt, values) in enumerate(piece.rows, 1):
        at += SECOND if time_at is None else _took(values[time_at])
        yield Frame(at, rank, attempt, step, values)
        if number % TICK_ROWS == 0:
            pending = True
            if sampled is None and None in values:
                sampled = Sampled(piece, number - 1)
        if (sampled is None or sampled.whole(number, values)) and pending:
            pending = False
            yield Tick(at)
    yield Exited(at, 0)


def _took(seconds: float | None) -> int:
    """Return a step time in nanoseconds; nonsense counts as a second."""
    known = seconds is not None and 0.0 <= seconds <= MOST_S
    return int(seconds * SECOND) if known and seconds is not None else SECOND


class Sampled:
    """Tells a column that is between two of its samples from one that went missing.

    Loggers write some columns every so many rows. A live probe would have been asked for them at
    every tick; here ticks come at rows that hold every column that is not gone: one that did not
    come for GONE times the longest time it ever took.
    """

    def __init__(self, piece: Recording, seen: int) -> None:
        """Take the first `seen` rows at once."""
        columns = zip(*(row[3] for row in piece.rows), strict=True)
        self.gaps = {j: 0 for j, column in enumerate(columns) if None in column}
        self.seen = dict.fromkeys(self.gaps, 0)
        for number, row in enumerate(piece.rows[:seen], 1):
            self.whole(number, row[3])

    def whole(self, number: int, values: Sequence[float | None]) -> bool:
        """Take a row; return whether nothing is missing in it but what is gone."""
        found = True
        for j, gap in self.gaps.items():
            since = number - self.seen[j]
            if values[j] is not None:
                if self.seen[j]:
                    self.gaps[j] = max(gap, since)
                self.seen[j] = number
            elif not 0 < gap * GONE < since:
                found = False
        return found
