"""Which shards the batches of a step came from: told by the job, or seen behind a loader.

What the job tells between two steps belongs to the second. A loader may be read ahead: some
libraries fetch the next batch before they use this one, others all micro-batches of a step at once.
How far it is ahead shows at the end of its first step, and each backward is one batch; batches that
the job left out are then left out here too. Where that does not come out, nothing is claimed.

Bounded: the names, the loaders, and what waits in each.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from typing import Any, Callable, Deque, Dict, List, Optional, Set

from .shard_provenance import SEVERAL, Origin, name_of, of_batch, of_dataset, offset_of, short

NAMES = 1024  # whose number is remembered; the one that was used longest ago gives way
LOADERS = 8
WAITING = 256  # batches of one loader between two steps
AHEAD = 2  # a loader further ahead is not understood
UNTOLD = 64  # new names that wait for their notice


class Loader:
    """The batches of one loader that no step has used yet."""

    __slots__ = ("ahead", "iterator", "waiting")

    def __init__(self, iterator: Any) -> None:
        self.iterator = weakref.ref(iterator)
        self.ahead: Optional[int] = None  # not known yet
        self.waiting: Deque[List[Origin]] = deque(maxlen=WAITING)

    def take(self, backwards: int) -> List[List[Origin]]:
        """Return the batches of the step that ends; 0 backwards: of one that has none."""
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
    """What is known of the batches of one process.

    Attributes:
        told: what the job said since the last step.
        heard: called when the job or a loader says where data comes from.
        untold: names by number, which the supervisor has not heard of; one that there was no room
            for comes back when its shard is used again.
    """

    def __init__(self, torch: Any, heard: Callable[[], None]) -> None:
        self._torch = torch
        self.heard = heard
        self.told: List[Origin] = []
        self.untold: OrderedDict[int, str] = OrderedDict()
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._told: Set[int] = set()  # of these, the numbers whose names were in a notice
        self._next = 0
        self._loaders: Dict[int, Loader] = {}

    def tell(self, name: Any, offset: Any) -> None:
        """The job says where its next batch comes from."""
        shard = name_of(name)
        if shard is not None and len(self.told) < SEVERAL:
            origin = Origin(shard, offset_of(offset))
            if origin not in self.told:
                self.told.append(origin)
                self.heard()

    def origins(self, iterator: Any, batch: Any, told_before: int) -> List[Origin]:
        """Return where `batch` is from; what the job told while it was fetched is about it."""
        origins = self.told[told_before:]
        if origins:
            del self.told[told_before:]
            return origins
        return of_batch(self._torch, batch) or of_dataset(iterator)

    def loaded(self, iterator: Any, origins: List[Origin]) -> None:
        """A loader handed out a batch from there, for a step to come."""
        key = id(iterator)
        loader = self._loaders.get(key)
        if loader is None or loader.iterator() is not iterator:
            if not origins:
                return
            self._loaders.pop(key, None)
            while len(self._loaders) >= LOADERS:
                del self._loaders[next(iter(self._loaders))]
            loader = self._loaders[key] = Loader(iterator)
            self.heard()
        loader.waiting.append(origins)

    def take(self, backwards: int) -> Dict[Origin, None]:
        """Return where the data of the update just made came from, in order, without repeats."""
        found = dict.fromkeys(self.told)
        self.told = []
        for loader in self._loaders.values():
            for origins in loader.take(backwards):
                found.update(dict.fromkeys(origins))
        return found

    def clear(self) -> None:
        """The job went back, or threw away what it did: nothing that waits belongs to a step."""
        self.told = []
        for loader in self._loaders.values():
            loader.waiting.clear()

    # ── names ─────────────────────────────────────────────────────────────────────────────────

    def number(self, shard: str) -> int:
        """Return the small number that stands for a shard; it is never given to another one."""
        found = self._numbers.get(shard)
        if found is not None:
            self._numbers.move_to_end(shard)
            if found not in self._told:
                self._keep_for_notice(found, shard)
            return found
        found = self._next
        self._next += 1
        self._numbers[shard] = found
        self._keep_for_notice(found, shard)
        if len(self._numbers) > NAMES:
            self._told.discard(self._numbers.popitem(last=False)[1])
        return found

    def _keep_for_notice(self, number: int, shard: str) -> None:
        self.untold[number] = shard
        if len(self.untold) > UNTOLD:
            self.untold.popitem(last=False)

    def tell_some(self, count: int, size: int) -> Dict[str, str]:
        """Return short names that were never told, by number: `count` at most, `size` bytes."""
        told: Dict[str, str] = {}
        while self.untold and len(told) < count:
            number, shard = next(iter(self.untold.items()))
            name = short(shard)
            size -= len(name.encode("utf-8", "replace"))
            if size < 0 and told:
                break
            del self.untold[number]
            self._told.add(number)
            told[str(number)] = name
        return told

    def newest(self, count: int) -> Dict[str, str]:
        """Return the short names used last by number, the newest last."""
        names = list(self._numbers.items())[-count:]
        return {str(number): short(shard) for shard, number in names}
