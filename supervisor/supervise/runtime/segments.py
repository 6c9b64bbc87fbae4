"""All segments of a run: finds new ones, reads them in rank order, reports damaged ones.

A segment that cannot be used is reported once and left alone; the others are read on. A rank that
comes back under another process, after a relaunch, or as another program of the same process, after
an exec, is read to its end and then replaced. While the process of a rank lives, another one that
trains under the same rank (a child with a model of its own) waits; that is reported once.

A supervisor that takes over reads on behind the last frame and the last notice in the journal: none
is judged twice, and none is lost while the ring still holds it. Decides nothing.
"""

from __future__ import annotations

import heapq
import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from supervise_probe import wire

from ..core.job_lifecycle import is_crash
from ..core.model.events import Announced, Event, Frame, Gap, Notice
from ..core.model.failure import FAILURE_NOTICE
from ..core.model.payload import Payload
from ..errors import SegmentError
from ..store import files
from .segment_reader import Segment
from .watches import DirectoryChange


@dataclass
class ReadCursor:
    """A fold over the journal of a run.

    Attributes:
        newest: per rank, when the segment was made that its newest frames came from.
        frames: (rank, made) -> frames taken or told as lost.
        letters: (rank, made) -> all notices in letters below this number were taken.
        silent: pids of the processes whose probe was told to be off.
        failures: names of the records of failures that were taken.
    """

    newest: dict[int, int] = field(default_factory=dict)
    frames: dict[tuple[int, int], int] = field(default_factory=dict)
    letters: dict[tuple[int, int], int] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    failures: set[str] = field(default_factory=set)

    def advance_past(self, event: Event) -> None:
        """Take the next event of the journal."""
        if isinstance(event, Frame):
            self._count(event.rank, 1)
        elif isinstance(event, Gap):
            self._count(event.rank, event.count)
        elif isinstance(event, Announced):
            self.newest[event.rank] = event.segment
        elif isinstance(event, Notice):
            self._noticed(event)

    def _count(self, rank: int, frames: int) -> None:
        key = (rank, self.newest.get(rank, 0))
        self.frames[key] = self.frames.get(key, 0) + frames

    def _noticed(self, event: Notice) -> None:
        if event.rank is not None and event.segment is not None and event.letter is not None:
            key = (event.rank, event.segment)
            self.letters[key] = max(self.letters.get(key, 0), event.letter + 1)
        elif event.kind == FAILURE_NOTICE:
            self.failures.add(str(event.data.get("record")))
        elif event.kind == "probe-off" and "pid" in event.data:
            self.silent.add(int(str(event.data["pid"])))


_SEGMENT_NAME = re.compile(r"rank-(\d+)\.(\d+)(?:\.\d+)?\.seg")
_MARK_NAME = re.compile(r"off\.(\d+)")
_MARK_GRACE_NS = 1_000_000_000  # an empty mark may still be in the writing
_MARK_BYTES = 2048
_TIGHT_NS = 30_000_000_000  # how long the probes sample densely unless asked again
_RETAIN_NS = 300_000_000_000  # how long a savepoint stays unless asked again: adopting takes time
_AGAIN_NS = 1_000_000_000  # between two wishes that are the same
_SHORTEST_S, _LONGEST_S = 0.050, 0.500  # between two polls; project defaults
_QUIET = 4  # median steps without a frame before the polls become fewer; project default


class Segments:
    """The segments of one run.

    Attributes:
        directory: where they are. ranks: the open segment of each rank.
    """

    def __init__(
        self,
        shm_dir: Path,
        marks_dir: Path,
        clock: Callable[[], int],
        read_cursor: ReadCursor | None = None,
    ) -> None:
        """Read what is in `shm_dir` and `marks_dir`, behind what was `taken` before."""
        self.ranks: dict[int, Segment] = {}
        self.directory, self._segments_change = shm_dir, DirectoryChange(shm_dir)
        self._marks_dir, self._marks_change = marks_dir, DirectoryChange(marks_dir)
        self._clock = clock
        self._taken = ReadCursor() if read_cursor is None else read_cursor
        # Names of segments and marks that were dealt with.
        self._known = {f"off.{pid}" for pid in self._taken.silent}
        self._waiting: list[Segment] = []  # of ranks whose process still lives
        self._empty_since: dict[str, int] = {}
        self._interval_s = _LONGEST_S / 2
        self._frames_ns = 0  # when the newest events came
        self._step_s = 0.0
        self._tight = False
        self._retained = (0, 0)  # the step, and when that was written

    def poll(self) -> list[Event]:
        """Return everything new, each rank's in its order and all by the times of their frames, so
        that the ranks of a step follow each other; never raises.

        A segment that cannot be used gives one `Notice` of kind `segment-fault`, a probe that gave
        up one of kind `probe-off` with its own sentence.
        """
        events: list[Event] = []
        for segment in [*self._waiting, *self._find(events)]:
            self._adopt(segment, events)
        of_ranks: list[list[tuple[float, Event]]] = []
        for rank in sorted(self.ranks):
            own: list[Event] = []
            self._read(self.ranks[rank], own)
            of_ranks.append(_timed(own))
        events += [event for _, event in heapq.merge(*of_ranks, key=itemgetter(0))]
        self._take_marks(events)
        self._interval_s = self._next_interval_s(is_new=bool(events))
        return events

    def unread(self) -> int:
        """Return how many frames wait to be read. For any thread."""
        count = 0
        for segment in list(self.ranks.values()):
            with suppress(SegmentError):  # the poll tells of a broken segment
                count += segment.unread()
        return count

    def interval_s(self) -> float:
        """Return how long to wait before the next poll, in seconds, between 50 and 500 ms.

        Half of the fastest rank's median step time while frames come, so that what follows from one
        reaches the next step, and more and more when none do: polling costs the job nothing, where
        waking us at each step would cost it more than the whole probe. Several frames at once cost
        half of what each costs alone.
        """
        return self._interval_s

    def sample_densely(self, dense: bool, now_ns: int) -> str | None:
        """Let the probes sample more densely while `wanted`. Call it every second.

        The wish expires by itself in the probes, so that a supervisor that dies takes it along.

        Returns:
            A sentence when it begins or ends, else None.
        """
        if dense:
            for segment in self.ranks.values():
                with suppress(SegmentError):  # the poll tells of a broken segment
                    segment.sample_densely(now_ns + _TIGHT_NS)
        if dense == self._tight:
            return None
        self._tight = dense
        if dense:
            return "samples are taken more densely while there is an incident"
        return f"samples are taken as usual again, {_TIGHT_NS // 10**9} seconds from now"

    def defer_job_signals(self, until_ns: int) -> None:
        """Let signals that come to the job itself wait until then; 0: none. For any thread."""
        for segment in list(self.ranks.values()):
            with suppress(SegmentError):  # the poll tells of a broken segment
                segment.defer_job_signals(until_ns)

    def retain_savepoint_before(self, before_step: int, now_ns: int) -> None:
        """Let the newest savepoint of a step before that stay; 0: none. Call it every round.

        Steps may be short: a change is written at once, the same wish once a second.
        """
        step, at_ns = self._retained
        if before_step == step and (not step or now_ns < at_ns + _AGAIN_NS):
            return
        self._retained = (before_step, now_ns)
        for segment in self.ranks.values():
            with suppress(SegmentError):  # the poll tells of a broken segment
                segment.retain_savepoint_before(before_step, now_ns + _RETAIN_NS)

    def forget(self) -> None:
        """Remove the segments of processes that are dead; what they wrote was read.

        The memory is given back, and a new process may get the pid of an old one.
        """
        for segment in (*self.ranks.values(), *self._waiting):
            if _trains(segment):
                continue
            if self.ranks.get(segment.rank) is segment:
                del self.ranks[segment.rank]
            else:
                self._waiting.remove(segment)
            segment.close()
            self._known.discard(segment.path.name)
            with suppress(OSError):
                segment.path.unlink()

    def living(self) -> dict[int, int]:
        """Return the processes that train, pid to rank."""
        segments = (*self.ranks.values(), *self._waiting)
        return {segment.pid: segment.rank for segment in segments if _trains(segment)}

    def dead_ranks(self) -> set[int]:
        """Return the ranks whose process was seen alive, and died otherwise than at its own end."""
        dead: set[int] = set()
        for rank, segment in self.ranks.items():
            if segment.lived and not _lives(segment):  # else it may live where we cannot look
                with suppress(SegmentError):
                    code, _ = segment.end() or (None, "")  # one that is killed records nothing
                    if code is None or is_crash(code):
                        dead.add(rank)
        return dead

    def ends(self) -> dict[int, tuple[int, int | None, str]]:
        """Return what processes recorded of their exit: pid -> rank, returncode, last message."""
        ends: dict[int, tuple[int, int | None, str]] = {}
        for rank, segment in self.ranks.items():
            with suppress(SegmentError):
                ends[segment.pid] = (rank, *(segment.end() or (None, "")))
        return ends

    def is_newest_process(self, pid: int) -> bool:
        """Whether process `pid` is the newest of a rank."""
        return any(segment.pid == pid for segment in self.ranks.values())

    def all_exited_cleanly(self) -> bool:
        """Whether each rank recorded its exit with code 0."""
        return bool(self.ranks) and all(map(_ended_well, self.ranks.values()))

    def close(self) -> None:
        """Close all segments."""
        for segment in (*self.ranks.values(), *self._waiting):
            segment.close()
        self.ranks.clear()
        self._waiting.clear()

    def _find(self, events: list[Event]) -> list[Segment]:
        segments: list[Segment] = []
        if not self._segments_change.is_listing_due(self._clock()):
            return segments
        for name in _names(self.directory):
            match = _SEGMENT_NAME.fullmatch(name)
            if match is None or name in self._known:
                continue
            self._known.add(name)
            rank, pid = map(int, match.groups())
            try:
                segment = Segment.open(self.directory / name, self._clock)
            except SegmentError as error:
                if not isinstance(error.__cause__, FileNotFoundError):  # gone again: nobody's fault
                    self._report(error, rank, pid, events)
                continue
            if (segment.rank, segment.pid) != (rank, pid):
                whose = f"rank {segment.rank} of process {segment.pid}"
                self._report(SegmentError(f"segment {name} is that of {whose}"), rank, pid, events)
                segment.close()
                continue
            if self._resume(segment):
                segments.append(segment)
        return sorted(segments, key=lambda segment: segment.created_ns)

    def _resume(self, segment: Segment) -> bool:
        """Go on behind what was taken of it; False when it was read to its end and replaced."""
        key, read_cursor = (segment.rank, segment.created_ns), self._taken
        if segment.created_ns < read_cursor.newest.get(segment.rank, 0):
            segment.close()
            return False
        if key in read_cursor.frames or key in read_cursor.letters:
            with suppress(SegmentError):  # the poll tells of a broken segment
                segment.resume(read_cursor.frames.get(key, 0), read_cursor.letters.get(key, 0))
        return True

    def _adopt(self, segment: Segment, events: list[Event]) -> None:
        old = self.ranks.get(segment.rank)
        if old is not None and old.pid != segment.pid and _trains(old):
            self._keep_waiting(segment, old, events)
            return
        if segment in self._waiting:
            self._waiting.remove(segment)
        idle = 0
        while old is not None and self.ranks.get(old.rank) is old and idle < wire.PATIENCE:
            idle = 0 if self._read(old, events) else idle + 1
        if old is not None:
            segment.again = old.pid != segment.pid and not _ended_well(old)
            old.close()
            if old.pid == segment.pid:  # a process may begin one training after the other
                with suppress(OSError):
                    old.path.unlink()
                self._known.discard(old.path.name)
        segment.lived = _lives(segment)
        self.ranks[segment.rank] = segment

    def _keep_waiting(self, segment: Segment, old: Segment, events: list[Event]) -> None:
        if segment in self._waiting:
            if not _trains(segment):
                self._waiting.remove(segment)
                segment.close()
            return
        self._waiting.append(segment)
        message = (
            f"process {segment.pid} trains as rank {segment.rank} too; process {old.pid} is read "
            "until it ends"
        )
        events.append(
            Notice(
                self._clock(),
                "note",
                message,
                rank=segment.rank,
                data=Payload({"pid": segment.pid}),
            )
        )

    def _read(self, segment: Segment, events: list[Event]) -> bool:
        try:
            new = segment.poll()
        except SegmentError as error:
            segment.close()
            self.ranks.pop(segment.rank)
            self._report(error, segment.rank, segment.pid, events)
            return False
        events += new
        return bool(new)

    def _take_marks(self, events: list[Event]) -> None:
        # A mark may be filled after it was made, which does not change the directory.
        if not self._empty_since and not self._marks_change.is_listing_due(self._clock()):
            return
        for name in _names(self._marks_dir):
            match = _MARK_NAME.fullmatch(name)
            if match is None or name in self._known:
                continue
            try:
                with os.fdopen(files.open_file(self._marks_dir / name), "rb") as mark:
                    note = mark.read(_MARK_BYTES).decode("utf-8", "replace")
            except OSError as error:
                note = f"the probe is off, and its reason cannot be read: {error.strerror}"
            now = self._clock()
            if not note.strip():
                if now - self._empty_since.setdefault(name, now) < _MARK_GRACE_NS:
                    continue
                note = "the probe is off, and could not write down why"
            self._known.add(name)
            self._empty_since.pop(name, None)
            message = " ".join(note.split())
            events.append(Notice(now, "probe-off", message, data=Payload({"pid": int(match[1])})))

    def _report(self, error: SegmentError, rank: int, pid: int, events: list[Event]) -> None:
        message = f"{error} ({error.hint})" if error.hint else str(error)
        events.append(
            Notice(self._clock(), "segment-fault", message, rank=rank, data=Payload({"pid": pid}))
        )

    def _next_interval_s(self, *, is_new: bool) -> float:
        now_ns = self._clock()
        if is_new:
            self._frames_ns = now_ns
            steps = [ns for segment in self.ranks.values() if (ns := segment.step_ns()) is not None]
            self._step_s = min(steps) / 1e9 if steps else 0.0
            return min(max(self._step_s / 2, _SHORTEST_S), _LONGEST_S)
        quiet_s = (now_ns - self._frames_ns) / 1e9
        if quiet_s < max(_LONGEST_S, _QUIET * self._step_s):
            return self._interval_s
        return min(1.5 * self._interval_s, _LONGEST_S)


def _trains(segment: Segment) -> bool:
    """Whether the process that writes `segment` is alive and has not recorded its exit."""
    try:
        return _lives(segment) and segment.end() is None
    except SegmentError:
        return False


def _lives(segment: Segment) -> bool:
    """Whether the process that writes `segment` is alive.

    False where that cannot be known (in another process namespace, without /proc).
    """
    try:
        stat = Path(f"/proc/{segment.pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(stat[19]) == segment.start_ticks and stat[0] not in (b"Z", b"X")
    except (OSError, ValueError, IndexError):
        return False


def _ended_well(segment: Segment) -> bool:
    """Whether the process that wrote `segment` recorded its exit with code 0."""
    try:
        end = segment.end()
    except SegmentError:
        return False
    return end is not None and end[0] == 0


def _names(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries)
    except OSError:  # not made yet, or removed at the end
        return []


def _timed(events: Sequence[Event]) -> list[tuple[float, Event]]:
    """Return each event of a rank with the time of the newest frame by then, in ns.

    What comes before the first frame goes with it; without any it stands behind those of others.
    """
    frames = (float(event.at_ns) for event in events if isinstance(event, Frame))
    timed, at_ns = [], next(frames, math.inf)
    for event in events:
        if isinstance(event, Frame):
            at_ns = max(at_ns, float(event.at_ns))
        timed.append((at_ns, event))
    return timed
