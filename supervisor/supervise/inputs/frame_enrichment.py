"""Adds to each rank's frames what the rank itself cannot know: its machine, and the other ranks.

They are columns of the frame, so that one frame is all that a rule has to read. Numbers
of the host and of all ranks together are in the frames of the rank that leads. What is not known
now is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from ..core.model.events import Announced, Beat, Event, Frame
from ..core.model.failure import Failure
from .cross_rank_metrics import Ranks
from .run_metrics import Now, RunMetrics

Machine = Callable[[int, bool], Mapping[str, float]]


class _Rank:
    """What one rank announced, and the columns that were added to that.

    Columns stay where they were first announced, whoever has more to say later: what was kept of
    earlier frames stays readable.
    """

    def __init__(self, own: Announced, columns: Sequence[str] = ()) -> None:
        self.added = list(columns)
        self.columns = list(columns)
        self._arrange: Callable[[Sequence[float | None]], tuple[float | None, ...]] = tuple
        self.announce(own)

    def announce(self, own: Announced) -> None:
        """The probe announced its names, perhaps again."""
        self.own = own
        self.added = [name for name in self.added if name not in own.names]
        self._lay_out()

    def add(self, names: Sequence[str]) -> None:
        """Make room for these."""
        self.added += names
        self._lay_out()

    def _lay_out(self) -> None:
        source = [*self.own.names, *self.added]
        self.columns += [name for name in source if name not in self.columns]
        places = [source.index(name) for name in self.columns]
        several = len(places) > 1 and places != list(range(len(places)))
        self._arrange = itemgetter(*places) if several else tuple

    def announcement(self) -> Announced:
        """Return what the rank announced, with our columns."""
        return replace(self.own, names=tuple(self.columns))

    def complete(self, frame: Frame, beside: Mapping[str, float]) -> Frame:
        """Return the frame with the values of our columns."""
        blank = (None,) * (len(self.own.names) - len(frame.values))
        row = (*frame.values, *blank, *map(beside.get, self.added))
        return replace(frame, values=self._arrange(row))


class FrameEnricher:
    """Completes the events of a run's segments, in their order.

    Args:
        machine: `(pid, leads)` -> newest values of the machine, by metric id.
        now: for the metrics of the run, see `run_metrics`; None: without them.
    """

    def __init__(self, machine: Machine, now: Now | None = None) -> None:
        self._machine = machine
        self._run = None if now is None else RunMetrics(now)
        self._ranks: dict[int, _Rank] = {}
        self._before: dict[int, Announced] = {}
        self._together = Ranks()

    def recall(self, announced: Announced) -> None:
        """Let a rank keep the columns that it had under a supervisor before this one."""
        self._before[announced.rank] = announced

    def on_relaunch(self, failures: Iterable[Failure]) -> None:
        """The policy starts the job again, after these."""
        if self._run is not None:
            self._run.on_failures(failures)
            self._run.on_relaunch()

    def on_beats(self, beats: Iterable[Beat], failures: Iterable[Failure], now_ns: int) -> None:
        """Take the ranks' signs of life, and what is known of their ends."""
        if self._run is not None:
            self._run.on_failures(failures)
            self._run.on_beats(beats, now_ns)

    def complete(self, event: Event) -> list[Event]:
        """Return what stands for `event`: itself, completed, perhaps behind a new announcement."""
        if isinstance(event, Announced):
            known = self._ranks.get(event.rank)
            if known is None or known.own.program != event.program:  # it starts from nothing
                self._together.forget(event.rank)
                if self._run is not None:
                    self._run.on_announced(event)
                before = self._before.pop(event.rank, None)
                same = before is not None and before.segment == event.segment
                columns = before.names if before is not None and same else ()
                known = self._ranks[event.rank] = _Rank(event, columns)
            else:
                known.announce(event)
            return [known.announcement()]
        if isinstance(event, Frame) and event.rank in self._ranks:
            return self._frame(self._ranks[event.rank], event)
        return [event]

    def _frame(self, rank: _Rank, frame: Frame) -> list[Event]:
        own = rank.own
        leads = frame.rank == min(self._ranks)
        if own.world_size > 1:
            values = dict(zip(own.names, frame.values, strict=False))
            self._together.add(frame.attempt, frame.step, frame.rank, own.world_size, values)
        beside = dict(self._machine(own.pid, leads))
        if leads:
            beside |= self._together.newest()
        if self._run is not None:
            beside |= self._run.of_frame(frame, own.world_size, leads=leads)
        events: list[Event] = []
        if new := [name for name in beside if name not in rank.columns]:
            rank.add(new)
            events.append(replace(rank.announcement(), at_ns=frame.at_ns))
        if rank.added:
            frame = rank.complete(frame, beside)
        return [*events, frame]
