"""Blocks of a journal as arrays: many frames at once, for the curves of the page.

The forms of records are those of `store.journal`. Frames of one rank with the same bitmap are a
group, and become rows of one array in one step: decoded one by one they would take ten times as
long. Whether a block is whole and undamaged is the caller's to know.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from .levels import COUNT, LARGEST, Floats, absent_values

FRAME, ANNOUNCED = 1, 3  # kinds of records, as `store.journal` numbers them
RECORD_HEAD = struct.Struct("<IIIB")  # length, crc, number, kind
FRAME_HEAD = struct.Struct("<qqIIH")  # at_ns, step, rank, attempt, number of values
FRAME_START = RECORD_HEAD.size + FRAME_HEAD.size  # bytes before the bitmap
# A frame in a block: time in ns, step, attempt, position, event, and where its values are. A plain
# tuple: a million of them are made.
Span = tuple[int, int, int, int, int, int, int]
Groups = dict[tuple[int, bytes, int], list[Span]]  # by rank, bitmap and number of values


def decode_frames(
    groups: Groups, view: memoryview, columns: Floats, width: int
) -> tuple[Floats, Floats, Floats]:
    """Return head, values and which of these are not finite, in the order of the journal."""
    count = sum(map(len, groups.values()))
    head = np.empty((count, 5), "i8")
    values, broken = np.full((count, width), np.nan), np.zeros((count, width), bool)
    begin = 0
    for (_, bits, size), frames in groups.items():
        target = slice(begin, begin + len(frames))
        head[target] = [frame[:5] for frame in frames]
        present = np.flatnonzero(np.unpackbits(np.frombuffer(bits, "u1"), bitorder="little"))
        raw = b"".join([view[begin:end] for *_, begin, end in frames])
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


def read_frames_of(
    block: bytes, rank: int, count: int, tables: Sequence[tuple[int, Floats]]
) -> tuple[list[tuple[Groups, Floats]], int]:
    """Return up to `count` frames of a rank with their tables, and the bytes of whole records.

    Args:
        tables: with the number of the first frame in the block that each is for.
    """
    index = max((n for n, (first, _) in enumerate(tables) if first <= 0), default=-1)
    table = tables[index][1] if index >= 0 else np.empty(0, int)
    runs: list[tuple[Groups, Floats]] = [({}, table)]
    offset, number = 0, 0
    while offset + RECORD_HEAD.size <= len(block) and number < count:
        length, _, _, kind = RECORD_HEAD.unpack_from(block, offset)
        end = offset + RECORD_HEAD.size + length
        if end > len(block):
            break
        if kind == FRAME:
            at_ns, step, owner, attempt, size = FRAME_HEAD.unpack_from(
                block, offset + RECORD_HEAD.size
            )
            if owner == rank:
                while index + 1 < len(tables) and tables[index + 1][0] <= number:
                    index += 1
                    runs.append(({}, tables[index][1]))
                begin = offset + FRAME_START + (size + 7) // 8
                bits = block[offset + FRAME_START : begin]
                span = (at_ns, step, attempt, offset, -1, begin, end)
                runs[-1][0].setdefault((rank, bits, end - begin), []).append(span)
                number += 1
        offset = end
    return [run for run in runs if run[0]], offset


def frame_points(
    x: Floats, frames: Floats, broken: Floats, columns: Sequence[int]
) -> tuple[Floats, Floats]:
    """Return frames in the form of buckets of one."""
    values = absent_values(len(columns), len(frames))
    for row, column in enumerate(columns):
        if column < frames.shape[1]:
            values[row, :COUNT] = frames[:, column].clip(-LARGEST, LARGEST)
            counts = np.where(np.isfinite(frames[:, column]), 1, 0)
            values[row, COUNT] = np.where(broken[:, column], -0.5, counts)
    return x, values


def cut_window(
    x: Floats, values: Floats, plane: int, low: float, high: float
) -> tuple[Floats, Floats]:
    """Return the frames in a window, and one more on each side."""
    first, last = np.searchsorted(x[plane], [low, high])
    span = slice(max(int(first) - 1, 0), int(last) + 1)
    return x[:, span], values[:, :, span]
