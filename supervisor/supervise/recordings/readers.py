"""Metrics recorded by other programs: a reader for each format, and the recordings below a path."""

from __future__ import annotations

import csv
import gzip
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import InputError
from .table import Cell, NoStepsError, Table, missing_package

LABELS = "incidents.csv"  # marks the root of a collection of recordings
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}  # what others put between two cells
EVENTS = "tensorboard.backend.event_processing"
EVENT_FILES = "*tfevents*"
SCALARS = "scalars"  # the plugin of TensorBoard whose tensors are numbers
HEAD = struct.Struct("<4sHB")  # of W&B: identity, magic number, version
IDENTITY, MAGIC = b":W&B", 0xBEE1
CHUNK = struct.Struct("<IHB")  # crc, length, type
BLOCK = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class Reader:
    """A format: how it is told, and how it is read.

    Attributes:
        nested: folders inside a recording's folder may be recordings as well.
    """

    claims: Callable[[Path], bool]
    read: Callable[[Path], Table]
    nested: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """One file or folder that a reader claims. `name` is the name of its run."""

    path: Path
    reader: str
    name: str
    named: bool  # by the user; False: found in a folder


def read_csv(path: Path) -> Table:
    """Read CSV, plain or gzip: a header, then a row per logged step. Absent is empty, NaN `nan`.

    Raises:
        NoStepsError: its columns are separated by something else than commas.
        InputError: it cannot be read, or is no CSV.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            columns = tuple(next(lines, ()))
            rows = [_csv_row(line) for line in lines if line]
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: cannot be read: {reason}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: is no CSV: {error}") from error
    separator = next(
        (mark for mark in SEPARATORS if len(columns) == 1 and mark in columns[0]), None
    )
    if separator is not None:
        raise NoStepsError(
            f"{path}:1: one column, {columns[0][:80]!r}",
            hint=f"separated by {SEPARATORS[separator]}? Write it with commas",
        )
    for number, row in enumerate(rows, 2):
        if len(row) > len(columns):
            raise InputError(f"{path}:{number}: {len(row)} cells under {len(columns)} columns")
    return Table(str(path), columns, rows, first_line=2)


def _csv_row(line: list[str]) -> tuple[Cell, ...]:
    try:
        return tuple(map(float, line))  # three times as fast as cell by cell
    except ValueError:
        return tuple(map(_csv_cell, line))


def _csv_cell(text: str) -> Cell:
    try:
        return float(text)
    except ValueError:
        return text.strip() or None


def read_parquet(path: Path) -> Table:
    """Read Parquet: a row per logged step. Absent is null, NaN is NaN.

    Raises:
        InputError: it cannot be read, or pyarrow is not installed.
    """
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise missing_package(path, "pyarrow") from error
    try:
        # Not through the dataset API: a folder called `key=value` is no column.
        table = parquet.ParquetFile(path).read()
    except (OSError, arrow.ArrowException) as error:
        raise InputError(f"{path}: is no Parquet file: {str(error).splitlines()[0]}") from error
    columns = [map(_parquet_cell, column.to_pylist()) for column in table.columns]
    rows = zip(*columns, strict=True)
    return Table(str(path), tuple(table.column_names), list(rows))


def _parquet_cell(value: Any) -> Cell:
    if value is None or isinstance(value, (float, str)):
        return value
    if isinstance(value, int):
        return float(value)
    return str(value)


def read_tensorboard(path: Path) -> Table:
    """Read the scalars in all event files of a folder, in the order of their names: the time.

    Values of one step may have been logged one by one: they become one row per step and file. A
    second file in the folder is the same run started again. Tags whose steps are counted in
    samples (Megatron's `lm loss vs samples`) are left out.

    Raises:
        InputError: they cannot be read, or the package `tensorboard` is not installed.
    """
    try:
        load = import_module(f"{EVENTS}.event_file_loader").LegacyEventFileLoader
    except ImportError as error:
        raise missing_package(path, "tensorboard") from error
    rows_found: list[dict[str, float]] = []
    columns: dict[str, None] = {}
    for file in sorted(path.glob(EVENT_FILES)):
        if not file.stat().st_size:
            continue  # a writer that has written nothing yet
        by_step: dict[int, dict[str, float]] = {}
        found_events = False
        try:
            for event in load(str(file)).Load():
                found_events = True
                for value in event.summary.value:
                    number = _number(value)
                    if number is not None and not value.tag.endswith("vs samples"):
                        row = by_step.setdefault(event.step, {"step": float(event.step)})
                        row[value.tag] = number
                        columns[value.tag] = None
        except Exception as error:  # its own classes of errors differ by version and by codec
            raise InputError(f"{file}: is no event file: {error}") from error
        if not found_events:
            raise InputError(f"{file}: is no event file, or is cut before its first event")
        rows_found += [by_step[step] for step in sorted(by_step)]
    names = ("step", *(name for name in columns if name != "step"))
    rows: list[tuple[Cell, ...]] = [tuple(row.get(name) for name in names) for row in rows_found]
    return Table(str(path), names, rows)


def _number(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.HasField("tensor") and value.metadata.plugin_data.plugin_name in ("", SCALARS):
        array = import_module("tensorboard.util.tensor_util").make_ndarray(value.tensor)
        if array.size == 1 and array.dtype.kind in "fiu":
            return float(array.reshape(-1)[0])
    return None


def read_wandb(path: Path) -> Table:
    """Read the `.wandb` file of an offline run of Weights & Biases.

    It is a log of protobuf records in LevelDB's log format: blocks of 32 KiB, in them chunks of
    `crc32 length type payload`, a record being one full chunk or a first, middle ones and a last.
    The package's own reader moved more than once, so the frame is read here and only the messages
    are its. An incomplete record at the end, of a killed run, is skipped.

    Raises:
        InputError: it is no such file, or the package `wandb` is not installed.
    """
    try:
        messages = import_module("wandb.proto.wandb_internal_pb2")
    except ImportError as error:
        raise missing_package(path, "wandb") from error
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) < HEAD.size or HEAD.unpack_from(data)[:2] != (IDENTITY, MAGIC):
        raise InputError(f"{path}: is no file of an offline run")
    rows_found: list[dict[str, Cell]] = []
    columns: dict[str, None] = {}
    for payload in _records(data, path):
        record = messages.Record()
        try:
            record.ParseFromString(payload)
        except Exception as error:  # protobuf's DecodeError, whichever protobuf it is
            raise InputError(f"{path}: is damaged: {error}") from error
        if record.HasField("history"):
            row = dict(_logged(record.history))
            columns.update(dict.fromkeys(row))
            rows_found.append(row)
    names = tuple(columns)
    rows = [tuple(row.get(name) for name in names) for row in rows_found]
    return Table(str(path), names, rows)


def _logged(history: Any) -> Iterator[tuple[str, Cell]]:
    yield "_step", float(history.step.num)
    for item in history.item:
        name = item.key or "/".join(item.nested_key)
        value = json.loads(item.value_json)
        if isinstance(value, dict) and "value" in value:
            value = value["value"]
        if isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity"):
            yield name, float(value)  # True is 1


def _records(data: bytes, path: Path) -> Iterator[bytes]:
    """Yield the payloads of whole records. Raises: InputError: chunks that do not fit together."""
    offset, part = HEAD.size, b""
    while offset + CHUNK.size <= len(data):
        room = BLOCK - offset % BLOCK
        if room < CHUNK.size:  # the rest of a block is padding
            offset += room
            continue
        _, length, kind = CHUNK.unpack_from(data, offset)
        if kind == 0 and length == 0:
            offset += room
            continue
        offset += CHUNK.size
        chunk = data[offset : offset + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or length > room - CHUNK.size:
            raise InputError(f"{path}: is damaged at byte {offset}")
        if len(chunk) < length:
            return
        offset += length
        part = chunk if kind in (FULL, FIRST) else part + chunk
        if kind in (FULL, LAST):
            yield part
            part = b""


READERS: Mapping[str, Reader] = {
    "csv": Reader(
        lambda path: path.name.endswith((".csv", ".csv.gz")) and path.is_file(), read_csv
    ),
    "parquet": Reader(lambda path: path.suffix == ".parquet" and path.is_file(), read_parquet),
    "tensorboard": Reader(
        lambda path: path.is_dir() and any(path.glob(EVENT_FILES)), read_tensorboard, nested=True
    ),
    "wandb": Reader(lambda path: path.suffix == ".wandb" and path.is_file(), read_wandb),
}


def find_recordings(
    paths: Sequence[Path], extra: Mapping[str, Reader] | None = None
) -> list[Source]:
    """Return the recordings at and below `paths`, in that order, each once.

    A recording is called by its path below the root of its collection, without its suffix: the
    nearest folder above it that holds an `incidents.csv`, else the folder that all those without
    one have in common.

    Args:
        more: readers of other layers, asked first.

    Raises:
        InputError: a path is not there or closed, or holds nothing that a reader can read.
    """
    readers = {**(extra or {}), **READERS}
    claims: dict[Path, tuple[str, bool]] = {}
    for path in paths:
        try:  # `exists`, `is_file` and the like raise in a folder that may not be entered
            if not path.exists():
                raise InputError(f"{path}: no such file or directory")
            claimed = [*_walk(path, readers)]
        except OSError as error:
            location = error.filename or path
            raise InputError(f"{location}: cannot be read: {error.strerror}") from error
        if not claimed:
            kinds = "a run directory, CSV, Parquet, a TensorBoard or an offline W&B directory"
            raise InputError(f"{path}: holds no recording", hint=f"give {kinds}")
        for claimed_path, reader in claimed:
            claims.setdefault(claimed_path, (reader, claimed_path == path))
    names = _names(list(claims))
    return [Source(p, reader, names[p], named) for p, (reader, named) in claims.items()]


def _walk(path: Path, readers: dict[str, Reader]) -> Iterator[tuple[Path, str]]:
    name = next((name for name, reader in readers.items() if reader.claims(path)), None)
    if name is not None:
        yield path, name
    if not path.is_dir() or (name is not None and not readers[name].nested):
        return
    for child in sorted(path.iterdir()):
        # A link is a second name: W&B's `latest-run` is one of its neighbours.
        if child.name == LABELS or child.is_symlink() or child.name.startswith("."):
            continue
        if child.is_dir() or name is None:
            yield from _walk(child, readers)


def _names(paths: Iterable[Path]) -> dict[Path, str]:
    absolute = {path: path.absolute() for path in paths}
    roots = {path: next(filter(_is_root, full.parents), None) for path, full in absolute.items()}
    alone = [str(absolute[path].parent) for path, root in roots.items() if root is None]
    common = Path(os.path.commonpath(alone)) if alone else Path()
    return {
        path: _stem(full.relative_to(roots[path] or common).as_posix(), full.is_dir())
        for path, full in absolute.items()
    }


def _is_root(folder: Path) -> bool:
    try:
        return (folder / LABELS).is_file()
    except OSError:  # unreadable: not ours
        return False


def _stem(name: str, is_folder: bool) -> str:
    if is_folder:
        return name
    for suffix in (".gz", ".csv", ".parquet", ".wandb"):
        name = name.removesuffix(suffix)
    return name
