"""Events as bytes, exactly: what is unpacked equals what was packed.

A Frame is binary: only present values are stored, 8 bytes each, so that floats are exact and NaN
stays NaN. Other events are JSON objects of their fields with bare NaN and Infinity: their mappings
must consist of string keys, lists, strings, numbers, None.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import msgspec

from ..core.model.events import (
    Adopted,
    Announced,
    Beat,
    Event,
    Exited,
    Finished,
    Frame,
    Gap,
    Launched,
    Notice,
    OperatorCommand,
    PolicyChanges,
    Reloaded,
    Tick,
)
from ..core.model.payload import Payload
from .files import shallow

FRAME = 1
KINDS: dict[type[Any], int] = {  # on disk: never renumber
    Frame: FRAME,
    Launched: 2,
    Announced: 3,
    Gap: 4,
    Tick: 5,
    Notice: 6,
    Finished: 7,
    OperatorCommand: 8,
    Exited: 9,
    Reloaded: 10,
    Adopted: 11,
}
TYPES: dict[int, type[Any]] = {kind: cls for cls, kind in KINDS.items()}

_HEAD = struct.Struct("<qqIIH")  # at_ns, step, rank, attempt, number of values
_MAX = 1 << 63


def pack(event: Event) -> tuple[int, bytes]:
    """Return the kind number and the payload of `event`."""
    if isinstance(event, Frame):
        return FRAME, _pack_frame(event)
    fields: dict[str, object] = {name: getattr(event, name) for name in event.__slots__}
    if isinstance(event, Tick):
        fields["beats"] = [(beat.rank, beat.seen_ns, beat.phase) for beat in event.beats]
    text = json.dumps(fields, separators=(",", ":"), default=_builtins)
    return KINDS[type(event)], text.encode()


def _builtins(value: Payload | PolicyChanges) -> object:
    return dict(value) if isinstance(value, Payload) else msgspec.to_builtins(value)


def unpack(kind: int, payload: bytes) -> Event:
    """Return the event.

    Raises:
        ValueError, KeyError, TypeError, struct.error, RecursionError: it is invalid.
    """
    if kind == FRAME:
        return _unpack_frame(payload)
    cls, fields = TYPES[kind], json.loads(payload)
    if not isinstance(fields, dict) or not shallow(fields):
        raise ValueError("it is not an object, or nested too deep")
    if not fields.keys() <= set(cls.__slots__):
        raise ValueError(f"{sorted(fields.keys() - set(cls.__slots__))} are no fields of it")
    if cls is Tick:
        names = Beat.__slots__
        fields["beats"] = [dict(zip(names, row, strict=True)) for row in fields["beats"]]
    event: Event = msgspec.convert(fields, cls, dec_hook=lambda form, value: form(value))
    rows = fields["beats"] if isinstance(event, Tick) else [fields]
    for number in (value for row in (fields, *rows) for value in row.values()):
        if type(number) is int and not -_MAX <= number < _MAX:
            raise ValueError(f"{number} has more than 64 bits")
    if isinstance(event, Announced):
        for name in event.names:
            name.encode()  # JSON may contain half of a surrogate pair, a table may not
    return event


def _pack_frame(frame: Frame) -> bytes:
    values = frame.values
    count = len(values)
    size = (count + 7) // 8
    if None in values:
        bits = 0
        for index, value in enumerate(values):
            if value is not None:
                bits |= 1 << index
        values = tuple([value for value in values if value is not None])
    else:
        bits = (1 << count) - 1
    head = _HEAD.pack(frame.at_ns, frame.step, frame.rank, frame.attempt, count)
    return head + bits.to_bytes(size, "little") + struct.pack(f"<{len(values)}d", *values)


def _unpack_frame(payload: bytes) -> Frame:
    at_ns, step, rank, attempt, count = _HEAD.unpack_from(payload)
    start = _HEAD.size + (count + 7) // 8
    bits = int.from_bytes(payload[_HEAD.size : start], "little")
    present = struct.unpack(f"<{(len(payload) - start) // 8}d", payload[start:])
    if bits == (1 << count) - 1 and len(present) == count:
        return Frame(at_ns, rank, attempt, step, present)
    if bits >> count or bits.bit_count() != len(present):
        raise ValueError(f"{len(present)} of {count} values are present, unlike its bitmap")
    rest = iter(present)
    values = tuple([next(rest) if bits >> index & 1 else None for index in range(count)])
    return Frame(at_ns, rank, attempt, step, values)
