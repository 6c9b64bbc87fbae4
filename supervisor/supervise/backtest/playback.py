"""Recordings and run directories as the events of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..core.model.events import (
    Announced,
    Event,
    Exited,
    Finished,
    Frame,
    Launched,
    OperatorCommand,
    Tick,
)
from ..errors import InputError, StoreError
from ..recordings.table import Recording, Table
from ..store import journal
from ..store.run_directory import RunDir

TICK_ROWS = 64  # rows between two ticks; live they come once a second
SECOND = 1_000_000_000  # ns; a step, where the recording has no step time
MOST_S = 86_400.0  # a longer step time is a mistake in the recording
MISSING_AFTER = 4  # times its longest absence; project default
PID = 1
RUN = "run"  # the reader of run directories


class RunReader:
    """Claims run directories; `events_of_run` reads them, since they hold more than a table."""

    def claims(self, path: Path) -> bool:
        """Return whether this is a run directory."""
        return path.is_dir() and (path / "run.json").is_file()

    def read(self, path: Path) -> Table:
        raise AssertionError("a journal holds events, not a table")


def events_of_run(path: Path) -> Iterator[Event]:
    """Yield the journal of a run, without action outcomes and operator commands.

    Those responded to the policy of that time. The effect of its actions on the metrics remains.

    Raises:
        InputError: the journal is missing or damaged.
    """
    try:
        for _, event in journal.read(RunDir.open(path).journal_path):
            if not isinstance(event, (Finished, OperatorCommand)):
                yield event
    except StoreError as error:
        raise InputError(str(error), hint=error.hint) from error


def events_of(piece: Recording) -> Iterator[Event]:
    """Yield a piece of a recording as the events of a run that was launched for it.

    The clock is the step time where there is one, else one second per row. Rows keep their steps,
    however far apart: what counts rows counts these.
    """
    at, pending = 1, False
    world = 1 + max(row[1] for row in piece.rows)
    time_at = piece.names.index("step_time") if "step_time" in piece.names else None
    sampled: Sampled | None = None  # created at the first tick with an absent value
    yield Launched(at, PID, piece.rows[0][2])
    for rank in sorted({row[1] for row in piece.rows}):
        yield Announced(at, rank, world, PID + rank, piece.names)
    for number, (step, rank, attempt, values) in enumerate(piece.rows, 1):
        at += SECOND if time_at is None else _duration_ns(values[time_at])
        yield Frame(at, rank, attempt, step, values)
        if number % TICK_ROWS == 0:
            pending = True
            if sampled is None and None in values:
                sampled = Sampled(piece, number - 1)
        if (sampled is None or sampled.is_complete(number, values)) and pending:
            pending = False
            yield Tick(at)
    yield Exited(at, 0)


def _duration_ns(seconds: float | None) -> int:
    """Return a step time in nanoseconds; an implausible value counts as one second."""
    known = seconds is not None and 0.0 <= seconds <= MOST_S
    return int(seconds * SECOND) if known and seconds is not None else SECOND


class Sampled:
    """Separates a column that is logged every few rows from one that went missing.

    Ticks are placed at rows that hold every column except the missing ones. A column is missing
    once it was absent for MISSING_AFTER times its longest gap so far.
    """

    def __init__(self, piece: Recording, seen: int) -> None:
        """Process the first `seen` rows."""
        columns = zip(*(row[3] for row in piece.rows), strict=True)
        self.gaps = {j: 0 for j, column in enumerate(columns) if None in column}
        self.seen = dict.fromkeys(self.gaps, 0)
        for number, row in enumerate(piece.rows[:seen], 1):
            self.is_complete(number, row[3])

    def is_complete(self, number: int, values: Sequence[float | None]) -> bool:
        """Process a row; return whether it holds all columns but the missing ones."""
        found = True
        for j, gap in self.gaps.items():
            since = number - self.seen[j]
            if values[j] is not None:
                if self.seen[j]:
                    self.gaps[j] = max(gap, since)
                self.seen[j] = number
            elif not 0 < gap * MISSING_AFTER < since:
                found = False
        return found
