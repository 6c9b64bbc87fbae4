"""Reads one rank's segment and turns it into events; sends it commands.

Reading changes nothing in the file, so any number of readers may look at once; `stamp`, `lease`,
`tighten`, `spare` and `send` write, and only the supervisor calls them.

Decides nothing: what a gap, a fault or a silent rank means is the engine's affair.
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from supervise_probe import wire

from ...core.model.events import Announced, Beat, Event, Frame, Gap, Notice
from ...errors import SegmentError
from . import limits
from .file import FAULTY_HINT, SegmentFile, parse, read_u64

_STEP_TIMES = 31  # enough for a median that one slow step does not move


@dataclass(frozen=True, slots=True)
class Ack:
    """A probe's answer to a command. `result` holds what was observed; `error` why it refused."""

    key: str
    verb: str
    step: int
    ok: bool
    result: Mapping[str, Any]
    error: str | None


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
        self._status: dict[str, Any] = {}
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
        seen = wire.checked(self._file.counters(), wire.BEAT_AT)
        if seen is not None and seen & 7 < len(wire.PHASES) and seen < limits.MAX_NS:
            self._beat = (seen & ~7, wire.PHASES[seen & 7])
        return Beat(self.rank, *self._beat)

    def collective(self) -> wire.Collective | None:
        """Return the newest collective of the rank, None where it has called none that is seen.

        Raises:
            SegmentError: as `poll`.
        """
        packed = wire.checked(self._file.counters(), wire.COLLECTIVE_AT)
        return None if packed is None else wire.unpack_collective(packed)

    def status(self) -> dict[str, Any]:
        """Return the newest status that the probe wrote, `{}` before the first.

        Raises:
            SegmentError: as `poll`.
        """
        if read_u64(self._file.counters(), wire.STATUS_GENERATION_AT) != self._status_generation:
            generation, status = self._file.document(wire.STATUS_AT, wire.STATUS_SIZE)
            whole = isinstance(status, dict) and limits.bounded(status)
            if generation > self._status_generation and whole:
                self._status = status
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
        found = wire.unpack_letter(self._file.read(wire.END_AT, wire.END_SIZE))
        end = parse(found[1]) if found and found[1] is not None else None
        if not isinstance(end, dict):
            return None
        code, text = end.get("returncode"), end.get("text")
        return limits.returncode(code), (text if isinstance(text, str) else "")

    def step_ns(self) -> int | None:
        """Return the median time between frames in nanoseconds, None before there are two."""
        times = sorted(self._step_ns)
        return times[len(times) // 2] if times else None

    def send(self, key: str, verb: str, args: Mapping[str, Any]) -> None:
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
        at = wire.COMMANDS_AT + self._sent % wire.LETTER_SLOTS * wire.LETTER_SIZE
        self._file.write(at, wire.pack_letter(self._sent, payload))
        self._sent += 1
        self._file.write(wire.COMMANDS_HEAD_AT, self._sent.to_bytes(8, "little"))

    def stamp(self, now_ns: int) -> None:
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

    def tighten(self, until_ns: int) -> None:
        """Let the probe sample more densely until `until_ns` (CLOCK_MONOTONIC).

        Raises:
            SegmentError: as `poll`.
        """
        self._file.write_checked(wire.TIGHT_AT, until_ns)

    def keep_signals(self, until_ns: int) -> None:
        """Let signals that come to the job itself wait until `until_ns` (CLOCK_MONOTONIC).

        Raises:
            SegmentError: as `poll`.
        """
        self._file.write_checked(wire.KEEP_AT, until_ns)

    def retain_before(self, before_step: int, until_ns: int) -> None:
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
        if generation <= self._generation or not limits.names(names):
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

    def _take_frames(self, head: int, limit: int, found: list[tuple[int, Event]]) -> None:
        """Add frames and gaps to `found`, each with the number of frames published by then."""
        if self._tries >= wire.PATIENCE:
            raise self._file.fault("has frames, but its table of names is damaged")
        if self._odd is not None:  # what came before it is told first
            raise self._file.fault(f"has a frame that is out of range: {self._odd}", FAULTY_HINT)
        taken, self._held = self._held + self._frames.take(head, limit), []
        for index, (seq, lost, slot) in enumerate(taken):
            if max(seq, lost) >= limits.MAX_STEP:
                self._odd = f"number {seq + lost}"
                return
            if slot is None:
                found.append((seq + lost, Gap(self._clock(), self.rank, seq, lost)))
                continue
            self._odd = limits.slot(slot, self._clock())
            if self._odd is not None:
                return
            if len(slot.values) > len(self._names):
                names: list[Event] = []
                self._take_names(self._file.counters(), names)
                found += [(seq, event) for event in names]
            absent = len(self._names) - len(slot.values)
            if absent < 0:
                self._held = taken[index:]
                self._tries += 1
                return
            self._tries = 0
            values = slot.values + (None,) * absent  # names that came after this frame
            frame = Frame(slot.at_ns, self.rank, slot.attempt, slot.step, values)
            found.append((seq + 1, frame))
            if self._last is not None and self._last[0] == seq - 1 and slot.at_ns > self._last[1]:
                self._step_ns.append(slot.at_ns - self._last[1])
            self._last, self.step = (seq, slot.at_ns), slot.step

    def _take_letters(self, head: int) -> list[tuple[int, Event]]:
        """Return notices, each with the number of frames published before it; keep the acks."""
        found: list[tuple[int, Event]] = []
        bad, newest = 0, 0
        for number, lost, raw in self._letters.take(head, wire.LETTER_SLOTS):
            letter = parse(raw) if raw is not None else None
            if limits.letter(letter, limits.ACK):
                letter["key"] = letter.pop("ack")
                self._acks.append(Ack(**letter))
            elif number + (lost or 1) <= self._reported:
                continue
            elif limits.letter(letter, limits.NOTICE):
                frame, kind = letter.pop("frame"), letter.pop("notice")
                found.append((frame, self._notice(number, kind=kind, **letter)))
            else:
                bad += lost or 1
                newest = number + max(lost - 1, 0)
        if bad:
            message = f"{bad} letters from the probe of rank {self.rank} were lost or unreadable"
            found.append((self._frames.next, self._notice(newest, kind="note", message=message)))
        return found

    def _notice(self, letter: int, **fields: Any) -> Notice:
        return Notice(
            at_ns=self._clock(), rank=self.rank, segment=self.created_ns, letter=letter, **fields
        )

    def _count_sent(self) -> int:
        # A supervisor before us may have died between the letter and the count: the letters decide.
        sent = 0
        for index in range(wire.LETTER_SLOTS):
            at = wire.COMMANDS_AT + index * wire.LETTER_SIZE
            found = wire.unpack_letter(self._file.read(at, wire.LETTER_SIZE))
            sent = max(sent, found[0] + 1 if found else 0)
        return sent

    def _slot(self, index: int) -> bytes:
        return self._file.read(wire.HEADER_SIZE + index * self._slot_size, self._slot_size)

    def _letter(self, index: int) -> bytes:
        return self._file.read(wire.LETTERS_AT + index * wire.LETTER_SIZE, wire.LETTER_SIZE)
