"""The quarantine manifest of the run: what this process must not train on again.

The supervisor replaces the file atomically, with rising generations; this reads it when the process
starts, on a command, and on each query after the file has changed, which is how a loader's workers
get it. A person may write it too, with `kind` and `name` of each entry alone; the defaults of the
other keys are those of the supervisor (`store/quarantine_list.py`).
"""

from __future__ import annotations

import json
import os
import weakref
from collections import deque
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    FrozenSet,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Set,
    Tuple,
)

from ..runtime import files
from .shard_tracker import name_of, short


class Entry(NamedTuple):
    """One entry of the file, checked: a short name, or the fingerprint of a batch."""

    kind: str
    name: Any
    since: int
    until: Optional[int]

    def in_force(self, attempt: Optional[int]) -> bool:
        """Return whether it applies to processes of this launch; None: of the next one."""
        if attempt is None:
            return self.until is None
        return self.since <= attempt and (self.until is None or attempt < self.until)


class Manifest:
    """The entries in force in this process.

    Attributes:
        generation: of the file that was read last; 0 without a file, or for one written by hand.
        shards: short names. batches: fingerprints.
        error: why the file could not be read; the entries in force stay in force.
    """

    def __init__(self, path: Optional[str], attempt: int) -> None:
        self.path = path
        self.generation = 0
        self.shards: FrozenSet[str] = frozenset()
        self.batches: FrozenSet[int] = frozenset()
        self.error = ""
        self._attempt = attempt  # of this launch; later entries apply from the next one on
        self._hastened = 0  # the generation whose later entries apply already
        self._read: Optional[Tuple[int, int, int]] = None
        self.refresh()

    @property
    def is_known(self) -> bool:
        """Whether there is, or was, any entry, or a file that cannot be read."""
        return bool(self.generation or self.shards or self.batches or self.error)

    def refresh(self) -> bool:
        """Read the file if it has changed; return whether it had."""
        if self.path is None:
            return False
        try:
            status = os.stat(self.path)
        except OSError:  # none was written yet, or it cannot be reached
            return False
        read = (status.st_mtime_ns, status.st_ino, status.st_size)
        if read == self._read:
            return False
        self._read = read
        self._load(self.path)
        return True

    def hasten(self) -> None:
        """Let what counts from the next launch on count now, in the generation that was read."""
        self._hastened = self.generation
        self._read = None
        self.refresh()

    def holds(self, name: Any) -> bool:
        """Return whether a shard of this name, in any spelling, is in quarantine."""
        if not self.shards:
            return False
        shard = name_of(name)
        return shard is not None and short(shard) in self.shards

    def _load(self, path: str) -> None:
        try:
            document = json.loads(files.read(path))
            generation = int(document.get("generation", 0))
            attempt = None if 0 < generation == self._hastened else self._attempt
            entries = [e for e in map(_entry, document["entries"]) if e.in_force(attempt)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            self.error = f"the quarantine cannot be read: {type(error).__name__}: {error}"
            return
        self.shards = frozenset(entry.name for entry in entries if entry.kind == "shard")
        self.batches = frozenset(entry.name for entry in entries if entry.kind == "batch")
        self.generation, self.error = generation, ""


def _entry(entry: Any) -> Entry:
    """Return an entry of the file; raises for one that cannot be read."""
    kind, name = entry["kind"], entry["name"]
    if not isinstance(name, (str, int)) or isinstance(name, bool) or name == "":
        raise ValueError(f"{name!r} is not a name")
    if kind == "batch":
        name = int(name)
    elif kind == "shard":
        name = short(name_of(name) or "")
    else:
        raise ValueError(f"kind {kind!r} is neither shard nor batch")
    since, until = int(entry.get("from_attempt", 0)), entry.get("until_attempt")
    return Entry(kind, name, since, None if until is None else int(until))


NAMES = ("urls", "shardlist", "shard_list", "shards", "streams")
INSIDE = ("dataset", "source", "pipeline", "datasets")  # where wrapped datasets are kept
NAME_KEYS = ("url", "name", "path", "remote", "local")  # of an entry that is not a name itself
DATASETS_MAX = 64  # datasets within datasets
LOADERS_MAX = 4  # whose datasets are remembered


class ShardLists:
    """The lists that were filtered in this process.

    Args:
        notify: sends a notice of a message and its data.
    """

    def __init__(
        self, torch: Any, manifest: Manifest, notify: Callable[[str, Dict[str, Any]], None]
    ) -> None:
        self._torch = torch
        self._manifest = manifest
        self._notify = notify
        self._changed: Dict[Tuple[int, str], Tuple[Any, Any]] = {}  # as it was, as it is
        self._sent: List[str] = []
        self._datasets: Deque[weakref.ref[Any]] = deque(maxlen=LOADERS_MAX)

    @property
    def due(self) -> bool:
        """Whether there is anything to filter or to put back."""
        return bool(self._manifest.shards or self._changed)

    def begins(self, loader: Any) -> None:
        """A loader is about to begin a pass: filter the lists of its dataset."""
        dataset = getattr(loader, "dataset", None)
        # Persistent workers keep the list that they began with.
        if not getattr(loader, "persistent_workers", False):
            self._remember(dataset)
        if self.due:
            self.filter(dataset)

    def _remember(self, dataset: Any) -> None:
        if any(reference() is dataset for reference in self._datasets):
            return
        try:
            self._datasets.append(weakref.ref(dataset))
        except TypeError:  # it has no place for a weak reference
            pass

    def filterable(self) -> bool:
        """Whether the next pass of a loader of late would go by a list from which names can go."""
        return any(
            type(owner.__dict__.get(name)) in (list, tuple) and not self._by_index(owner)
            for reference in self._datasets
            for owner in _within(reference())
            for name in NAMES
        )

    def filter(self, dataset: Any) -> None:
        """Filter the lists of `dataset`, of which a loader is about to begin a pass."""
        for owner in _within(dataset):
            for name in NAMES:
                value = owner.__dict__.get(name)
                if type(value) in (list, tuple):
                    self._filter(owner, name, value)

    def _filter(self, owner: Any, name: str, value: Any) -> None:
        key = id(owner), name
        was, now = self._changed.get(key, (value, value))
        if value is not now:  # the job replaced the list
            was = value
        allowed = [entry for entry in was if not self._manifest.holds(_name(entry))]
        self._changed.pop(key, None)
        new = was
        if len(allowed) < len(was):
            label = f"{name} of {type(owner).__name__}"
            if not allowed:
                self._notify_once(f"all of {label} is in quarantine: nothing is removed")
            elif self._by_index(owner):
                self._notify_once(f"{label} is read by index, so nothing can be removed from it")
            else:
                new = type(was)(allowed)
                self._changed[key] = was, new
                self._notify_once(f"{len(was) - len(allowed)} of {len(was)} {label} are removed")
        if new is not value:
            owner.__dict__[name] = new

    def _by_index(self, owner: Any) -> bool:
        get = getattr(type(owner), "__getitem__", None)
        return get is not None and get is not self._torch.utils.data.Dataset.__getitem__

    def _notify_once(self, message: str) -> None:
        if message not in self._sent:
            self._sent = [*self._sent[1 - DATASETS_MAX :], message]
            self._notify(message, {"generation": self._manifest.generation})


def _within(dataset: Any) -> Iterator[Any]:
    """Yield `dataset` and the datasets that it wraps, each once."""
    todo: List[Any] = [dataset]
    visited: Set[int] = set()
    while todo and len(visited) < DATASETS_MAX:
        owner = todo.pop(0)
        if id(owner) in visited or not isinstance(getattr(owner, "__dict__", None), dict):
            continue
        visited.add(id(owner))
        yield owner
        for name in INSIDE:
            inner = owner.__dict__.get(name)
            todo += inner if type(inner) in (list, tuple) else [inner]


def _name(entry: Any) -> Any:
    """Return the name of an entry: itself, or the value of one of its keys or attributes."""
    if isinstance(entry, (str, bytes, os.PathLike)):
        return entry
    attributes = entry if isinstance(entry, dict) else getattr(entry, "__dict__", {})
    return next((attributes[key] for key in NAME_KEYS if attributes.get(key)), None)
