"""Parquet: one row per logged step. Absent is null, NaN is NaN."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import InputError
from .table import Cell, Table, missing


def claims(path: Path) -> bool:
    """Return whether this is a file for this reader."""
    return path.suffix == ".parquet" and path.is_file()


def read(path: Path) -> Table:
    """Read a file whole.

    Raises:
        InputError: it cannot be read, or pyarrow is not installed.
    """
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise missing(path, "pyarrow") from error
    try:
        # Not through the dataset API: a folder called `key=value` is no column.
        table = parquet.ParquetFile(path).read()
    except (OSError, arrow.ArrowException) as error:
        raise InputError(f"{path}: is no Parquet file: {str(error).splitlines()[0]}") from error
    columns = [map(_cell, column.to_pylist()) for column in table.columns]
    rows = zip(*columns, strict=True)
    return Table(str(path), tuple(table.column_names), list(rows))


def _cell(value: Any) -> Cell:
    if value is None or isinstance(value, (float, str)):
        return value
    if isinstance(value, int):
        return float(value)
    return str(value)
