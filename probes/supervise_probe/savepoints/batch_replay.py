"""The batches that loaders handed out since the oldest savepoint, to hand them out again.

An iterator cannot be rewound. After a rollback the same iterator gives out what it gave out before,
in the same order, and then goes on where it is. Batches are held, not copied: one that the job has
written into since cannot be given again, nor can those of a pass that is over: then going back with
the same batches is refused.

A loader without workers reads in the job's own process and may draw random numbers on the way; the
generators are set as they were behind the fetch.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Callable, Deque, List, NamedTuple, Tuple

from ..capture.call_stack import CannotRestore
from ..runtime import rng as chance

SHARE = 4  # of the savepoints' memory, one part in so many may be batches
DEPTH = 4  # of containers in a batch
NAME = "the position of a DataLoader"


class FetchCount:
    """How often an iterator was asked for a batch; outlives it."""

    def __init__(self) -> None:
        self.asked = 0


class Place(NamedTuple):
    """Where an iterator stood: how many batches it had given, how often it had been asked."""

    iterator: Callable[[], Any]
    at: int
    asked: int
    tally: FetchCount


Mark = List[Place]


class Given(NamedTuple):
    """A batch, its tensors with their versions, its bytes, and the generators behind it."""

    batch: Any
    tensors: List[Tuple[Any, int]]
    nbytes: int
    states: List[chance.State]


class ReplayQueue:
    """What one iterator gave: batches `first` to `first + len(given)`; `at` is the next."""

    def __init__(self) -> None:
        self.first = self.at = 0
        self.given: Deque[Given] = deque()
        self.tally = FetchCount()


class BatchReplay:
    """The batches of one process."""

    def __init__(self, torch: Any, max_bytes: int) -> None:
        """`max_bytes`: for savepoints and batches together."""
        self._torch = torch
        self._share = self._most = max_bytes // SHARE
        self._reels: weakref.WeakKeyDictionary[Any, ReplayQueue] = weakref.WeakKeyDictionary()
        self._nbytes = 0

    def reserve(self, room: int) -> int:
        """Take no more than `room` bytes from now on; return how many must be kept free."""
        self._most = max(0, min(self._share, room))
        return self._most if self._reels else 0

    def again(self, iterator: Any) -> Any:
        """Return the batch that comes next as it came before, None when it is a new one."""
        reel = self._reels.get(iterator)
        if reel is None:
            return None
        reel.tally.asked += 1
        if reel.at >= reel.first + len(reel.given):
            return None
        given = reel.given[reel.at - reel.first]
        reel.at += 1
        chance.restore(given.states)
        return given.batch

    def keep(self, iterator: Any, batch: Any) -> None:
        """`iterator` gave a new batch."""
        reel = self._reels.setdefault(iterator, ReplayQueue())
        tensors: List[Tuple[Any, int]] = []
        _collect(self._torch, batch, tensors, 0)
        draws = getattr(iterator, "_num_workers", 0) == 0
        states = chance.global_states(self._torch) if draws else []
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor, _ in tensors)
        reel.given.append(Given(batch, tensors, nbytes, states))
        reel.at += 1
        self._nbytes += nbytes
        while self._nbytes > self._most and reel.given:
            self._drop_first(reel)

    def mark(self) -> Mark:
        """Return where all iterators stand."""
        return [
            Place(weakref.ref(iterator), reel.at, reel.tally.asked, reel.tally)
            for iterator, reel in self._reels.items()
        ]

    def knows(self, iterator: Any) -> bool:
        """Whether `mark` holds this iterator."""
        return iterator in self._reels

    def forget_before(self, mark: Mark) -> None:
        """Nobody goes back further than `mark`."""
        oldest = {id(place.iterator()): place.at for place in mark}
        self._nbytes = 0
        for iterator, reel in self._reels.items():
            while reel.given and reel.first < oldest.get(id(iterator), 0):
                self._drop_first(reel)
            self._nbytes += sum(given.nbytes for given in reel.given)

    def verify(self, mark: Mark) -> None:
        """Raise CannotRestore unless all that was given since `mark` can be given again."""
        for iterator, at, asked, tally in mark:
            if tally.asked == asked:
                continue  # nobody has asked it since, even if it is gone
            alive = iterator()
            reel = None if alive is None else self._reels.get(alive)
            if reel is None:
                why = "its pass over the data is over"
            elif at < reel.first:
                why = "they take more memory than is kept for them"
            elif not all(map(_same, list(reel.given)[at - reel.first :])):
                why = "the job has written into them"
            else:
                continue
            raise CannotRestore(f"{NAME} and the batches since then cannot be had again: {why}")

    def rewind(self, mark: Mark) -> None:
        """Stand again at `mark`, which was verified."""
        for place in mark:
            iterator = place.iterator()
            reel = None if iterator is None else self._reels.get(iterator)
            if reel is not None and place.at >= reel.first:
                reel.at = place.at

    def _drop_first(self, reel: ReplayQueue) -> None:
        self._nbytes -= reel.given.popleft().nbytes
        reel.first += 1


def _same(given: Given) -> bool:
    return all(_version(tensor) == version for tensor, version in given.tensors)


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _collect(torch: Any, thing: Any, found: List[Tuple[Any, int]], depth: int) -> None:
    """Gather the tensors of a batch; nothing of the job's own classes is looked into."""
    if isinstance(thing, torch.Tensor):
        found.append((thing, _version(thing)))
    elif depth < DEPTH and type(thing) in (list, tuple):
        for each in thing:
            _collect(torch, each, found, depth + 1)
    elif depth < DEPTH and isinstance(thing, dict):
        for each in dict.values(thing):
            _collect(torch, each, found, depth + 1)
