"""The metrics of a run, read back from its journal.

All frames are included, also those of steps undone by a rollback, with another `attempt`. A live
run can be read up to some recent frame.
"""

from __future__ import annotations

import bisect
import csv
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from ..core.model.events import Announced, Frame
from ..core.model.redaction import cell
from ..errors import InputError, StoreError
from . import hash_chain, journal
from .run_directory import RunDir

HEAD = ("step", "rank", "attempt", "wall")
GROUP_ROWS = 1 << 14  # in memory before they are written


class Row(NamedTuple):
    """The values of one step of one rank.

    Attributes:
        wall: when the frame was made, in UTC; None where no record says so.
        values: metric id -> value in the metric's own unit; an absent value has no key.
    """

    step: int
    rank: int
    attempt: int
    wall: datetime | None
    values: dict[str, float]


class WallClock:
    """The time of day of an event, from the audit records that have both clocks.

    CLOCK_MONOTONIC starts again with each boot, so each boot has its own start: the earliest that a
    record implies, since one may be written later than its event happened.

    Args:
        path: the audit log; what is behind damage in it is not used.
    """

    def __init__(self, path: Path) -> None:
        starts: dict[str, tuple[int, datetime]] = {}  # boot -> first event, its moment zero
        with suppress(StoreError):
            for record in hash_chain.read(path):
                number, boot = record.get("event"), str(record.get("boot"))
                if not isinstance(number, int) or number < 0:
                    continue
                with suppress(ValueError, OverflowError):
                    wall = datetime.fromisoformat(record["wall"]).astimezone(UTC)
                    zero = wall - _since_boot(record["mono_ns"])
                    first, known = starts.get(boot, (number, zero))
                    starts[boot] = first, min(known, zero)
        self._starts = sorted(starts.values())

    def at(self, number: int, at_ns: int) -> datetime | None:
        """Return when event `number` happened, in UTC, None where that is not known."""
        if not self._starts:
            return None
        place = bisect.bisect_right(self._starts, number, key=lambda start: start[0])
        with suppress(OverflowError):
            return self._starts[max(0, place - 1)][1] + _since_boot(at_ns)
        return None


def _since_boot(at_ns: int) -> timedelta:
    return timedelta(microseconds=at_ns // 1000)


def rows(run: RunDir) -> Iterator[Row]:
    """Yield all frames in the order of reception.

    Raises:
        StoreError: the journal is missing or damaged.
    """
    names: dict[int, tuple[str, ...]] = {}
    clock = WallClock(run.audit_path)
    for number, event in journal.read(run.journal_path, only=(Announced, Frame)):
        if isinstance(event, Announced):
            names[event.rank] = event.names
        elif isinstance(event, Frame):
            pairs = zip(names.get(event.rank, ()), event.values, strict=False)
            values = {name: value for name, value in pairs if value is not None}
            wall = clock.at(number, event.at_ns)
            yield Row(event.step, event.rank, event.attempt, wall, values)


def numbered(run: RunDir, until: int | None = None) -> Iterator[tuple[int, Frame, Sequence[str]]]:
    """Yield `(event number, frame, its names)` in the order of reception, as far as they are kept.

    Args:
        until: the last event number to yield; None for all.

    Raises:
        StoreError: the journal is missing or damaged.
    """
    names: dict[int, tuple[str, ...]] = {}
    for number, event in journal.read(run.journal_path, only=(Announced, Frame)):
        if until is not None and number > until:
            return
        if isinstance(event, Announced):
            names[event.rank] = event.names
        elif isinstance(event, Frame):
            yield number, event, names.get(event.rank, ())


def metric_ids(run: RunDir) -> list[str]:
    """Return the ids of all metrics that any rank announced, in order of first sight."""
    found: dict[str, None] = {}
    for _, event in journal.read(run.journal_path, only=(Announced,)):
        if isinstance(event, Announced):
            found.update(dict.fromkeys(event.names))
    return list(found)


def export_csv(run: RunDir, out: TextIO, metrics: Sequence[str]) -> int:
    """Write one row per step, rank and attempt, and return the number of rows.

    The columns are those of HEAD and the metrics, in order. Absent is empty, NaN is `nan`, infinity
    `inf`; numbers have all digits that a float64 needs; times are ISO-8601 with milliseconds.

    Raises:
        StoreError: the journal is missing or damaged.
    """
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*HEAD, *map(cell, metrics)])
    count = 0
    for step, rank, attempt, wall, values in rows(run):
        time = "" if wall is None else wall.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        cells = [repr(values[name]) if name in values else "" for name in metrics]
        writer.writerow([step, rank, attempt, time, *cells])
        count += 1
    return count


def export_parquet(run: RunDir, out: BinaryIO, metrics: Sequence[str]) -> int:
    """Write the same as Parquet, zstd-compressed, and return the number of rows.

    `step` is int64, `rank` and `attempt` int32, `wall` a timestamp in UTC, metrics float64; absent
    is null. The id of the run is in the metadata of the file, under `supervise.run`.

    Raises:
        StoreError: the journal is missing or damaged.
        InputError: pyarrow is not installed.
    """
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        hint = "pip install 'supervise-train[backtest]', or export with --csv"
        raise InputError("Parquet needs the package 'pyarrow'", hint=hint) from error
    head = zip(
        HEAD, (arrow.int64(), *[arrow.int32()] * 2, arrow.timestamp("ms", "UTC")), strict=True
    )
    fields = [*head, *((name, arrow.float64()) for name in metrics)]
    schema = arrow.schema(fields, metadata={"supervise.run": run.id})
    count, source = 0, rows(run)
    with parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        while group := list(islice(source, GROUP_ROWS)):
            columns: list[Any] = list(zip(*(row[:4] for row in group), strict=True))
            columns += [[row.values.get(name) for row in group] for name in metrics]
            arrays = [arrow.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
            count += len(group)
    return count
