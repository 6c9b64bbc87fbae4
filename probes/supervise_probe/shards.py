"""Origin of the batches of a step: reported by the job, or seen at a loader.

What the job reports between two steps belongs to the second. A loader may be read ahead: some
libraries fetch the next batch before they use this one, others all micro-batches of a step at once.
The end of its first step shows how far it is ahead, and each backward is one batch; batches that
the job skipped are then skipped here too. Where the numbers do not match, nothing is attributed.

Bounded: the names, the loaders, and what waits in each.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict, deque
from typing import Any, Callable, Iterator, NamedTuple, Optional, Union
from zlib import crc32

Offset = Union[int, str, None]

SHARD_KEYS = ("__shard__", "shard", "shard_id", "__url__")  # in a batch; the first one counts
OFFSET_KEYS = ("offset", "index", "__key__")
DATASET_SHARDS = ("current_shard", "shard_name")  # of a dataset that is read in this process
DATASET_OFFSETS = ("current_offset", "shard_offset")
WRAPPERS = 4  # datasets within datasets that are looked into
LONGEST_NAME = 200
SHORT = 90  # characters of a name in notices and in the quarantine manifest
SEVERAL = 16  # origins kept of one batch
VALUES = 4096  # samples of a batch whose shard is read


class Origin(NamedTuple):
    """One shard, and where in it the batch begins."""

    shard: str
    offset: Offset = None


def shard_name(value: Any) -> Optional[str]:
    """Return the name of a shard; None for any other value.

    A URL loses its query and its user, which may be secrets. The end of a long name is kept: it
    tells shards apart.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    elif isinstance(value, os.PathLike):
        value = str(os.fspath(value))
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"shard {value}"
    if not isinstance(value, str) or not value:
        return None
    head, mark, tail = value.partition("://")
    if mark:
        host, slash, path = tail.partition("?")[0].partition("/")
        value = f"{head}://{host.rpartition('@')[2]}{slash}{path}"
    text: str = " ".join(value.split())
    return text if len(text) <= LONGEST_NAME else "…" + text[1 - LONGEST_NAME :]


def shorten_name(name: str) -> str:
    """Return a name that fits into a notice: a long one as a hash of all of it and its end."""
    if len(name) <= SHORT:
        return name
    return f"…{crc32(name.encode('utf-8', 'replace')):08x}…{name[10 - SHORT :]}"


def shard_offset(value: Any) -> Offset:
    """Return a place in a shard: a whole number, or the key of a sample."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) < 16 else value[:LONGEST_NAME]
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__.startswith(("int", "uint")):
        return int(value)
    return None


def batch_origins(torch: Any, batch: Any) -> list[Origin]:
    """Return the origins that a batch names by its keys, without repeats."""
    if not isinstance(batch, dict):
        batch = getattr(batch, "__dict__", {}).get("data")  # transformers.BatchEncoding
        if not isinstance(batch, dict):
            return []
    shards = _leading(torch, batch, SHARD_KEYS)
    if not shards:
        return []
    offsets = _leading(torch, batch, OFFSET_KEYS)
    origins: dict[str, Origin] = {}
    for index, value in enumerate(shards):
        name = shard_name(value)
        if name is not None and name not in origins and len(origins) < SEVERAL:
            origins[name] = Origin(
                name, shard_offset(offsets[index]) if index < len(offsets) else None
            )
    return list(origins.values())


def _leading(torch: Any, batch: dict[Any, Any], keys: tuple[str, ...]) -> list[Any]:
    """Return the values of the first of `keys` that is there, one per sample."""
    for key in keys:
        value = dict.get(batch, key)
        if value is None:
            continue
        if type(value) in (list, tuple):
            return list(value[:VALUES])
        if not isinstance(value, torch.Tensor):
            return [value]
        if value.device.type == "cpu" and not value.is_floating_point():
            return list(value.reshape(-1)[:VALUES].tolist())
    return []


def dataset_origins(iterator: Any) -> list[Origin]:
    """Return where the dataset of a loader without workers stands."""
    fields = getattr(iterator, "__dict__", {})
    if fields.get("_num_workers") != 0:
        return []
    for attributes in _attributes(fields.get("_dataset")):
        for key in DATASET_SHARDS:
            name = shard_name(attributes.get(key))
            if name is not None:
                places = (shard_offset(attributes.get(key)) for key in DATASET_OFFSETS)
                return [Origin(name, next((p for p in places if p is not None), None))]
    return []


def _attributes(dataset: Any) -> Iterator[dict[str, Any]]:
    for _ in range(WRAPPERS):
        attributes = getattr(dataset, "__dict__", None)
        if not isinstance(attributes, dict):
            return
        yield attributes
        dataset = attributes.get("dataset")


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
        self.waiting: deque[list[Origin]] = deque(maxlen=WAITING)

    def take_step_batches(self, backward_count: int) -> list[list[Origin]]:
        """Return the batches of the step that ends; 0 backward_count: of a step without any."""
        waiting = self.waiting
        here = len(waiting)
        if not here:
            return []
        if self.ahead is None:
            remaining = max(0, here - backward_count) if backward_count else 0
            self.ahead = remaining if remaining <= AHEAD else 0
            if remaining > AHEAD:
                waiting.clear()
                return []
        begin = max(0, here - self.ahead - backward_count) if backward_count else 0
        end = min(here, begin + backward_count) if backward_count else here
        origins = [waiting.popleft() for _ in range(end)]
        return origins[begin:]


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
        self.reported: list[Origin] = []
        self.unreported: OrderedDict[int, str] = OrderedDict()
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._notified: set[int] = set()  # numbers whose names were in a notice
        self._next = 0
        self._loaders: dict[int, Loader] = {}

    def report(self, name: Any, offset: Any) -> None:
        """Add the origin that the job reports for its next batch."""
        shard = shard_name(name)
        if shard is not None and len(self.reported) < SEVERAL:
            origin = Origin(shard, shard_offset(offset))
            if origin not in self.reported:
                self.reported.append(origin)
                self.on_origin()

    def origins(self, iterator: Any, batch: Any, reported_before: int) -> list[Origin]:
        """Return the origins of `batch`; what was reported during the fetch belongs to it."""
        origins = self.reported[reported_before:]
        if origins:
            del self.reported[reported_before:]
            return origins
        return batch_origins(self._torch, batch) or dataset_origins(iterator)

    def add_loaded_batch(self, iterator: Any, origins: list[Origin]) -> None:
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

    def take_step_origins(self, backward_count: int) -> dict[Origin, None]:
        """Return the origins of the update just made, in order, without repeats."""
        shards = dict.fromkeys(self.reported)
        self.reported = []
        for loader in self._loaders.values():
            for origins in loader.take_step_batches(backward_count):
                shards.update(dict.fromkeys(origins))
        return shards

    def clear(self) -> None:
        """Drop what waits, after a rollback or discarded work: it belongs to no step."""
        self.reported = []
        for loader in self._loaders.values():
            loader.waiting.clear()

    # ── names ─────────────────────────────────────────────────────────────────────────────────

    def number(self, shard: str) -> int:
        """Return the number of a shard; it is never reused for another one."""
        number = self._numbers.get(shard)
        if number is not None:
            self._numbers.move_to_end(shard)
            if number not in self._notified:
                self._keep_for_notice(number, shard)
            return number
        number = self._next
        self._next += 1
        self._numbers[shard] = number
        self._keep_for_notice(number, shard)
        if len(self._numbers) > NAMES:
            self._notified.discard(self._numbers.popitem(last=False)[1])
        return number

    def _keep_for_notice(self, number: int, shard: str) -> None:
        self.unreported[number] = shard
        if len(self.unreported) > UNREPORTED:
            self.unreported.popitem(last=False)

    def take_unreported(self, count: int, size: int) -> dict[str, str]:
        """Return short names for a notice, by number: `count` at most, `size` bytes."""
        names: dict[str, str] = {}
        while self.unreported and len(names) < count:
            number, shard = next(iter(self.unreported.items()))
            name = shorten_name(shard)
            size -= len(name.encode("utf-8", "replace"))
            if size < 0 and names:
                break
            del self.unreported[number]
            self._notified.add(number)
            names[str(number)] = name
        return names

    def newest(self, count: int) -> dict[str, str]:
        """Return the short names used last by number, the newest last."""
        names = list(self._numbers.items())[-count:]
        return {str(number): shorten_name(shard) for shard, number in names}
