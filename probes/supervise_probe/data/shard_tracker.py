"""Origin of the batches of a step: reported by the job, or seen at a loader.

What the job reports between two steps belongs to the second. A loader may be read ahead: some
libraries fetch the next batch before they use this one, others all micro-batches of a step at once.
The end of its first step shows how far it is ahead, and each backward is one batch; batches that
the job skipped are then skipped here too. Where the numbers do not match, nothing is attributed.

Bounded: the names, the loaders, and what waits in each.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from typing import Any, Callable, Deque, Dict, List, Optional, Set

from .shard_provenance import SEVERAL, Origin, name_of, of_batch, of_dataset, offset_of, short

NAMES = 1024  # names with a number; the least recently used one is dropped
LOADERS = 8
WAITING = 256  # batches of one loader between two steps
AHEAD = 2  # a loader further ahead is not attributed
UNREPORTED = 64  # new names that wait for their notice


class Loader:
    """The batches of one loader that no step has used yet."""

    __slots__ = ("ahead", "iterator", "waiting")

    def __init__(self, iterator: Any) -> None:
        self.iterator = weakref.ref(iterator)
        self.ahead: Optional[int] = None  # unknown before its first step
        self.waiting: Deque[List[Origin]] = deque(maxlen=WAITING)

    def take(self, backwards: int) -> List[List[Origin]]:
        """Return the batches of the step that ends; 0 backwards: of a step without any."""
        waiting = self.waiting
        here = len(waiting)
        if not here:
            return []
        if self.ahead is None:
            left = max(0, here - backwards) if backwards else 0
            self.ahead = left if left <= AHEAD else 0
            if left > AHEAD:
                waiting.clear()
                return []
        begin = max(0, here - self.ahead - backwards) if backwards else 0
        end = min(here, begin + backwards) if backwards else here
        taken = [waiting.popleft() for _ in range(end)]
        return taken[begin:]


class ShardTracker:
    """The origins of the batches of one process.

    Attributes:
        reported: what the job reported since the last step.
        on_origin: called when the job or a loader shows where data comes from.
        unreported: names by number that no notice had yet; one that did not fit is added again
            when its shard is used again.
    """

    def __init__(self, torch: Any, on_origin: Callable[[], None]) -> None:
        self._torch = torch
        self.on_origin = on_origin
        self.reported: List[Origin] = []
        self.unreported: OrderedDict[int, str] = OrderedDict()
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._notified: Set[int] = set()  # numbers whose names were in a notice
        self._next = 0
        self._loaders: Dict[int, Loader] = {}

    def report(self, name: Any, offset: Any) -> None:
        """Add the origin that the job reports for its next batch."""
        shard = name_of(name)
        if shard is not None and len(self.reported) < SEVERAL:
            origin = Origin(shard, offset_of(offset))
            if origin not in self.reported:
                self.reported.append(origin)
                self.on_origin()

    def origins(self, iterator: Any, batch: Any, reported_before: int) -> List[Origin]:
        """Return the origins of `batch`; what was reported during the fetch belongs to it."""
        origins = self.reported[reported_before:]
        if origins:
            del self.reported[reported_before:]
            return origins
        return of_batch(self._torch, batch) or of_dataset(iterator)

    def loaded(self, iterator: Any, origins: List[Origin]) -> None:
        """Add a batch of a loader, for a later step."""
        key = id(iterator)
        loader = self._loaders.get(key)
        if loader is None or loader.iterator() is not iterator:
            if not origins:
                return
            self._loaders.pop(key, None)
            while len(self._loaders) >= LOADERS:
                del self._loaders[next(iter(self._loaders))]
            loader = self._loaders[key] = Loader(iterator)
            self.on_origin()
        loader.waiting.append(origins)

    def take(self, backwards: int) -> Dict[Origin, None]:
        """Return the origins of the update just made, in order, without repeats."""
        found = dict.fromkeys(self.reported)
        self.reported = []
        for loader in self._loaders.values():
            for origins in loader.take(backwards):
                found.update(dict.fromkeys(origins))
        return found

    def clear(self) -> None:
        """Drop what waits, after a rollback or discarded work: it belongs to no step."""
        self.reported = []
        for loader in self._loaders.values():
            loader.waiting.clear()

    # ── names ─────────────────────────────────────────────────────────────────────────────────

    def number(self, shard: str) -> int:
        """Return the number of a shard; it is never reused for another one."""
        found = self._numbers.get(shard)
        if found is not None:
            self._numbers.move_to_end(shard)
            if found not in self._notified:
                self._keep_for_notice(found, shard)
            return found
        found = self._next
        self._next += 1
        self._numbers[shard] = found
        self._keep_for_notice(found, shard)
        if len(self._numbers) > NAMES:
            self._notified.discard(self._numbers.popitem(last=False)[1])
        return found

    def _keep_for_notice(self, number: int, shard: str) -> None:
        self.unreported[number] = shard
        if len(self.unreported) > UNREPORTED:
            self.unreported.popitem(last=False)

    def take_unreported(self, count: int, size: int) -> Dict[str, str]:
        """Return short names for a notice, by number: `count` at most, `size` bytes."""
        names: Dict[str, str] = {}
        while self.unreported and len(names) < count:
            number, shard = next(iter(self.unreported.items()))
            name = short(shard)
            size -= len(name.encode("utf-8", "replace"))
            if size < 0 and names:
                break
            del self.unreported[number]
            self._notified.add(number)
            names[str(number)] = name
        return names

    def newest(self, count: int) -> Dict[str, str]:
        """Return the short names used last by number, the newest last."""
        names = list(self._numbers.items())[-count:]
        return {str(number): short(shard) for shard, number in names}
