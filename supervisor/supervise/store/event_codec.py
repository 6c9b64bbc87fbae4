"""Events as bytes, exactly: what is unpacked equals what was packed.

A Frame is binary: only present values are stored, 8 bytes each, so that floats are exact and NaN
stays NaN. Other events are JSON objects of their fields with bare NaN and Infinity: their mappings
must consist of string keys, lists, strings, numbers, None.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

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
    Reloaded,
    Tick,
)
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

# Type of each field; an integer has 64 bits and is not a boolean.
_INT, _TEXT, _FLAG, _OBJECT = "an integer", "a text", "a boolean", "an object"
_FIELDS: dict[str, str] = {
    **dict.fromkeys(("at_ns", "rank", "world_size", "pid", "attempt", "segment", "letter"), _INT),
    **dict.fromkeys(("first_seq", "count", "step", "seen_ns", "unwatched_ns", "returncode"), _INT),
    **dict.fromkeys(
        ("kind", "message", "action_id", "error", "operator", "command", "phase"), _TEXT
    ),
    **dict.fromkeys(("digest", "name", "mode", "before", "refused"), _TEXT),
    **dict.fromkeys(("again", "ok", "alive"), _FLAG),
    **dict.fromkeys(("data", "result", "args", "changes"), _OBJECT),
}
_OPTIONAL = {
    Notice: ("rank", "step", "segment", "letter"),
    Finished: ("error",),
    Reloaded: ("refused",),
}


def pack(event: Event) -> tuple[int, bytes]:
    """Return the kind number and the payload of `event`."""
    if isinstance(event, Frame):
        return FRAME, _pack_frame(event)
    fields: dict[str, Any] = {name: getattr(event, name) for name in event.__slots__}
    if isinstance(event, Tick):
        fields["beats"] = [(beat.rank, beat.seen_ns, beat.phase) for beat in event.beats]
    return KINDS[type(event)], json.dumps(fields, separators=(",", ":")).encode()


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
    if cls is Announced:
        fields["names"] = _names(fields["names"])
    elif cls is Tick:
        fields["beats"] = tuple([_beat(beat) for beat in fields["beats"]])
    event: Event = cls(**fields)
    for name, value in fields.items():
        if name in _FIELDS and not (value is None and name in _OPTIONAL.get(cls, ())):
            _check(name, value)
    return event


def _names(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list):
        raise ValueError("names is not a list")
    for name in names:
        _check("name", name)
        name.encode()  # JSON may contain half of a surrogate pair, a table may not
    return tuple(names)


def _beat(fields: Any) -> Beat:
    beat = Beat(*fields)
    for name in Beat.__slots__:
        _check(name, getattr(beat, name))
    return beat


def _check(name: str, value: Any) -> None:
    """Raise ValueError if a field has the wrong type."""
    wanted = _FIELDS[name]
    if wanted is _INT:
        fits = type(value) is int and -_MAX <= value < _MAX
    elif wanted is _FLAG:
        fits = isinstance(value, bool)
    else:
        fits = isinstance(value, str if wanted is _TEXT else Mapping)
    if not fits:
        raise ValueError(f"{name} is not {wanted}: {str(value)[:40]!r}")


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
