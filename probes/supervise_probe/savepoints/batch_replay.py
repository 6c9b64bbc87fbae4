"""The batches that loaders returned since the oldest savepoint, to return them again.

An iterator cannot be rewound. After a rollback the same iterator returns the recorded batches in
their order, and then continues. Batches are referenced, not copied: one that the job has modified,
or whose pass is over, cannot be replayed, and the rollback is refused.

A loader without workers reads in the job's own process and may draw random numbers; the generators
are set as they were after the fetch.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Callable, Deque, List, NamedTuple, Tuple

from ..capture.call_stack import CannotRestore
from ..runtime import rng

SHARE = 4  # batches take at most a quarter of the savepoints' memory
DEPTH = 4  # of containers in a batch


class FetchCount:
    """How often an iterator was asked for a batch; outlives it."""

    def __init__(self) -> None:
        self.fetches = 0


class LoaderPosition(NamedTuple):
    """Where an iterator stood: how many batches it had returned, how often it was asked."""

    iterator: Callable[[], Any]
    at: int
    fetches: int
    counter: FetchCount


class RecordedBatch(NamedTuple):
    """A batch, its tensors with their versions, its bytes, and the generators after the fetch."""

    batch: Any
    tensors: List[Tuple[Any, int]]
    nbytes: int
    states: List[rng.State]


class ReplayQueue:
    """Batches `first` to `first + len(batches)` of one iterator; `at` is the next one."""

    def __init__(self) -> None:
        self.first = self.at = 0
        self.batches: Deque[RecordedBatch] = deque()
        self.count = FetchCount()


class BatchReplay:
    """The batches of one process."""

    def __init__(self, torch: Any, max_bytes: int) -> None:
        """`max_bytes`: for savepoints and batches together."""
        self._torch = torch
        self._share = self._limit = max_bytes // SHARE
        self._queues: weakref.WeakKeyDictionary[Any, ReplayQueue] = weakref.WeakKeyDictionary()
        self._nbytes = 0

    def reserve(self, room: int) -> int:
        """Take at most `room` bytes from now on; return how many must be kept free."""
        self._limit = max(0, min(self._share, room))
        return self._limit if self._queues else 0

    def next_recorded(self, iterator: Any) -> Any:
        """Return the next recorded batch, or None when the next one is new."""
        queue = self._queues.get(iterator)
        if queue is None:
            return None
        queue.count.fetches += 1
        if queue.at >= queue.first + len(queue.batches):
            return None
        recorded = queue.batches[queue.at - queue.first]
        queue.at += 1
        rng.restore(recorded.states)
        return recorded.batch

    def record(self, iterator: Any, batch: Any) -> None:
        """Record a new batch of `iterator`."""
        queue = self._queues.setdefault(iterator, ReplayQueue())
        tensors: List[Tuple[Any, int]] = []
        _collect(self._torch, batch, tensors, 0)
        draws = getattr(iterator, "_num_workers", 0) == 0
        states = rng.global_states(self._torch) if draws else []
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor, _ in tensors)
        queue.batches.append(RecordedBatch(batch, tensors, nbytes, states))
        queue.at += 1
        self._nbytes += nbytes
        while self._nbytes > self._limit and queue.batches:
            self._drop_first(queue)

    def positions(self) -> List[LoaderPosition]:
        """Return where all iterators stand."""
        return [
            LoaderPosition(weakref.ref(iterator), queue.at, queue.count.fetches, queue.count)
            for iterator, queue in self._queues.items()
        ]

    def tracks(self, iterator: Any) -> bool:
        """Whether `positions` includes this iterator."""
        return iterator in self._queues

    def drop_before(self, positions: List[LoaderPosition]) -> None:
        """Drop what no rollback can need any more."""
        oldest = {id(position.iterator()): position.at for position in positions}
        self._nbytes = 0
        for iterator, queue in self._queues.items():
            while queue.batches and queue.first < oldest.get(id(iterator), 0):
                self._drop_first(queue)
            self._nbytes += sum(recorded.nbytes for recorded in queue.batches)

    def verify(self, positions: List[LoaderPosition]) -> None:
        """Raise CannotRestore unless all batches since `positions` can be returned again."""
        for iterator, at, fetches, counter in positions:
            if counter.fetches == fetches:
                continue  # not used since, even if it no longer exists
            alive = iterator()
            queue = None if alive is None else self._queues.get(alive)
            if queue is None:
                why = "its pass over the data is over"
            elif at < queue.first:
                why = "they take more memory than is reserved for them"
            elif not all(map(_unchanged, list(queue.batches)[at - queue.first :])):
                why = "the job has modified them"
            else:
                continue
            raise CannotRestore(
                f"the position of a DataLoader and the batches since then cannot be restored: {why}"
            )

    def rewind(self, positions: List[LoaderPosition]) -> None:
        """Continue from `positions`, which were verified."""
        for position in positions:
            iterator = position.iterator()
            queue = None if iterator is None else self._queues.get(iterator)
            if queue is not None and position.at >= queue.first:
                queue.at = position.at

    def _drop_first(self, queue: ReplayQueue) -> None:
        self._nbytes -= queue.batches.popleft().nbytes
        queue.first += 1


def _unchanged(recorded: RecordedBatch) -> bool:
    return all(_version(tensor) == version for tensor, version in recorded.tensors)


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _collect(torch: Any, value: Any, found: List[Tuple[Any, int]], depth: int) -> None:
    """Gather the tensors of a batch; objects of the job's own classes are not entered."""
    if isinstance(value, torch.Tensor):
        found.append((value, _version(value)))
    elif depth < DEPTH and type(value) in (list, tuple):
        for each in value:
            _collect(torch, each, found, depth + 1)
    elif depth < DEPTH and isinstance(value, dict):
        for each in dict.values(value):
            _collect(torch, each, found, depth + 1)
