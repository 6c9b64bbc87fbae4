"""Metrics recorded by other programs, as series for a back-test."""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "readers": "READERS, read_csv, find_recordings",
        "table": "COLUMN_NAMES, NoStepsError, Recording, Table, split_into_runs",
    },
)
