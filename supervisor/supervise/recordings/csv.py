"""CSV, plain or gzip: a header, then one row per logged step. Absent is empty, NaN is `nan`."""

from __future__ import annotations

import csv
import gzip
import zlib
from pathlib import Path

from ..errors import InputError
from .table import Cell, NoStepsError, Table

SUFFIXES = (".csv", ".csv.gz")
OTHERS = {";": "semicolons", "\t": "tabs", "|": "bars"}  # what others put between two cells


def claims(path: Path) -> bool:
    """Return whether this is a file for this reader."""
    return path.name.endswith(SUFFIXES) and path.is_file()


def read(path: Path) -> Table:
    """Read a file whole.

    Raises:
        NoStepsError: its columns are separated by something else than commas.
        InputError: it cannot be read, or is no CSV.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            columns = tuple(next(lines, ()))
            rows = [_row(line) for line in lines if line]
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: cannot be read: {why}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: is no CSV: {error}") from error
    other = next((mark for mark in OTHERS if len(columns) == 1 and mark in columns[0]), None)
    if other is not None:
        raise NoStepsError(
            f"{path}:1: one column, {columns[0][:80]!r}",
            hint=f"separated by {OTHERS[other]}? Write it with commas",
        )
    for number, row in enumerate(rows, 2):
        if len(row) > len(columns):
            raise InputError(f"{path}:{number}: {len(row)} cells under {len(columns)} columns")
    return Table(str(path), columns, rows, first_line=2)


def _row(line: list[str]) -> tuple[Cell, ...]:
    try:
        return tuple(map(float, line))  # three times as fast as cell by cell
    except ValueError:
        return tuple(map(_cell, line))


def _cell(text: str) -> Cell:
    try:
        return float(text)
    except ValueError:
        return text.strip() or None
