"""The bytes between the probe and the supervisor; the only file that both sides import.

One file per rank, little-endian. Every number in it has one writer only:

    0       header     what this file is; written once, checksummed          probe
    256     words      frames published, newest beat and boundary, ...       probe
    384     words      supervisor's heartbeat, lease, commands sent, wishes  supervisor
    512     end        one letter: {"returncode", "text"}, seq 1             probe
    4096    names      2 letters of 16 KiB: a list; seq = generation, the newest in half seq & 1
            status     2 letters of  4 KiB: an object, likewise              probe
            commands   64 letters of 1 KiB                                   supervisor
            letters    64 letters of 1 KiB: acks and notices                 probe
            slots      one frame each                                        probe

    slot   = u32 crc | u32 count | u64 seq | u64 step | u32 attempt | u32 flags (0) | u64 at_ns
             | u64 present[2] | f64[capacity]       bit i of `present` is set: value i is there
    letter = u32 crc | u32 length | u64 seq | JSON

    command  {"key", "verb", "args"}
    ack      {"ack": key, "verb", "step", "ok", "result", "error"}
    notice   {"notice": kind, "message", "step", "data"}

Why checksums, and neither locks nor trust in sequence numbers: the probe must never wait, and
Python has no memory barrier that orders two writes on ARM. A checksum, seeded by the number of what
it covers, makes a half-written or an overwritten slot simply not valid, on any machine. Counters
are hints that save reading; the slots alone say what was written (`Ring`).

Knows nothing of files, clocks, processes or metrics.

Source: the frame-validity rule of https://www.sqlite.org/fileformat2.html#walformat.
"""

from __future__ import annotations

import json
import struct
import zlib
from functools import lru_cache
from typing import Any, Callable, Generic, NamedTuple, Optional, TypeVar

MAGIC = b"SUPVSEG1"
VERSION = 1
PHASES = ("startup", "step", "eval", "checkpoint", "paused", "exiting")
# What waits for other ranks, by the beginning of its name; of several that fit, the longest.
COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "wait",
)

# Where things are. Words are 8 bytes, on cache lines of their own writer.
FIXED_SIZE = 256
HEAD_AT = 256  # frames published
NAMES_GENERATION_AT = 264
STATUS_GENERATION_AT = 272
LETTERS_HEAD_AT = 280  # letters sent by the probe
BEAT_AT = 288  # checked word: monotonic ns with the phase in its low three bits
COLLECTIVE_AT = 304  # checked word: the newest collective, see `pack_collective`; 0 before any
BOUNDARY_AT = 320  # steps ended when the rank last looked for commands, 0 before any
SUPERVISOR_AT = 384  # checked word: monotonic ns
LEASE_AT = 400  # checked word: monotonic ns
COMMANDS_HEAD_AT = 416  # commands sent by the supervisor
TIGHT_AT = 424  # checked word: monotonic ns
SPARE_AT = 440  # two checked words: a step, 0 for none; monotonic ns until when it counts
KEEP_AT = 472  # checked word: monotonic ns
END_AT = 512
NAMES_AT = 4096
END_SIZE = NAMES_AT - END_AT
NAMES_SIZE = 16384
STATUS_AT = NAMES_AT + 2 * NAMES_SIZE
STATUS_SIZE = 4096
LETTER_SIZE = 1024
LETTER_SLOTS = 64
COMMANDS_AT = STATUS_AT + 2 * STATUS_SIZE
LETTERS_AT = COMMANDS_AT + LETTER_SLOTS * LETTER_SIZE
HEADER_SIZE = LETTERS_AT + LETTER_SLOTS * LETTER_SIZE  # the frame slots start here

MAX_CAPACITY = 128  # bits in the presence map
SLOT_HEAD = struct.Struct("<IIQQIIQQQ")
LETTER_HEAD = struct.Struct("<IIQ")
LETTER_ROOM = LETTER_SIZE - LETTER_HEAD.size
# Native, as "<QQ" would store byte by byte.
CHECKED = struct.Struct("@QQ")
ALL_ONES = (1 << 64) - 1
PATIENCE = 3  # reads of a slot that stays invalid before it is given up

_HEADER = struct.Struct("<8s13I4xQQQQII64s")
CRC = struct.Struct("<I")

T = TypeVar("T")


class WireError(Exception):
    """Bytes that this version cannot read, or a value that does not fit into them."""


class VersionError(WireError):
    """A segment of another wire version."""


class Header(NamedTuple):
    """The fixed header. Sizes and offsets are in bytes, `created_ns` is CLOCK_MONOTONIC."""

    magic: bytes
    version: int
    header_size: int
    slot_size: int
    slots: int
    capacity: int
    names_at: int
    names_size: int
    status_at: int
    status_size: int
    commands_at: int
    letters_at: int
    letter_size: int
    letter_slots: int
    file_size: int
    pid: int
    start_ticks: int  # field 22 of /proc/<pid>/stat, 0 where there is none: pids are reused
    created_ns: int
    rank: int
    world_size: int
    run: bytes  # UTF-8, up to 64


def header_fields(slots: int, capacity: int) -> tuple[int, ...]:
    """Return the fields of `Header` from `version` to `file_size`.

    Raises:
        WireError: fewer than 2 slots, or a capacity outside 1..128.
    """
    if slots < 2 or not 1 <= capacity <= MAX_CAPACITY:
        raise WireError(f"{slots} slots of {capacity} values: at least 2 of 1..{MAX_CAPACITY}")
    slot_size = -(-(SLOT_HEAD.size + 8 * capacity) // 64) * 64  # whole cache lines
    return (
        VERSION,
        HEADER_SIZE,
        slot_size,
        slots,
        capacity,
        NAMES_AT,
        NAMES_SIZE,
        STATUS_AT,
        STATUS_SIZE,
        COMMANDS_AT,
        LETTERS_AT,
        LETTER_SIZE,
        LETTER_SLOTS,
        HEADER_SIZE + slot_size * slots,
    )


def pack_header(header: Header) -> bytes:
    """Return the first `FIXED_SIZE` bytes of a segment.

    Raises:
        WireError: a run id over 64 bytes, or a number that is negative or too large.
    """
    if len(header.run) > 64:
        raise WireError(f"run id of {len(header.run)} bytes, but the header has room for 64")
    try:
        raw = _HEADER.pack(*header).ljust(FIXED_SIZE - CRC.size, b"\0")
    except struct.error as error:
        raise WireError(f"no header for rank {header.rank}: {error}") from error
    return raw + CRC.pack(zlib.crc32(raw))


def unpack_header(raw: bytes) -> Header:
    """Read the first `FIXED_SIZE` bytes of a file.

    Raises:
        WireError: short, another magic, another wire version, or damaged; one sentence each.
    """
    if len(raw) < FIXED_SIZE:
        raise WireError(f"holds {len(raw)} bytes, fewer than a segment's header")
    if raw[:8] != MAGIC:
        raise WireError(f"is not a probe segment: it starts with {raw[:8]!r}, not {MAGIC!r}")
    (version,) = CRC.unpack_from(raw, 8)
    if version != VERSION:
        raise VersionError(f"has wire version {version}, this supervisor reads version {VERSION}")
    (crc,) = CRC.unpack_from(raw, FIXED_SIZE - CRC.size)
    if crc != zlib.crc32(raw[: FIXED_SIZE - CRC.size]):
        raise WireError("has a damaged header: its checksum does not match")
    header = Header._make(_HEADER.unpack_from(raw))
    if header[1:15] != header_fields(header.slots, header.capacity):
        raise WireError("describes a layout that its wire version does not have")
    return header


class Slot(NamedTuple):
    """One frame. `at_ns` is CLOCK_MONOTONIC of the probe; a value that is absent is None."""

    step: int
    attempt: int
    at_ns: int
    values: tuple[Optional[float], ...]


def unpack_slot(raw: bytes) -> Optional[tuple[int, Optional[Slot]]]:
    """Decode one frame slot, copied out of the segment before the call.

    Returns:
        `(seq, slot)`; `(-1, None)` if it was never written; None if the writer was inside it, or
        it is damaged.
    """
    crc, count, seq, step, attempt, _flags, at_ns, low, high = SLOT_HEAD.unpack_from(raw)
    if crc == count == seq == at_ns == 0:
        return -1, None
    size = SLOT_HEAD.size + 8 * count
    if size > len(raw) or crc != zlib.crc32(raw[4:size], seq):
        return None
    values = struct.unpack_from(f"<{count}d", raw, SLOT_HEAD.size)
    present = low | high << 64
    if present != (1 << count) - 1:
        row: list[Optional[float]] = list(values)
        for place in _absent(present, count):
            row[place] = None
        return seq, Slot(step, attempt, at_ns, tuple(row))
    return seq, Slot(step, attempt, at_ns, values)


@lru_cache(maxsize=256)  # what is absent comes in a few patterns
def _absent(present: int, count: int) -> tuple[int, ...]:
    return tuple(place for place in range(count) if not present >> place & 1)


def pack_letter(seq: int, payload: bytes) -> bytes:
    """Return the bytes of one letter; `payload` is JSON, its length is the caller's affair."""
    body = LETTER_HEAD.pack(0, len(payload), seq)[4:] + payload
    return CRC.pack(zlib.crc32(body, seq)) + body


def unpack_letter(raw: bytes) -> Optional[tuple[int, Optional[bytes]]]:
    """Decode one letter and what lies behind it; the answers are those of `unpack_slot`."""
    crc, length, seq = LETTER_HEAD.unpack_from(raw)
    if crc == length == seq == 0:
        return -1, None
    size = LETTER_HEAD.size + length
    if size > len(raw) or crc != zlib.crc32(raw[4:size], seq):
        return None
    return seq, raw[LETTER_HEAD.size : size]


class Ring(Generic[T]):
    """Reads one overwrite-oldest ring and accounts for every number exactly once.

    Args:
        slots: length of the ring.
        read: returns the bytes of the slot at an index.
        unpack: `unpack_slot` or `unpack_letter`.

    Attributes:
        next: the first number not yet accounted for.
    """

    def __init__(
        self,
        slots: int,
        read: Callable[[int], bytes],
        unpack: Callable[[bytes], Optional[tuple[int, Optional[T]]]],
    ) -> None:
        self.next = 0
        self._slots = slots
        self._read = read
        self._unpack = unpack
        self._tries = 0

    def read_until(self, head: int, limit: int) -> list[tuple[int, int, Optional[T]]]:
        """Return what lies between `next` and `head`, after at most `limit` reads.

        Args:
            head: the writer's count, a hint: one that is damaged or half-read loses nothing.

        Returns:
            In order, `(seq, 0, item)` for an item and `(first_seq, count, None)` for `count`
            numbers that were overwritten before they could be read. A slot that is being written
            ends the list, and is read again by the next call.
        """
        letters: list[tuple[int, int, Optional[T]]] = []
        for _ in range(limit):
            if self.next >= head:
                break
            letter = self._unpack(self._read(self.next % self._slots))
            ahead = -1 if letter is None else letter[0] - self.next
            if letter is not None and ahead == 0:
                letters.append((self.next, 0, letter[1]))
                self.next += 1
                self._tries = 0
                continue
            if ahead > 0 and ahead % self._slots == 0:  # overtaken: the oldest left is a lap behind
                lost = ahead - self._slots + 1
                self._tries = 0
            else:
                self._tries += 1
                if self._tries < PATIENCE or not self._was_written(head - 1):
                    break
                lost = 1
            if letters and letters[-1][1]:
                letters[-1] = (letters[-1][0], letters[-1][1] + lost, None)
            else:
                letters.append((self.next, lost, None))
            self.next += lost
        return letters

    def _was_written(self, seq: int) -> bool:
        letter = self._unpack(self._read(seq % self._slots))
        return letter is not None and letter[0] >= seq


def read_checked_word(raw: Any, offset: int) -> Optional[int]:
    """Return the checked word at `at`, or None if it is half-written or damaged.

    It is stored twice, the second time inverted, since an 8-byte copy may be torn.
    """
    value, inverted = CHECKED.unpack_from(raw, offset)
    return value if value ^ inverted == ALL_ONES else None


class Collective(NamedTuple):
    """The newest collective that a rank has called. `number` counts them from 1."""

    number: int
    name: str
    inside: bool  # it has not returned


def pack_collective(number: int, index: int, inside: bool) -> int:
    """Return the word of a collective; `index` is into `COLLECTIVES`."""
    return number << 9 | index << 1 | inside


def unpack_collective(packed: int) -> Optional[Collective]:
    """Decode the word at `COLLECTIVE_AT`; None before the first one, or for a name not known."""
    number, index = packed >> 9, packed >> 1 & 0xFF
    if number == 0 or index >= len(COLLECTIVES):
        return None
    return Collective(number, COLLECTIVES[index], bool(packed & 1))


def from_json(raw: bytes) -> Any:
    """Decode JSON.

    Raises:
        WireError: it is none.
    """
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"is not JSON: {error}") from error
