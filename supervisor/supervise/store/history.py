"""The metrics of a run, read back from its journal.

All frames are included, also those of steps undone by a rollback, with another `attempt`. A live
run can be read up to some recent frame.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterator, Sequence
from typing import TextIO

from ..core.model.events import Announced, Frame
from ..errors import UsageError
from . import journal
from .run_directory import RunDir


def frames(run: RunDir) -> Iterator[tuple[int, int, int, int, dict[str, float]]]:
    """Yield `(rank, attempt, step, at_ns, values)` in the order of reception.

    `values` maps metric ids to floats in the metric's own unit; an absent value has no key.

    Raises:
        StoreError: the journal is missing or damaged.
    """
    names: dict[int, tuple[str, ...]] = {}
    for _, event in journal.read(run.journal_path, only=(Announced, Frame)):
        if isinstance(event, Announced):
            names[event.rank] = event.names
        elif isinstance(event, Frame):
            pairs = zip(names.get(event.rank, ()), event.values, strict=False)
            values = {name: value for name, value in pairs if value is not None}
            yield event.rank, event.attempt, event.step, event.at_ns, values


def metric_ids(run: RunDir) -> list[str]:
    """Return the ids of all metrics that any rank announced, in order of first sight."""
    found: dict[str, None] = {}
    for _, event in journal.read(run.journal_path, only=(Announced,)):
        if isinstance(event, Announced):
            found.update(dict.fromkeys(event.names))
    return list(found)


def export_csv(run: RunDir, out: TextIO, metrics: Sequence[str] | None = None) -> int:
    """Write one row per step, rank and attempt, and return the number of rows.

    The columns are `step,rank,attempt` and the metric ids; absent is empty, NaN is `nan`, infinity
    `inf`; numbers have all digits that a float64 needs.

    Args:
        metrics: ids of the columns, in order; None for all.

    Raises:
        UsageError: a metric is not in this run.
        StoreError: the journal is missing or damaged.
    """
    known = metric_ids(run)
    columns = known if metrics is None else list(metrics)
    for name in columns:
        if name not in known:
            raise _unknown(name, known)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", "rank", "attempt", *columns])
    rows = 0
    for rank, attempt, step, _, values in frames(run):
        cells = [repr(values[name]) if name in values else "" for name in columns]
        writer.writerow([step, rank, attempt, *cells])
        rows += 1
    return rows


def _unknown(name: str, known: Sequence[str]) -> UsageError:
    if not known:
        return UsageError(
            f"no metric {name!r}: this run has none",
            hint="the probe announced none; see: supervise status RUN",
        )
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return UsageError(f"no metric {name!r} in this run", hint=f"{meant}it has: {', '.join(known)}")
