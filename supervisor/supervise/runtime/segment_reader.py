"""Reads one rank's segment and turns it into events; sends it commands.

Reading changes nothing in the file, so any number of readers may look at once; `write_heartbeat`,
`lease`, `sample_densely`, `spare` and `send` write, and only the supervisor calls them. The file is
read with `pread` and never mapped: one that is truncated meanwhile is a short read, where a mapping
would be SIGBUS and the end of the supervisor.

Checksums detect damage by chance. Data with a good checksum and no sense comes from a broken probe,
or from a process that writes into the segment: numbers that no training has, and messages of
another shape. They are refused here, so the engine and the journal never see them. What a gap, a
fault or a silent rank means is decided by the engine.

The segment also has the end of the job as its own processes recorded it, for a supervisor that
cannot reap it.
"""

from __future__ import annotations

import heapq
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeGuard

from msgspec import Struct, field

from supervise_probe import wire

from ..core.model.events import Announced, Beat, Event, Frame, Gap, Notice
from ..core.model.payload import NOTHING, Payload
from ..errors import SegmentError
from ..store import files

MAX_RANKS = 1 << 24
MAX_PID = 1 << 31
MAX_NS = 1 << 61  # 73 years since the machine was started
MAX_STEP = 1 << 53
MAX_ATTEMPT = 1 << 31
MAX_NAMES = 4096
AHEAD_NS = 3600 * 10**9  # a frame's time is that of this machine's own clock
MAX_INT = 1 << 63
MAX_DEPTH = 16
MAX_CODE = 1 << 31

ACK = {"ack": str, "verb": str, "step": int, "ok": bool, "result": dict, "error": str | None}
# `frame`: how many frames were published before it.
NOTICE = {"notice": str, "message": str, "step": int | None, "frame": int, "data": dict}

# Kinds of notices that only the supervisor itself may give.
OWN = frozenset(
    (
        "checkpoint",
        "checkpoint-choice",
        "checkpoint-search",
        "no-probe",
        "preempt",
        "probe-off",
        "segment-fault",
        "signal",
        "suspended",
    )
)
_NUMBER = int | float | None
_WAS = {"was": _NUMBER, "is": _NUMBER}
_STAMP = dict.fromkeys(("size", "mtime_ns", "inode", "device"), int)
# What the supervisor reads of a notice's data, by its kind; each key may be missing. A mapping
# stands for an object of that shape, of which the first key decides whether it is there.
_TOLD = {
    "step": int,
    "ok": bool,
    "loss": _WAS,
    "lr": _WAS,
    "fingerprint": str,
    "probe_batch": {"verdict": str},
}
DATA: dict[str, dict[str, Any]] = {
    "continuity": _TOLD,
    "resume-refused": _TOLD,
    "measurement-changed": {"metrics": list},
    "wiring": {"metric": str, "names": list, "count": int, "total": int, "made": str},
    "collector-off": {"metrics": list},
    "drill": {"fault": str, "refused": str},
    "weights-restored": {"attempt": int, "to": int},
    "training-ended": {"done": int, "total": int, "stopped": bool},
    "checkpoint-saved": {
        "path": str,
        "file": _STAMP,
        "seconds": _NUMBER,
        "attempt": int,
        "how": str,
        "ranks": int,
        "python": str | None,
        "probe_batch": dict | None,
        "evaluation": dict | None,
        "counters": dict,
    },
}
# What is reckoned with of an ack's result, and what an ack of a verb that was done must hold.
RESULT = {
    **dict.fromkeys(("attempt", "step", "seen_attempt", "ack_step"), int),
    **dict.fromkeys(("loss_scale", "backoff"), int | float),
    **dict.fromkeys(("clip_bound", "rate_limit"), _NUMBER),
}
NEEDED = {"rollback": ("attempt", "step"), "loss_scale": ("loss_scale",), "clip": ("clip_bound",)}


def check_header(header: wire.Header) -> str | None:
    """Return what of a segment's header cannot be, None when it is sound."""
    limits = {
        "rank": MAX_RANKS,
        "world_size": MAX_RANKS + 1,
        "pid": MAX_PID,
        "start_ticks": MAX_NS,
        "created_ns": MAX_NS,
    }
    for name, limit in limits.items():
        value = getattr(header, name)
        if value >= limit:
            return f"has a header that is out of range: {name} {value}"
    return None


def check_slot(slot: wire.Slot, now_ns: int) -> str | None:
    """Return what of a frame cannot be, None when it is sound."""
    limits = {"step": MAX_STEP, "attempt": MAX_ATTEMPT, "at_ns": now_ns + AHEAD_NS}
    for name, limit in limits.items():
        value = getattr(slot, name)
        if value >= limit:
            return f"{name} {value}"
    return None


def is_metric_name_table(value: Any) -> TypeGuard[list[str]]:
    """Return whether that is a table of metric names."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_NAMES
        and all(isinstance(name, str) and _encodes(name) for name in value)
    )


def valid_returncode(value: Any) -> int | None:
    """Return the returncode that a job has told, None where it is none."""
    return value if type(value) is int and -MAX_CODE < value < MAX_CODE else None


def is_mailbox_message(value: Any, shape: Mapping[str, Any]) -> TypeGuard[dict[str, Any]]:
    """Return whether a letter has that shape, `ACK` or `NOTICE`, and can be kept and shown."""
    if not isinstance(value, dict) or value.keys() != shape.keys():
        return False
    if not all(_is(value[key], kind) for key, kind in shape.items()) or not is_bounded(value):
        return False
    if value["step"] is not None and not -1 <= value["step"] < MAX_STEP:
        return False
    if shape is ACK:
        return _answers(value)
    if not 0 <= value["frame"] < MAX_STEP:
        return False
    kind = value["notice"]
    return kind not in OWN and _has_shape(value["data"], DATA.get(kind, {}))


def is_bounded(value: Any) -> bool:
    """Return whether JSON is no deeper, and its numbers and texts are no odder, than ours are."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str):
                if not _encodes(item):
                    return False
            elif isinstance(item, int) and not -MAX_INT <= item < MAX_INT:
                return False
        if not inner:
            return True
        level = inner
    return False


def _encodes(text: str) -> bool:
    """Whether a text is Unicode: JSON can hold half of a surrogate pair, which nobody can print."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; a boolean is no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind)


def _has_shape(data: Mapping[str, Any], shape: Mapping[str, Any]) -> bool:
    for key, kind in shape.items():
        if key not in data:
            continue
        value = data[key]
        if not isinstance(kind, Mapping):
            if not _is(value, kind):
                return False
        elif value is not None and value != {}:
            is_complete = kind is not _STAMP or (
                isinstance(value, dict) and kind.keys() <= value.keys()
            )
            if not is_complete or not isinstance(value, dict) or not _has_shape(value, kind):
                return False
    return True


def _answers(ack: Mapping[str, Any]) -> bool:
    """Whether the numbers of an ack that the engine reckons with are there, and are numbers."""
    result = ack["result"]
    if not all(_is(result[key], kind) for key, kind in RESULT.items() if key in result):
        return False
    needed = NEEDED.get(ack["verb"], ()) if ack["ok"] else ()
    return all(key in result for key in needed)


_COUNTERS_SIZE = wire.END_AT  # the fixed header and all counters, in one read
FAULTY_HINT = "the probe is broken, or somebody else writes there: this rank is not watched"
_VERSION_HINT = "the job runs the probe of another release; start both from the same installation"


class SegmentFile:
    """An open segment whose header is whole; every method raises SegmentError once it is not.

    Attributes:
        header: the fixed header, as the probe wrote it at its start.
    """

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            SegmentError: it cannot be opened, or is short, foreign, damaged or of another version.
        """
        self.path = path
        self._size = _COUNTERS_SIZE
        self._writing = threading.Lock()  # a pause is renewed by a thread of its own
        try:
            self._fd = files.open_file(path, os.O_RDWR)
        except OSError as error:
            raise self.fault(f"cannot be opened: {error.strerror}") from error
        try:
            self._fixed = os.pread(self._fd, wire.FIXED_SIZE, 0)
            self.header = self._unpack_header()
            self._size = self.header.file_size
            self._check_size()
            if (odd := check_header(self.header)) is not None:
                raise self.fault(odd, FAULTY_HINT)
        except BaseException:
            self.close()
            raise

    def counters(self) -> bytes:
        """Return the fixed header and all counters; the offsets are those of `wire`."""
        self._check_size()
        counters = self.read(0, _COUNTERS_SIZE)
        if not counters.startswith(self._fixed):
            raise self.fault("had its header overwritten")
        return counters

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes at offset `at`."""
        try:
            raw = os.pread(self._fd, size, offset)
        except OSError as error:
            raise self.fault(f"cannot be read: {error.strerror}") from error
        if len(raw) < size:
            raise self.fault(f"is short: {len(raw)} of {size} bytes at offset {offset}")
        return raw

    def write(self, offset: int, raw: bytes) -> None:
        """Write `raw` at offset `at`; never makes the file longer."""
        with self._writing:  # or it would go to what has the number of a closed file by then
            self._check_size()
            try:
                os.pwrite(self._fd, raw, offset)
            except OSError as error:
                raise self.fault(f"cannot be written: {error.strerror}") from error

    def write_checked(self, offset: int, *counters: int) -> None:
        """Write checked words, one after the other."""
        pairs = (wire.CHECKED.pack(word, word ^ wire.ALL_ONES) for word in counters)
        self.write(offset, b"".join(pairs))

    def document(self, offset: int, size: int) -> tuple[int, Any]:
        """Return `(generation, JSON value)` of the names or status area; 0 while there is none.

        The newer of its two halves counts, or the other while that is half-written or damaged.
        """
        halves = [wire.unpack_letter(self.read(offset + half * size, size)) for half in (0, 1)]
        valid = [(seq, raw) for seq, raw in filter(None, halves) if raw is not None]
        generation, raw = max(valid, default=(0, b""))
        return generation, parse_json(raw)

    def close(self) -> None:
        """Let go of the file; safe to repeat."""
        with self._writing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def fault(self, fault_text: str, hint: str | None = None) -> SegmentError:
        """Return the error that says `what` about this segment."""
        return SegmentError(f"segment {self.path.name} {fault_text}", hint=hint)

    def _check_size(self) -> None:
        try:
            size = os.fstat(self._fd).st_size
        except OSError as error:
            raise self.fault(f"cannot be read: {error.strerror}") from error
        if size < self._size:
            raise self.fault(f"was cut short: {size} of {self._size} bytes are left")

    def _unpack_header(self) -> wire.Header:
        try:
            return wire.unpack_header(self._fixed)
        except wire.VersionError as error:
            raise self.fault(str(error), _VERSION_HINT) from error
        except wire.WireError as error:
            raise self.fault(str(error)) from error


def parse_json(raw: bytes) -> Any:
    """Return the JSON value in `raw`, None if there is none."""
    try:
        return wire.from_json(raw)
    except wire.WireError:
        return None


def read_u64(counters: bytes, offset: int) -> int:
    """Return the number at offset `at` of `SegmentFile.counters()`."""
    return int.from_bytes(counters[offset : offset + 8], "little")


_STEP_TIMES = 31  # enough for a median that one slow step does not move


@dataclass(frozen=True, slots=True)
class Ack:
    """A probe's answer to a command. `result` holds what was observed; `error` why it refused."""

    key: str
    verb: str
    step: int
    ok: bool
    result: Payload
    error: str | None


class ProbeStatus(Struct, frozen=True, kw_only=True):
    """The part of a probe's status that the supervisor uses; the keys of the probe's `_describe`.

    Attributes:
        trained_by: the training library, "" for none.
        unavailable: why no rollback or checkpoint is possible, or a safeguard cannot act, by name.
        savepoints: their steps.
        shards: number of a shard -> its name.
    """

    trained_by: str = field(default="", name="library")
    planned_steps: int | None = None
    unavailable: dict[str, str] = {}
    paused: bool | None = None
    savepoints: list[int] = []
    kept_signals: list[str] = []
    shards: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class RankView:
    """The state of a rank: its process, phase, last sign of life, status and newest collective."""

    pid: int
    phase: str | None = None
    seen_ns: int = 0
    document: Payload = NOTHING
    collective: wire.Collective | None = None

    @property
    def status(self) -> ProbeStatus:
        """The status that the probe wrote."""
        return self.document.read(ProbeStatus)


class Segment:
    """One rank's segment; make one with `open`.

    Attributes:
        rank, world_size, pid, start_ticks, created_ns: as the probe wrote them at its start.
        again: see `core.model.events.Announced`; to be set before the first poll.
        lived: its process was seen alive when it was found.
        step: of the newest frame, -1 before the first.
    """

    def __init__(self, file: SegmentFile, clock: Callable[[], int]) -> None:
        header = file.header
        self.path = file.path
        self.rank, self.world_size, self.pid = header.rank, header.world_size, header.pid
        self.again = self.lived = False
        self.step = -1
        self.start_ticks = header.start_ticks
        self.created_ns = header.created_ns
        self._file = file
        self._clock = clock
        self._slots, self._slot_size = header.slots, header.slot_size
        self._frames = wire.Ring(header.slots, self._slot, wire.unpack_slot)
        self._letters = wire.Ring(wire.LETTER_SLOTS, self._letter, wire.unpack_letter)
        self._reported = 0  # letters below this number were reported by another reader
        self._held: list[tuple[int, int, wire.Slot | None]] = []  # frames waiting for their names
        self._tries = 0
        self._odd: str | None = None  # what cannot be of the newest frame
        self._names: tuple[str, ...] = ()
        self._generation = 0
        self._status = NOTHING
        self._status_generation = 0
        self._beat = (header.created_ns, wire.PHASES[0])
        self._acks: list[Ack] = []
        self._sent: int | None = None
        self._last: tuple[int, int] | None = None  # seq and time of the newest frame
        self._step_ns: deque[int] = deque(maxlen=_STEP_TIMES)

    @classmethod
    def open(cls, path: Path | str, clock: Callable[[], int]) -> Segment:
        """Open a segment, from the oldest frame that it still holds.

        Args:
            path: the file.
            clock: returns CLOCK_MONOTONIC in nanoseconds.

        Raises:
            SegmentError: it cannot be opened, or is short, foreign, damaged or of another version.
        """
        return cls(SegmentFile(Path(path)), clock)

    def poll(self, limit: int = 1024) -> list[Event]:
        """Return what is new: names, then frames, gaps and notices in the order of the probe.

        A slot that is half-written ends the frames for now; the next call tries it again.

        Args:
            limit: most slots looked at in one call.

        Raises:
            SegmentError: the file was cut short or overwritten; it is of no further use.
        """
        counters = self._file.counters()
        events: list[Event] = []
        self._take_names(counters, events)
        # The frames first: a notice that was read is then never older than a frame that was not.
        frames: list[tuple[int, Event]] = []
        self._take_frames(read_u64(counters, wire.HEAD_AT), limit, frames)
        notices = self._take_letters(read_u64(counters, wire.LETTERS_HEAD_AT))
        events += [event for _, event in heapq.merge(frames, notices, key=itemgetter(0))]
        return events

    def unread(self) -> int:
        """Return how many frames `poll` has not come to.

        Raises:
            SegmentError: as `poll`.
        """
        return max(0, read_u64(self._file.counters(), wire.HEAD_AT) - self._frames.next)

    def resume(self, frames: int, letters: int) -> None:
        """Go on behind another reader, which has told `frames` frames and all notices before the
        letter `letters`.

        Acks are read again, from the oldest letter on: who asked may not have taken them.

        Raises:
            SegmentError: as `poll`.
        """
        head = read_u64(self._file.counters(), wire.LETTERS_HEAD_AT)
        self._frames.next, self._reported = frames, letters
        if frames:  # of a job that is paused no other frame may come
            seq, newest = wire.unpack_slot(self._slot((frames - 1) % self._slots)) or (-1, None)
            if newest is not None and seq == frames - 1:
                self.step = newest.step
        self._letters.next = min(letters, max(0, head - wire.LETTER_SLOTS))

    def beat(self) -> Beat:
        """Return when the probe last ran any hook, and in which phase.

        Raises:
            SegmentError: as `poll`.
        """
        beat_fields = wire.read_checked_word(self._file.counters(), wire.BEAT_AT)
        if beat_fields is not None and beat_fields & 7 < len(wire.PHASES) and beat_fields < MAX_NS:
            self._beat = (beat_fields & ~7, wire.PHASES[beat_fields & 7])
        return Beat(self.rank, *self._beat)

    def collective(self) -> wire.Collective | None:
        """Return the newest collective of the rank, None where it has called none that is seen.

        Raises:
            SegmentError: as `poll`.
        """
        packed = wire.read_checked_word(self._file.counters(), wire.COLLECTIVE_AT)
        return None if packed is None else wire.unpack_collective(packed)

    def boundary(self) -> int:
        """Return the step at whose end the rank last looked for commands, that of its newest frame
        before it has. A frame may wait for a device; this is where the job itself is.

        Raises:
            SegmentError: as `poll`.
        """
        steps = read_u64(self._file.counters(), wire.BOUNDARY_AT)
        return steps - 1 if 0 < steps < MAX_STEP else self.step

    def status(self) -> Payload:
        """Return the newest status that the probe wrote, empty before the first.

        Raises:
            SegmentError: as `poll`.
        """
        if read_u64(self._file.counters(), wire.STATUS_GENERATION_AT) != self._status_generation:
            generation, status = self._file.document(wire.STATUS_AT, wire.STATUS_SIZE)
            is_valid = isinstance(status, dict) and is_bounded(status)
            if generation > self._status_generation and is_valid:
                self._status = Payload(status)
                self._status_generation = generation
        return self._status

    def acks(self) -> list[Ack]:
        """Return the acks that `poll` found, once each."""
        acks, self._acks = self._acks, []
        return acks

    def end(self) -> tuple[int | None, str] | None:
        """Return `(returncode, last message)` as the job itself recorded them, None before that.

        Raises:
            SegmentError: as `poll`.
        """
        fields = wire.unpack_letter(self._file.read(wire.END_AT, wire.END_SIZE))
        end = parse_json(fields[1]) if fields and fields[1] is not None else None
        if not isinstance(end, dict):
            return None
        code, text = end.get("returncode"), end.get("text")
        return valid_returncode(code), (text if isinstance(text, str) else "")

    def step_ns(self) -> int | None:
        """Return the median time between frames in nanoseconds, None before there are two."""
        times = sorted(self._step_ns)
        return times[len(times) // 2] if times else None

    def send(self, key: str, verb: str, args: Payload) -> None:
        """Send a command; `key` names the order, however often it is sent.

        Raises:
            SegmentError: it does not fit into a letter, or as `poll`.
        """
        payload = json.dumps({"key": key, "verb": verb, "args": dict(args)}).encode()
        if len(payload) > wire.LETTER_ROOM:
            raise SegmentError(
                f"command {verb} takes {len(payload)} bytes, a letter holds {wire.LETTER_ROOM}"
            )
        if self._sent is None:
            self._sent = self._count_sent()
        offset = wire.COMMANDS_AT + self._sent % wire.LETTER_SLOTS * wire.LETTER_SIZE
        self._file.write(offset, wire.pack_letter(self._sent, payload))
        self._sent += 1
        self._file.write(wire.COMMANDS_HEAD_AT, self._sent.to_bytes(8, "little"))

    def write_heartbeat(self, now_ns: int) -> None:
        """Tell the probe that the supervisor lives.

        Raises:
            SegmentError: as `poll`.
        """
        self._file.write_checked(wire.SUPERVISOR_AT, now_ns)

    def lease(self, until_ns: int) -> None:
        """Let a pause last until `until_ns` (CLOCK_MONOTONIC).

        Raises:
            SegmentError: as `poll`.
        """
        self._file.write_checked(wire.LEASE_AT, until_ns)

    def sample_densely(self, until_ns: int) -> None:
        """Let the probe sample more densely until `until_ns` (CLOCK_MONOTONIC).

        Raises:
            SegmentError: as `poll`.
        """
        self._file.write_checked(wire.TIGHT_AT, until_ns)

    def defer_job_signals(self, until_ns: int) -> None:
        """Let signals that come to the job itself wait until `until_ns` (CLOCK_MONOTONIC).

        Raises:
            SegmentError: as `poll`.
        """
        self._file.write_checked(wire.KEEP_AT, until_ns)

    def retain_savepoint_before(self, before_step: int, until_ns: int) -> None:
        """Let the newest savepoint before that step (0: none) stay until `until_ns`.

        Raises:
            SegmentError: as `poll`.
        """
        self._file.write_checked(wire.SPARE_AT, before_step, until_ns)

    def close(self) -> None:
        """Let go of the file; safe to repeat. Whatever is called afterwards raises SegmentError."""
        self._file.close()

    def _take_names(self, counters: bytes, events: list[Event]) -> None:
        if read_u64(counters, wire.NAMES_GENERATION_AT) == self._generation:
            return
        generation, names = self._file.document(wire.NAMES_AT, wire.NAMES_SIZE)
        if generation <= self._generation or not is_metric_name_table(names):
            return  # half-written or damaged; frames that need it wait for it
        self._generation = generation
        self._names = tuple(names)
        events.append(
            Announced(
                self._clock(),
                self.rank,
                self.world_size,
                self.pid,
                self._names,
                self.created_ns,
                self.again,
            )
        )

    def _take_frames(self, head: int, limit: int, numbered: list[tuple[int, Event]]) -> None:
        """Add frames and gaps to `found`, each with the number of frames published by then."""
        if self._tries >= wire.PATIENCE:
            raise self._file.fault("has frames, but its table of names is damaged")
        if self._odd is not None:  # what came before it is told first
            raise self._file.fault(f"has a frame that is out of range: {self._odd}", FAULTY_HINT)
        slots, self._held = self._held + self._frames.read_until(head, limit), []
        for index, (seq, lost, slot) in enumerate(slots):
            if max(seq, lost) >= MAX_STEP:
                self._odd = f"number {seq + lost}"
                return
            if slot is None:
                numbered.append((seq + lost, Gap(self._clock(), self.rank, seq, lost)))
                continue
            self._odd = check_slot(slot, self._clock())
            if self._odd is not None:
                return
            if len(slot.values) > len(self._names):
                names: list[Event] = []
                self._take_names(self._file.counters(), names)
                numbered += [(seq, event) for event in names]
            absent = len(self._names) - len(slot.values)
            if absent < 0:
                self._held = slots[index:]
                self._tries += 1
                return
            self._tries = 0
            values = slot.values + (None,) * absent  # names that came after this frame
            frame = Frame(slot.at_ns, self.rank, slot.attempt, slot.step, values)
            numbered.append((seq + 1, frame))
            if self._last is not None and self._last[0] == seq - 1 and slot.at_ns > self._last[1]:
                self._step_ns.append(slot.at_ns - self._last[1])
            self._last, self.step = (seq, slot.at_ns), slot.step

    def _take_letters(self, head: int) -> list[tuple[int, Event]]:
        """Return notices, each with the number of frames published before it; keep the acks."""
        numbered: list[tuple[int, Event]] = []
        bad, newest = 0, 0
        for number, lost, raw in self._letters.read_until(head, wire.LETTER_SLOTS):
            letter = parse_json(raw) if raw is not None else None
            if is_mailbox_message(letter, ACK):
                key, result = letter.pop("ack"), Payload(letter.pop("result"))
                self._acks.append(Ack(key=key, result=result, **letter))
            elif number + (lost or 1) <= self._reported:
                continue
            elif is_mailbox_message(letter, NOTICE):
                frame, kind = letter.pop("frame"), letter.pop("notice")
                numbered.append((frame, self._notice(number, kind=kind, **letter)))
            else:
                bad += lost or 1
                newest = number + max(lost - 1, 0)
        if bad:
            message = f"{bad} letters from the probe of rank {self.rank} were lost or unreadable"
            numbered.append((self._frames.next, self._notice(newest, kind="note", message=message)))
        return numbered

    def _notice(self, letter: int, **fields: Any) -> Notice:
        return Notice(
            at_ns=self._clock(), rank=self.rank, segment=self.created_ns, letter=letter, **fields
        )

    def _count_sent(self) -> int:
        # A supervisor before us may have died between the letter and the count: the letters decide.
        sent_count = 0
        for index in range(wire.LETTER_SLOTS):
            offset = wire.COMMANDS_AT + index * wire.LETTER_SIZE
            fields = wire.unpack_letter(self._file.read(offset, wire.LETTER_SIZE))
            sent_count = max(sent_count, fields[0] + 1 if fields else 0)
        return sent_count

    def _slot(self, index: int) -> bytes:
        return self._file.read(wire.HEADER_SIZE + index * self._slot_size, self._slot_size)

    def _letter(self, index: int) -> bytes:
        return self._file.read(wire.LETTERS_AT + index * wire.LETTER_SIZE, wire.LETTER_SIZE)


def recorded_returncode(shm_dir: Path, pid: int, start_ticks: int) -> int | None:
    """Return the returncode of the job whose first process was `pid`, None where nobody told.

    What that process itself wrote counts. A launcher writes nothing, but passes on what its ranks
    came to: when all that came after it say the same, that counts.

    Args:
        start_ticks: when that process was started, as in `/proc/<pid>/stat`.
    """
    newest: dict[int, tuple[int, int, int | None]] = {}  # rank -> made, pid, returncode
    for path in shm_dir.glob("rank-*.seg"):
        try:
            segment = Segment.open(path, lambda: 0)
            try:
                end = segment.end()
            finally:
                segment.close()
        except SegmentError:
            continue
        record = (segment.created_ns, segment.pid, None if end is None else end[0])
        if segment.start_ticks >= start_ticks:
            newest[segment.rank] = max(record, newest.get(segment.rank, record))
    for _, owner_pid, returncode in newest.values():
        if owner_pid == pid:
            return returncode
    ends = {returncode for _, _, returncode in newest.values()}
    return ends.pop() if len(ends) == 1 else None
