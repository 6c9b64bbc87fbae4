"""Adds to each rank's frames what the rank itself cannot know: its machine, and the other ranks.

The columns stand behind the probe's own, so that one frame is all that a rule has to read. Numbers
of the host and of all ranks together are in the frames of the rank that leads. What is not known
now is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..core.values import Announced, Event, Frame
from .ranks import Ranks

Machine = Callable[[int, bool], Mapping[str, float]]


@dataclass(slots=True)
class _Rank:
    """What one rank announced, and the columns that were added to that."""

    own: Announced
    added: tuple[str, ...] = ()


class Company:
    """Completes the events of a run's segments, in their order.

    Args:
        machine: `(pid, leads)` -> newest values of the machine, by metric id.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._ranks: dict[int, _Rank] = {}
        self._together = Ranks()

    def complete(self, event: Event) -> list[Event]:
        """Return what stands for `event`: itself, completed, perhaps behind a new announcement."""
        if isinstance(event, Announced):
            known = self._ranks.setdefault(event.rank, _Rank(event))
            known.own = event
            return [self._announcement(known)]
        if isinstance(event, Frame) and event.rank in self._ranks:
            return self._frame(self._ranks[event.rank], event)
        return [event]

    def _frame(self, rank: _Rank, frame: Frame) -> list[Event]:
        own = rank.own.names
        leads = frame.rank == min(self._ranks)
        if rank.own.world_size > 1:
            values = dict(zip(own, frame.values, strict=False))
            self._together.add(frame.attempt, frame.step, frame.rank, rank.own.world_size, values)
        beside = dict(self._machine(rank.own.pid, leads))
        if leads:
            beside |= self._together.newest()
        events: list[Event] = []
        if new := tuple(name for name in beside if name not in own and name not in rank.added):
            rank.added += new
            events.append(replace(self._announcement(rank), at_ns=frame.at_ns))
        if rank.added:
            blank = (None,) * (len(own) - len(frame.values))
            values_ = (*frame.values, *blank, *map(beside.get, rank.added))
            frame = replace(frame, values=values_)
        return [*events, frame]

    @staticmethod
    def _announcement(rank: _Rank) -> Announced:
        """Return what the rank announced, and our columns behind it."""
        own = rank.own
        rank.added = tuple(name for name in rank.added if name not in own.names)
        return replace(own, names=own.names + rank.added)
