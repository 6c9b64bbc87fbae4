"""One rank's segment from inside the job: writes frames and answers, reads commands.

Rules that `Writer` keeps: the file is complete before it gets its name; its space is allocated
before it is mapped, since a hole in a full /dev/shm would kill the job with SIGBUS; a frame is
published with no system call and no lock; nothing here waits for the supervisor. After a fork the
child's copy is inert: the segment belongs to the process that made it. Call it from the training
thread, except `write_heartbeat`, which any thread may call.

`Mailbox` hands a command out once. Whoever carries it out answers with `ack`; the answer is
remembered by the command's key, so that a supervisor which asks again, after a crash or out of
impatience, gets the same answer and changes nothing twice. It knows no verb.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import sys
import time
import weakref
import zlib
from operator import is_
from threading import RLock
from typing import Any, Callable, Collection, Mapping, NamedTuple, Optional, Sequence

from .. import wire
from ..runtime import files
from ..wire import WireError


def to_json(document: Any, limit: int, *, essential: Optional[Collection[str]] = ()) -> bytes:
    """Encode `document` in at most `limit` bytes, with long strings and lists clipped if need be.

    Args:
        document: JSON-ready; what is not is written as its `str`.
        limit: bytes of UTF-8.
        essential: keys of a dict whose values must not be clipped; None: clip nothing.

    Raises:
        WireError: it is not JSON, or does not fit even when clipped.
    """
    sizes = ((0, 0),) if essential is None else ((0, 0), (240, 16), (80, 6), (24, 2))
    try:
        for chars, items in sizes:
            fitted = document
            if chars and isinstance(document, dict):
                fitted = {
                    key: value if key in (essential or ()) else _clip(value, chars, items)
                    for key, value in document.items()
                }
            text = json.dumps(fitted, ensure_ascii=False, separators=(",", ":"), default=str)
            raw = text.encode("utf-8", "replace")  # a lone surrogate must not stop a letter
            if len(raw) <= limit:
                return raw
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"cannot be written as JSON: {error}") from error
    raise WireError(f"takes {len(raw)} bytes, but there is room for {limit}")


def _clip(value: Any, chars: int, items: int) -> Any:
    if isinstance(value, str) and len(value) > chars:
        return value[: chars - 1] + "…"
    if isinstance(value, dict):
        return {key: _clip(inner, chars, items) for key, inner in value.items()}
    if isinstance(value, (list, tuple)) and len(value) > items:
        return [_clip(v, chars, items) for v in value[:items]] + [f"… {len(value) - items} more"]
    return value


LAST_WORDS_CHARS = 512
PROGRAMS = 1000  # segments of one rank and pid
PATTERNS = 64  # of absent values, that are remembered
_HEAD = wire.HEAD_AT // 8
_COMMANDS_HEAD = wire.COMMANDS_HEAD_AT // 8
_BOUNDARY = wire.BOUNDARY_AT // 8
_pack_checked = wire.CHECKED.pack_into
_UNPACKABLE = (struct.error, OverflowError, TypeError, IndexError)
_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


class Writer:
    """The probe's end of a segment; make one with `create`. After `close` every call is a no-op."""

    def __init__(self, path: str, header: wire.Header, memory: mmap.mmap) -> None:
        self.path = path
        self.capacity = header.capacity
        self._map = memory
        self._words = memoryview(memory).cast("Q")
        self._slots = header.slots
        self._slot_size = header.slot_size
        self._first_slot = header.header_size
        self._scratch = bytearray(header.slot_size)
        self._crc = memoryview(self._scratch).cast("I")
        self._closed = False
        self._lock = RLock()
        self._seq = self._letters = self._generation = self._status_seq = 0
        self._at_lease = self._at_tight = self._at_keep = 0
        self._at_spare = self._at_spare_until = 0
        self._names: list[str] = []
        self._expect(0)
        # Takes nothing before there are names.
        self._pack: Callable[..., None] = struct.Struct("").pack_into
        _writers.add(self)

    @classmethod
    def create(
        cls,
        directory: str,
        run: str,
        rank: int,
        world_size: int,
        slots: int = 8192,
        capacity: int = 64,
    ) -> Writer:
        """Allocate `<directory>/rank-<rank>.<pid>.seg`, mode 0600, about 0.6 KB per slot of 64.

        Where there is one already, `.<n>` stands behind the pid: a program that replaced itself
        by `exec` keeps its pid, and the first process of every container has the same.

        Raises:
            OSError: no space (ENOSPC), or no directory; no file is left behind.
            WireError: slots, capacity, run id or rank that no segment can have.
        """
        if sys.byteorder != "little":
            raise wire.WireError("the wire format is little-endian, this machine is not")
        pid = os.getpid()
        created_ns = time.monotonic_ns()
        header = wire.Header._make(
            (
                wire.MAGIC,
                *wire.header_fields(slots, capacity),
                pid,
                _start_ticks(),
                created_ns,
                rank,
                world_size,
                run.encode("utf-8", "replace"),
            )
        )
        packed = wire.pack_header(header)
        files.require_own_directory(directory)
        fresh = os.path.join(directory, f".rank-{rank}.{pid}.{files.random_token()}")
        descriptor = files.create_file(fresh)
        try:
            os.posix_fallocate(descriptor, 0, header.file_size)
            # Mapped with its pages where Python knows how (3.10): no page fault in a later step.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            memory = mmap.mmap(descriptor, header.file_size, flags=flags)
            memory[: len(packed)] = packed
            writer = cls(fresh, header, memory)
            writer.write_heartbeat(created_ns, wire.PHASES.index("startup"))
            writer.path = _link(fresh, os.path.join(directory, f"rank-{rank}.{pid}"))
        finally:
            os.close(descriptor)
            os.unlink(fresh)
        return writer

    @property
    def frames(self) -> int:
        """Return how many frames were published."""
        return self._seq

    def announce(self, names: Sequence[str]) -> None:
        """Say which metrics `publish` gets, in order. Late names are added at the end.

        Raises:
            WireError: too many names, one of them twice, or earlier ones moved; nothing changed.
        """
        if self._closed:
            return
        names = list(names)
        if len(names) > self.capacity:
            raise wire.WireError(f"{len(names)} metrics, but a slot has room for {self.capacity}")
        if len(set(names)) < len(names) or names[: len(self._names)] != self._names:
            raise wire.WireError("late names go behind those announced before, each of them once")
        raw = to_json(names, wire.NAMES_SIZE - wire.LETTER_HEAD.size, essential=None)
        self._generation += 1
        offset = wire.NAMES_AT + (self._generation & 1) * wire.NAMES_SIZE
        self._store(offset, wire.pack_letter(self._generation, raw))
        self._words[wire.NAMES_GENERATION_AT // 8] = self._generation
        self._names = names
        self._expect(len(names))

    def publish(
        self, step: int, attempt: int, values: Sequence[Optional[float]], at_ns: int
    ) -> None:
        """Publish the frame of one optimizer step: about a microsecond, no system call.

        Args:
            step: 0-based attempted optimizer step.
            attempt: rollback epoch, from 0.
            values: one per announced name, in its unit; None is absent, NaN is a value.
            at_ns: CLOCK_MONOTONIC in nanoseconds.

        Raises:
            WireError: not one number or None per announced name; nothing is published.
        """
        if self._closed:
            return
        seq = self._seq
        try:
            row = self._fill(values) if self._absent else values
            self._pack_row(step, attempt, at_ns, row)
        except _UNPACKABLE:
            row = self._learn(values)
            try:
                self._pack_row(step, attempt, at_ns, row)
            except _UNPACKABLE as error:
                raise wire.WireError(f"step {step} cannot be published: {error}") from error
        self._crc[0] = zlib.crc32(self._body, seq)
        offset = self._first_slot + seq % self._slots * self._slot_size
        self._map[offset : offset + self._size] = self._head
        self._seq = seq = seq + 1
        self._words[_HEAD] = seq

    def _pack_row(
        self, step: int, attempt: int, at_ns: int, row: Sequence[Optional[float]]
    ) -> None:
        head = (0, 0, self._count, self._seq, step, attempt, 0, at_ns, self._low, self._high)
        self._pack(self._scratch, *head, *row)

    def _fill(self, values: Sequence[Optional[float]]) -> Sequence[Optional[float]]:
        # What is absent changes from frame to frame, but comes in a few patterns.
        known = self._patterns.get(bytes(map(is_, values, self._nothing)))
        if known is None:
            return self._learn(values)
        self._low, self._high, absent = known
        row = list(values)
        for place in absent:
            row[place] = 0.0
        return row

    def _learn(self, values: Sequence[Optional[float]]) -> Sequence[Optional[float]]:
        if len(values) != self._count or not self._generation:
            raise wire.WireError(f"{len(values)} values for {self._count} announced metrics")
        pattern = bytes(value is None for value in values)
        absent = sum(1 << index for index, missing in enumerate(pattern) if missing)
        present = (1 << self._count) - 1 - absent
        self._absent = bool(absent)
        self._low, self._high = present & wire.ALL_ONES, present >> 64
        if len(self._patterns) >= PATTERNS:
            self._patterns.clear()
        places = tuple(place for place, missing in enumerate(pattern) if missing)
        self._patterns[pattern] = self._low, self._high, places
        return [0.0 if value is None else value for value in values]

    def write_heartbeat(self, at_ns: int, phase: int) -> None:
        """Say that the job lives; `phase` is an index into `wire.PHASES`."""
        if self._closed:
            return
        word = at_ns & -8 | phase
        _pack_checked(self._map, wire.BEAT_AT, word, word ^ wire.ALL_ONES)

    def write_collective(self, number: int, index: int, inside: bool) -> None:
        """Say which collective the training thread is in, or was in last: 0.3 us."""
        if self._closed:
            return
        packed = wire.pack_collective(number, index, inside)
        _pack_checked(self._map, wire.COLLECTIVE_AT, packed, packed ^ wire.ALL_ONES)

    def newest_heartbeat_ns(self) -> int:
        """Return when the newest beat was."""
        return self._checked(wire.BEAT_AT, 0) & -8

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace the status, a JSON object of about 4 KB; longer strings and lists are clipped.

        Raises:
            WireError: it is not JSON or does not fit; the old one stays.
        """
        if self._closed:
            return
        raw = to_json(status, wire.STATUS_SIZE - wire.LETTER_HEAD.size)
        self._status_seq += 1
        offset = wire.STATUS_AT + (self._status_seq & 1) * wire.STATUS_SIZE
        self._store(offset, wire.pack_letter(self._status_seq, raw))
        self._words[wire.STATUS_GENERATION_AT // 8] = self._status_seq

    def write_end(self, returncode: Optional[int], text: str) -> None:
        """Record how the job ended, for a supervisor that cannot reap it; the last call counts."""
        if self._closed:
            return
        end = {"returncode": returncode, "text": text[:LAST_WORDS_CHARS]}
        raw = to_json(end, wire.END_SIZE - wire.LETTER_HEAD.size)
        self._store(wire.END_AT, wire.pack_letter(1, raw))

    def post(self, payload: bytes) -> None:
        """Send one letter of at most `wire.LETTER_ROOM` bytes to the supervisor."""
        if self._closed:
            return
        with self._lock:  # re-entered by signal handlers, hence numbered before it is written
            seq = self._letters
            self._letters = seq + 1
            offset = wire.LETTERS_AT + seq % wire.LETTER_SLOTS * wire.LETTER_SIZE
            self._store(offset, wire.pack_letter(seq, payload))
            self._words[wire.LETTERS_HEAD_AT // 8] = self._letters

    def mark_boundary(self, steps: int) -> None:
        """Say that so many steps have ended; commands are looked for right after it."""
        if not self._closed:
            self._words[_BOUNDARY] = steps

    def commands_head(self) -> int:
        """Return how many commands the supervisor has sent: one 8-byte read."""
        return 0 if self._closed else self._words[_COMMANDS_HEAD]

    def command_slot(self, index: int) -> bytes:
        """Return a copy of one slot of the ring of commands."""
        offset = wire.COMMANDS_AT + index * wire.LETTER_SIZE
        return self._map[offset : offset + wire.LETTER_SIZE]

    def lease_until_ns(self) -> int:
        """Return until when a pause may last (CLOCK_MONOTONIC), 0 if none was ever granted."""
        self._at_lease = self._checked(wire.LEASE_AT, self._at_lease)
        return self._at_lease

    def dense_sampling_until_ns(self) -> int:
        """Return until when samples are to be denser (CLOCK_MONOTONIC), 0 if never asked for."""
        self._at_tight = self._checked(wire.TIGHT_AT, self._at_tight)
        return self._at_tight

    def signals_deferred_until_ns(self) -> int:
        """Return until when a signal waits for the supervisor (CLOCK_MONOTONIC), 0 for never."""
        self._at_keep = self._checked(wire.KEEP_AT, self._at_keep)
        return self._at_keep

    def savepoint_retention_bound(self, now_ns: int) -> int:
        """Return the step before which the newest savepoint is to stay, 0 for none."""
        self._at_spare = self._checked(wire.SPARE_AT, self._at_spare)
        until_at = wire.SPARE_AT + wire.CHECKED.size
        self._at_spare_until = self._checked(until_at, self._at_spare_until)
        return self._at_spare if self._at_spare_until > now_ns else 0

    def close(self) -> None:
        """Unmap the segment; the file stays for the supervisor, who removes it. Safe to repeat."""
        self._closed = True
        self._words.release()
        self._map.close()

    def _checked(self, offset: int, end: int) -> int:
        sequence = None if self._closed else wire.read_checked_word(self._map, offset)
        return end if sequence is None else sequence

    def _store(self, offset: int, raw: bytes) -> None:
        self._map[offset : offset + len(raw)] = raw

    def _expect(self, count: int) -> None:
        packer = struct.Struct(f"@IIQQIIQQQ{count}d")
        present = (1 << count) - 1
        self._pack = packer.pack_into
        self._count = count
        self._size = packer.size
        self._head = memoryview(self._scratch)[: packer.size]
        self._body = self._head[4:]
        self._absent = False  # whether any value of the newest frame was
        self._nothing = [None] * count
        # By what is absent: what is present, a bit each, and the places of the others.
        self._patterns: dict[bytes, tuple[int, int, tuple[int, ...]]] = {}
        self._low, self._high = present & wire.ALL_ONES, present >> 64


def _link(fresh: str, stem: str) -> str:
    """Give the file its name; never that of another one, as a rename would."""
    for number in range(PROGRAMS):
        path = f"{stem}.{number}.seg" if number else f"{stem}.seg"
        try:
            os.link(fresh, path)
            return path
        except FileExistsError:
            pass
    raise OSError(errno.EEXIST, f"{PROGRAMS} programs with one pid are enough", stem)


def _start_ticks() -> int:
    """Return when this process began, in clock ticks since boot; 0 where /proc does not say."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _forget_in_child() -> None:
    for writer in _writers:
        writer._closed = True


os.register_at_fork(after_in_child=_forget_in_child)

KEPT_KEYS = 4 * wire.LETTER_SLOTS  # more than the ring can ever hold at once


class Command(NamedTuple):
    """One order. `id` counts letters, `key` is the supervisor's: the same order, the same key."""

    id: int
    key: str
    verb: str
    args: dict[str, Any]


class Mailbox:
    """The probe's end of both letter rings.

    Attributes:
        bad: commands that were overwritten before they were read, or could not be read.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._commands: wire.Ring[bytes] = wire.Ring(
            wire.LETTER_SLOTS, writer.command_slot, wire.unpack_letter
        )
        self._answers: dict[str, Optional[bytes]] = {}  # None while it is being carried out
        self.bad = 0

    def poll(self) -> list[Command]:
        """Return the commands that have come; one 8-byte read when there are none."""
        head = self._writer.commands_head()
        if head == self._commands.next:
            return []
        commands = []
        for seq, lost, raw in self._commands.read_until(head, wire.LETTER_SLOTS):
            command = None if raw is None else _command(seq, raw)
            if command is None:
                self.bad += lost or 1
            elif command.key not in self._answers:
                self._remember(command.key)
                commands.append(command)
            else:
                answer = self._answers[command.key]
                if answer is not None:
                    self._writer.post(answer)
        return commands

    def mark_boundary(self, steps: int) -> None:
        """Say that so many steps have ended: a command sent from now on is met one step later."""
        self._writer.mark_boundary(steps)

    def ack(
        self,
        command: Command,
        step: int,
        ok: bool,
        result: Mapping[str, Any],
        error: Optional[str] = None,
    ) -> None:
        """Answer a command: what was observed, or why it was refused. Long results are clipped."""
        answer = _fit(
            {"ack": command.key, "verb": command.verb, "step": step, "ok": ok, "error": error},
            "result",
            result,
        )
        self._answers[command.key] = answer
        self._writer.post(answer)

    def resend_answer(self, key: str) -> bool:
        """Send the answer to a command once more; False: there is none yet."""
        answer = self._answers.get(key)
        if answer is not None:
            self._writer.post(answer)
        return answer is not None

    def send_notice(
        self, kind: str, message: str, step: int, data: Optional[Mapping[str, Any]] = None
    ) -> None:
        """Report something about the watching itself; see `Notice` for the kinds."""
        letter = {"notice": kind, "message": message, "step": step, "frame": self._writer.frames}
        self._writer.post(_fit(letter, "data", data or {}))

    def _remember(self, key: str) -> None:
        if len(self._answers) >= KEPT_KEYS:
            answered = (old for old, answer in self._answers.items() if answer is not None)
            oldest = next(answered, None)
            if oldest is not None:
                del self._answers[oldest]
        self._answers[key] = None


def _command(seq: int, raw: bytes) -> Optional[Command]:
    try:
        letter = wire.from_json(raw)
        command = Command(seq, letter["key"], letter["verb"], letter["args"])
    except (wire.WireError, KeyError, TypeError):
        return None
    is_command = isinstance(command.key, str) and isinstance(command.verb, str)
    return command if is_command and isinstance(command.args, dict) else None


def _fit(letter: dict[str, Any], field: str, detail: Mapping[str, Any]) -> bytes:
    essential = ("ack", "verb", "notice")
    try:
        return to_json({**letter, field: dict(detail)}, wire.LETTER_ROOM, essential=essential)
    except wire.WireError as error:
        # That there is an answer matters more than its detail.
        left_out = {field: {"left_out": str(error)}}
        return to_json({**letter, **left_out}, wire.LETTER_ROOM, essential=essential)
