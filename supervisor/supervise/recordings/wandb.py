"""Weights & Biases, offline: the `.wandb` file of a run that was never synchronised.

The file is a log of protobuf records in LevelDB's log format: blocks of 32 KiB, in them chunks of
`crc32 length type payload`, a record being one full chunk or a first, middle ones and a last. The
package's own reader moved more than once, so the frame is read here and only the messages are its.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import InputError
from .table import Cell, Table, missing

HEAD = struct.Struct("<4sHB")  # identity, magic number, version
IDENTITY, MAGIC = b":W&B", 0xBEE1
CHUNK = struct.Struct("<IHB")  # crc, length, type
BLOCK = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def claims(path: Path) -> bool:
    """Return whether this is a file for this reader."""
    return path.suffix == ".wandb" and path.is_file()


def read(path: Path) -> Table:
    """Read the history of a run. An incomplete record at the end, of a killed run, is skipped.

    Raises:
        InputError: it is no such file, or the package `wandb` is not installed.
    """
    try:
        messages = import_module("wandb.proto.wandb_internal_pb2")
    except ImportError as error:
        raise missing(path, "wandb") from error
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) < HEAD.size or HEAD.unpack_from(data)[:2] != (IDENTITY, MAGIC):
        raise InputError(f"{path}: is no file of an offline run")
    found: list[dict[str, Cell]] = []
    columns: dict[str, None] = {}
    for payload in _records(data, path):
        record = messages.Record()
        try:
            record.ParseFromString(payload)
        except Exception as error:  # protobuf's DecodeError, whichever protobuf it is
            raise InputError(f"{path}: is damaged: {error}") from error
        if record.HasField("history"):
            row = dict(_items(record.history))
            columns.update(dict.fromkeys(row))
            found.append(row)
    names = tuple(columns)
    rows = [tuple(row.get(name) for name in names) for row in found]
    return Table(str(path), names, rows)


def _items(history: Any) -> Iterator[tuple[str, Cell]]:
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
    at, part = HEAD.size, b""
    while at + CHUNK.size <= len(data):
        room = BLOCK - at % BLOCK
        if room < CHUNK.size:  # the rest of a block is padding
            at += room
            continue
        _, length, kind = CHUNK.unpack_from(data, at)
        if kind == 0 and length == 0:
            at += room
            continue
        at += CHUNK.size
        chunk = data[at : at + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or length > room - CHUNK.size:
            raise InputError(f"{path}: is damaged at byte {at}")
        if len(chunk) < length:
            return
        at += length
        part = chunk if kind in (FULL, FIRST) else part + chunk
        if kind in (FULL, LAST):
            yield part
            part = b""
