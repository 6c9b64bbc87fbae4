"""Blocks of a journal as arrays: many frames at once, for the curves of the page.

The forms of records are those of `store.journal`. Frames of one rank with the same bitmap are a
group, and become rows of one array in one step: decoded one by one they would take ten times as
long.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core.model.events import Announced, Frame
from ..errors import MISSHAPEN
from ..store.journal import KINDS, MAX_PAYLOAD
from .buckets import Floats, reduce_frames

FRAME, ANNOUNCED = KINDS[Frame], KINDS[Announced]
RECORD_HEAD = struct.Struct("<IIIB")  # length, crc, number, kind
FRAME_HEAD = struct.Struct("<qqIIH")  # at_ns, step, rank, attempt, number of values
FRAME_START = RECORD_HEAD.size + FRAME_HEAD.size  # bytes before the bitmap
# A frame in a block: time in ns, step, attempt, position, event, and where its values are. A plain
# tuple: a million of them are made.
Span = tuple[int, int, int, int, int, int, int]
Groups = dict[tuple[bytes, int], list[Span]]  # by bitmap and number of values


class Scan(NamedTuple):
    """Whole records of a block.

    Attributes:
        parts: `(rank, frames or names of values)`, in the order of the journal for each rank.
        size: their bytes. number: of the event behind them.
    """

    parts: list[tuple[int, Groups | list[str]]]
    size: int
    number: int


def scan_block(block: bytes, position: int, number: int) -> Scan:
    """Return the frames and names in a block, up to what is no whole record.

    Args:
        position: of its first byte in the journal. number: of the next event; earlier ones are
            passed over.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: the first record cannot be decoded.
    """
    offset, size = 0, len(block)
    unpack, crc32, unpack_frame = RECORD_HEAD.unpack_from, zlib.crc32, FRAME_HEAD.unpack_from
    view, frames = memoryview(block), dict[int, Groups]()
    parts: list[tuple[int, Groups | list[str]]] = []
    while offset + RECORD_HEAD.size <= size:
        length, crc, low_bits, kind = unpack(block, offset)
        end = offset + RECORD_HEAD.size + length
        if end > size or length > MAX_PAYLOAD or crc32(view[offset + 8 : end]) != crc:
            break
        ahead = (low_bits - number) & 0xFFFFFFFF
        if ahead < 1 << 31:  # else it was read before
            event = number + ahead
            if kind == FRAME:
                at_ns, step, rank, attempt, count = unpack_frame(block, offset + RECORD_HEAD.size)
                begin = offset + FRAME_START + (count + 7) // 8
                bits = block[offset + FRAME_START : begin]
                span = (at_ns, step, attempt, position + offset, event, begin, end)
                if rank not in frames:
                    frames[rank] = {}
                frames[rank].setdefault((bits, end - begin), []).append(span)
            elif kind == ANNOUNCED:
                try:
                    fields = json.loads(block[offset + RECORD_HEAD.size : end])
                    rank, names = int(fields["rank"]), [str(name) for name in fields["names"]]
                except MISSHAPEN:
                    if not offset:
                        raise
                    break  # what is before it counts
                if rank in frames:
                    parts.append((rank, frames.pop(rank)))
                parts.append((rank, names))
            number = event + 1
        offset = end
    return Scan([*parts, *frames.items()], offset, number)


def decode_frames(
    groups: Groups, block: bytes, columns: Floats, width: int
) -> tuple[Floats, Floats, Floats]:
    """Return head, values and which of these are not finite, in the order of the journal."""
    count = sum(map(len, groups.values()))
    head = np.empty((count, 5), "i8")
    values, broken = np.full((count, width), np.nan), np.zeros((count, width), bool)
    begin = 0
    for (bits, size), frames in groups.items():
        target = slice(begin, begin + len(frames))
        head[target] = [frame[:5] for frame in frames]
        present = np.flatnonzero(np.unpackbits(np.frombuffer(bits, "u1"), bitorder="little"))
        raw = b"".join([block[begin:end] for *_, begin, end in frames])
        if size == 8 * len(present):  # else it is no frame of ours
            chosen = columns[present[present < len(columns)]]
            numbers = np.frombuffer(raw, "<f8").reshape(len(frames), -1)[:, : len(chosen)]
            numbers, chosen = numbers[:, chosen >= 0], chosen[chosen >= 0]
            finite = np.isfinite(numbers)
            is_whole = bool(finite.all())
            if not is_whole:
                broken[target, chosen] = ~finite
                numbers = np.where(finite, numbers, np.nan)
            if np.array_equal(chosen, np.arange(width)):  # the usual one: a copy of the block
                values[target] = numbers
            else:
                values[target, chosen] = numbers
        begin += len(frames)
    if len(groups) > 1:
        order = np.argsort(head[:, 3], kind="stable")
        head, values, broken = head[order], values[order], broken[order]
    return head, values, broken


def frame_points(
    frames: Floats, broken: Floats, columns: Sequence[int], *, joined: bool = False
) -> Floats:
    """Return the values of some metrics, of each frame, or `joined` in one bucket."""
    chosen = np.full((len(frames), len(columns)), np.nan)
    marks = np.zeros(chosen.shape, bool)
    for row, column in enumerate(columns):
        if column < frames.shape[1]:
            chosen[:, row], marks[:, row] = frames[:, column], broken[:, column]
    axis = 0 if joined else 1
    return reduce_frames(np.expand_dims(chosen, axis), np.expand_dims(marks, axis))


def cut_window(
    x: Floats, values: Floats, plane: int, low: float, high: float
) -> tuple[Floats, Floats]:
    """Return the frames in a window, and one more on each side."""
    first, last = np.searchsorted(x[plane], [low, high])
    span = slice(max(int(first) - 1, 0), int(last) + 1)
    return x[:, span], values[:, :, span]
