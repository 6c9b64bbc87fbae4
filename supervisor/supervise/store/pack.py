"""Events as bytes, exactly: what is unpacked equals what was packed.

A Frame is binary: only present values are kept, 8 bytes each, so that a float comes back bit by
bit and NaN stays NaN. All other events are JSON objects of their fields, in Python's dialect
(bare NaN and Infinity): their mappings must hold string keys, lists, strings, numbers, None.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from ..core.values import (
    Adopted,
    Announced,
    Beat,
    Event,
    Exited,
    Finished,
    Frame,
    Gap,
    Launched,
    Noticed,
    Reloaded,
    Tick,
    Told,
)

FRAME = 1
KINDS: dict[type[Any], int] = {  # on disk: never renumber
    Frame: FRAME,
    Launched: 2,
    Announced: 3,
    Gap: 4,
    Tick: 5,
    Noticed: 6,
    Finished: 7,
    Told: 8,
    Exited: 9,
    Reloaded: 10,
    Adopted: 11,
}
TYPES: dict[int, type[Any]] = {kind: cls for cls, kind in KINDS.items()}

_HEAD = struct.Struct("<qqIIH")  # at_ns, step, rank, attempt, number of values


def pack(event: Event) -> tuple[int, bytes]:
    """Return the kind number and the payload of `event`."""
    if isinstance(event, Frame):
        return FRAME, _pack_frame(event)
    fields: dict[str, Any] = {name: getattr(event, name) for name in event.__slots__}
    if isinstance(event, Tick):
        fields["beats"] = [(beat.rank, beat.seen_ns, beat.phase) for beat in event.beats]
    return KINDS[type(event)], json.dumps(fields, separators=(",", ":")).encode()


def unpack(kind: int, payload: bytes) -> Event:
    """Return the event. Raises ValueError, KeyError, TypeError or struct.error on nonsense."""
    if kind == FRAME:
        return _unpack_frame(payload)
    fields = json.loads(payload)
    if kind == KINDS[Announced]:
        fields["names"] = tuple(fields["names"])
    elif kind == KINDS[Tick]:
        fields["beats"] = tuple(Beat(*beat) for beat in fields["beats"])
    event: Event = TYPES[kind](**fields)
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
    if bits == (1 << count) - 1:
        return Frame(at_ns, rank, attempt, step, present)
    rest = iter(present)
    values = tuple([next(rest) if bits >> index & 1 else None for index in range(count)])
    return Frame(at_ns, rank, attempt, step, values)
