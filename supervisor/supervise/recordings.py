"""Recordings of other programs: a reader for each format, and the runs in a table that was read."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import operator
import os
import re
import shlex
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median_low
from types import NoneType
from typing import Any

from .errors import InputError

# Our id: what it is called by Megatron-LM, Hugging Face (axolotl too), Lightning, nanoGPT, llm.c,
# torchtitan, Composer and OLMo, and in the recordings of our own fault study.
COLUMN_NAMES: Mapping[str, tuple[str, ...]] = {
    "train_loss_raw": (
        *("loss", "train_loss", "lm_loss", "lm_loss_training/lm_loss", "train_loss_step"),
        *("loss/train/total", "crossentropyloss", "ce_loss", "loss_metrics/global_avg_loss"),
    ),
    "grad_global_norm": (
        *("grad_norm", "gradient_norm", "grad_norm/grad_norm", "l2_norm/grad/global", "norm"),
        *("optim/total_grad_norm", "total_grad_norm", "grad_2.0_norm_total"),
    ),
    "learning_rate": (
        *("lr", "learning_rate/learning_rate", "optim/learning_rate_group0", "lr_adamw"),
        *("lr_decoupledadamw/group0", "learning_rate_group0"),
    ),
    "update_to_weight": ("uw_ratio",),
    "update_skipped": ("skipped", "optim/step_skipped"),
    "skipped_updates": ("number_of_skipped_iterations", "skipped_iterations"),
    "nan_inf_events": ("number_of_nan_iterations", "nan_iterations"),
    "loss_scale": ("scale", "loss_scale/loss_scale"),
    "max_attn_logit": ("attn_logit_max", "max_attention_logit"),
    "attn_entropy": ("attn_ent_mean",),
    "attn_entropy_min": ("attn_ent_min",),
    "residual_rms": ("act_rms_max",),
    "logz_mean": ("lse_abs",),
    "batch_token_entropy": ("tok_entropy",),
    "step_time": (
        *("iteration_time", "elapsed_time_per_iteration_s", "elapsed_time_per_iteration_ms"),
        *("iteration_time/iteration_time", "time_metrics/end_to_end(s)", "step_time_ms"),
    ),
    "tokens_per_sec": (
        *("tokens_per_second", "throughput/tokens_per_sec", "throughput(tps)", "tgs"),
        *("throughput/device/tokens_per_second", "tokens_per_second_per_gpu"),
    ),
    "mfu": ("mfu(%)",),
}
# Milliseconds where we count seconds.
FACTORS: Mapping[str, float] = {"elapsed_time_per_iteration_ms": 1e-3, "step_time_ms": 1e-3}

# Where the optimizer's step is, the best first: a logger's own counter says the least.
STEPS = (
    *("step", "trainer/global_step", "global_step", "train/global_step", "iteration", "iter"),
    *("iteration_number", "_step"),
)
FILE = "file"
RUNS = ("run", FILE)  # several runs in one file; logs that its rows were copied from
RANK, ATTEMPT = "rank", "attempt"
# Where and when a row was logged; no metric.
ASIDE = frozenset(
    (*STEPS, *RUNS, RANK, ATTEMPT, "line", "wall", "_timestamp", "_runtime", "_wandb")
)

ID = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*")  # what a metric's id looks like
_PREFIXES = ("train/", "training/", "metrics/")


def column_key(column: str) -> str:
    """Return a column's name as it is looked up."""
    return column.strip().lower().replace(" ", "_").replace("-", "_")


def bind_columns(
    columns: tuple[str, ...], extra: Mapping[str, str]
) -> tuple[dict[str, tuple[int, float]], list[str]]:
    """Return metric id -> (index of its column, factor to its unit), and the columns left out.

    Args:
        extra: column -> metric id given by the user; takes precedence.
    """
    columns_by_metric: dict[str, tuple[int, float]] = {}
    used: set[int] = set()

    def take(metric: str, index: int, factor: float = 1.0) -> None:
        if metric not in columns_by_metric and index not in used:
            columns_by_metric[metric] = (index, factor)
            used.add(index)

    for i, column in enumerate(columns):
        if column in extra:
            take(extra[column], i)
    for i, column in enumerate(columns):
        if column in COLUMN_NAMES:
            take(column, i)
    index_by_name = {
        name: i for i, column in reversed([*enumerate(columns)]) for name in _spellings(column)
    }
    for metric, names in COLUMN_NAMES.items():
        for name in (metric, *names):
            if name in index_by_name:
                take(metric, index_by_name[name], FACTORS.get(name, 1.0))
    named_columns = {
        index_by_name[name]
        for names in COLUMN_NAMES.values()
        for name in names
        if name in index_by_name
    }
    for i, column in enumerate(columns):
        if i not in named_columns and column not in ASIDE and ID.fullmatch(column):
            take(column, i)
    if "skip_reason" not in columns_by_metric and columns_by_metric.keys() >= {
        "update_skipped",
        "loss_scale",
    }:
        columns_by_metric.setdefault(
            "overflow", columns_by_metric["update_skipped"]
        )  # the log tells no other reason
    unused = [c for i, c in enumerate(columns) if i not in used and c not in ASIDE]
    return columns_by_metric, unused


def _spellings(column: str) -> list[str]:
    name = column_key(column)
    return [name, *(name.removeprefix(p) for p in _PREFIXES if name.startswith(p))]


Cell = float | str | None  # a text is a cell that holds no number; None is absent
Row = tuple[int, int, int, tuple[float | None, ...]]  # step, rank, attempt, values

# A step this much further than usual starts a new piece: the rows before are no baseline for it.
# Project defaults: the public logs that we know lose 1700 steps at a restart.
FAR_STEPS = 1000
FAR_SPACINGS = 20
SHOWN = 5  # pieces in a note
SHORT = 16  # rows; a piece of fewer ends before most detectors have a baseline. Project default


@dataclass(slots=True)
class Table:
    """Columns by the names the file has for them; `where` and `line` are for messages."""

    location: str
    columns: tuple[str, ...]
    rows: Iterable[tuple[Cell, ...]]
    first_line: int | None = None  # of the first row, where the file has lines


@dataclass(slots=True)
class Recording:
    """One run, or one piece of it, in the order in which it was logged.

    Attributes:
        run: name of the run inside its file, "" when the file holds one only; `:name` where that
            names a log that the rows were copied from.
        names: metric ids; `rows[i][3][j]` belongs to `names[j]`. Absent is None, NaN is NaN.
        notes: what was left out or read in a way that should be known.
    """

    run: str
    names: tuple[str, ...]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


class NoStepsError(InputError):
    """A table that is no recording at all."""


def missing_package(path: Path, package: str) -> InputError:
    """Return the error for a file whose reader needs a package that is not installed."""
    return InputError(
        f"{path}: reading it needs the package {package!r}",
        hint="pip install 'supervise-train[backtest]'",
    )


def split_into_runs(sheet: Table, extra: Mapping[str, str] | None = None) -> list[Recording]:
    """Return every run of a sheet, in pieces where its steps go back or jump far.

    A column `run` names the run of a row; so does `file`, for snippets taken from several logs.

    Args:
        extra: column -> metric id, beyond the aliases that everybody uses.

    Raises:
        NoStepsError: it has no column of steps.
        InputError: a cell that must hold a number does not, two columns that count have the same
            name, or there are no rows.
    """
    extra = extra or {}
    step = next((c for c in STEPS if c in sheet.columns), None)
    if step is None:
        raise NoStepsError(
            f"{sheet.location}: no column of steps",
            hint=f"one of {', '.join(STEPS)}; it has: {', '.join(sheet.columns) or 'none'}",
        )
    missing = [c for c in extra if c not in sheet.columns]
    columns, unused = bind_columns(sheet.columns, extra)
    _check_twice(sheet, {sheet.columns[i] for i, _ in columns.values()})
    by_run, skipped = _grouped(sheet, step)
    notes = [f"columns left out: {', '.join(sorted(unused))}"] if unused else []
    if skipped:
        notes.append(f"{skipped} rows without a step")
    if missing:
        notes.append(f"no column {', '.join(missing)}")
    pieces: list[Recording] = []
    for run, raw in by_run.items():
        pieces += _pieces(sheet, run, raw, columns, notes)
    if not pieces:
        hint = None
        if unused:
            hint = f"map a column: --alias {shlex.quote(f'{unused[0]}=train_loss_raw')}"
        raise InputError(f"{sheet.location}: no rows with a step and a metric", hint=hint)
    return pieces


def _check_twice(sheet: Table, names: Collection[str]) -> None:
    for name, times in Counter(sheet.columns).items():
        if times > 1 and (name in names or name in ASIDE):
            location = _location(sheet, sheet.first_line and 1)
            raise InputError(f"{location}: {times} columns are called {name!r}", hint="rename them")


@dataclass(slots=True)
class _Raw:
    step: int
    rank: int
    attempt: int
    cells: tuple[Cell, ...]
    line: int | None  # line in the file


def _grouped(sheet: Table, step: str) -> tuple[dict[str, list[_Raw]], int]:
    """Read all rows; return them by run, and how many had no step."""
    index_by_column = {name: i for i, name in enumerate(sheet.columns)}
    run_at = next((index_by_column[c] for c in RUNS if c in index_by_column), None)
    mark = ":" if run_at is not None and sheet.columns[run_at] == FILE else ""
    step_at, width = index_by_column[step], len(sheet.columns)
    counters = [(index_by_column.get(name), name) for name in (RANK, ATTEMPT)]
    rows_by_run: dict[str, list[_Raw]] = {}
    skipped = 0
    for number, cells in enumerate(sheet.rows, sheet.first_line or 0):
        line = None if sheet.first_line is None else number
        if len(cells) < width:
            cells = (*cells, *(None,) * (width - len(cells)))
        if cells[step_at] is None:
            skipped += 1
            continue
        rank, attempt = (
            0 if i is None else _integer(cells[i], name, sheet, line) for i, name in counters
        )
        row = _Raw(_integer(cells[step_at], step, sheet, line), rank, attempt, cells, line)
        rows_by_run.setdefault("" if run_at is None else mark + str(cells[run_at]), []).append(row)
    return rows_by_run, skipped


def _location(sheet: Table, line: int | None) -> str:
    return sheet.location if line is None else f"{sheet.location}:{line}"


def _integer(cell: Cell, label: str, sheet: Table, line: int | None) -> int:
    if isinstance(cell, (int, float)) and math.isfinite(cell) and cell == int(cell):
        return int(cell)
    raise InputError(f"{_location(sheet, line)}: {label} {cell!r} is not a whole number")


def _pieces(
    sheet: Table,
    run: str,
    raw: list[_Raw],
    column_of: Mapping[str, tuple[int, float]],
    notes: list[str],
) -> Iterator[Recording]:
    """Work column by column: with 64 of them that is half the time of cell by cell."""
    remarks = list(notes)
    columns = list(zip(*(row.cells for row in raw), strict=True))
    series: dict[str, tuple[Any, ...]] = {}
    texts = []
    for name, (i, factor) in column_of.items():
        kinds = set(map(type, columns[i]))
        if str in kinds:
            if name in COLUMN_NAMES:
                bad = next(row for row in raw if isinstance(row.cells[i], str))
                message = f"{sheet.columns[i]} {bad.cells[i]!r} is not a number"
                raise InputError(f"{_location(sheet, bad.line)}: {message}")
            texts.append(name)
        elif kinds != {NoneType}:
            series[name] = columns[i]
            if factor != 1.0:
                series[name] = tuple(None if cell is None else cell * factor for cell in columns[i])
    if texts:
        remarks.append(f"columns of text left out: {', '.join(sorted(texts))}")
    if not series:
        return
    rows = _merged(list(zip(raw, _filled(list(series.values()), remarks), strict=True)), remarks)
    pieces = list(_split(rows))
    if len(pieces) > 1:
        remarks.append(_blind(pieces))
    for piece in pieces:
        has_values = [
            set(map(type, c)) != {NoneType} for c in zip(*(v for _, v in piece), strict=True)
        ]
        names = tuple(itertools.compress(series, has_values))
        if names:
            some = not all(has_values)
            cut_rows: list[Row] = [
                (r.step, r.rank, r.attempt, tuple(itertools.compress(v, has_values)) if some else v)
                for r, v in piece
            ]
            yield Recording(run, names, cut_rows, remarks)


Values = tuple[float | None, ...]
Read = tuple[_Raw, Values]


def _filled(columns: list[tuple[Any, ...]], remarks: list[str]) -> list[Values]:
    """Return the rows; those that hold a step and nothing else as NaN where there always was one.

    Some writers leave the cell of a NaN empty. Absent is not NaN, so this is done only where
    nothing else can be meant: a row that was logged for no value, in a run that has no NaN of its
    own, in columns that had a value in every row before.
    """
    rows: list[Values] = list(zip(*columns, strict=True))
    if any(None not in column for column in columns):
        return rows
    empty = (None,) * len(columns)
    start = rows.index(empty) if empty in rows else 0
    always = [None not in column[:start] for column in columns]
    nan = any(any(map(operator.ne, column, column)) for column in columns)
    if start == 0 or nan or not any(always):
        return rows
    fill = tuple(math.nan if was_logged else None for was_logged in always)
    remarks.append(f"{rows.count(empty)} rows hold a step and nothing else: read as NaN")
    return [fill if row == empty else row for row in rows]


def _merged(rows: list[Read], remarks: list[str]) -> list[Read]:
    """Return one row for those of one step that follow each other in a rank.

    Lightning writes rates, losses and evaluations of a step in rows of their own, and a log that
    is flushed twice repeats a row. Of two values the newer one stays, unless it hides a NaN.
    """
    merged: list[Read] = []
    newest_index: dict[int, int] = {}  # rank -> place of its newest row
    differ = 0
    for row, values in rows:
        index = newest_index.get(row.rank)
        previous = merged[index] if index is not None else None
        is_same_step = previous and (previous[0].step, previous[0].attempt) == (
            row.step,
            row.attempt,
        )
        if not is_same_step or previous is None or index is None:
            newest_index[row.rank] = len(merged)
            merged.append((row, values))
            continue
        pairs = [(a, b) for a, b in zip(previous[1], values, strict=True) if None not in (a, b)]
        differ += any(a != b and (a == a or b == b) for a, b in pairs)
        merged[index] = (previous[0], tuple(map(_newer, previous[1], values)))
    if differ:
        remarks.append(f"{differ} rows repeat the step before with other values: the newest count")
    return merged


def _newer(old: float | None, new: float | None) -> float | None:
    return old if new is None or (old is not None and not math.isfinite(old)) else new


def _blind(pieces: list[list[Read]]) -> str:
    """Return what the note says of a run that was cut: where nothing has a baseline yet."""
    spans = [f"{piece[0][0].step} to {piece[:SHORT][-1][0].step}" for piece in pieces[1:]]
    tail = f" and {len(spans) - SHOWN} more" if len(spans) > SHOWN else ""
    text = (
        f"cut into {len(pieces)} pieces, where the step goes back or jumps far; without a baseline:"
        f" steps {', '.join(spans[:SHOWN])}{tail}"
    )
    short = sum(len(piece) < SHORT for piece in pieces)
    return text + (f"; {short} have fewer than {SHORT} rows, too short to judge" if short else "")


def _split(rows: list[Read]) -> Iterator[list[Read]]:
    """Cut where a rank's step goes back within an attempt, or jumps far."""
    piece: list[Read] = []
    newest_row: dict[int, Read] = {}  # rank -> its newest row
    far = max(FAR_STEPS, FAR_SPACINGS * _usual(rows))
    for row, values in rows:
        previous = newest_row.get(row.rank)
        if previous is not None and previous[0].attempt == row.attempt:
            ahead = row.step - previous[0].step
            if ahead <= 0 or ahead > far:
                yield piece
                piece, newest_row = [], {}
        piece.append((row, values))
        newest_row[row.rank] = piece[-1]
    if piece:
        yield piece


def _usual(rows: list[Read]) -> int:
    """Return how many steps lie between two rows of a rank: a median, since runs are restarted.

    Of all rows: the first spacing of a log may be the one that is odd, and with nothing to compare
    it to, a log of every 5000th step would fall into pieces of one row.
    """
    newest_row: dict[int, _Raw] = {}
    spacings = []
    for row, _ in rows:
        previous = newest_row.get(row.rank)
        if previous is not None and previous.attempt == row.attempt and row.step > previous.step:
            spacings.append(row.step - previous.step)
        newest_row[row.rank] = row
    return median_low(spacings) if spacings else 1


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
        extra: readers of other layers, asked first.

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
