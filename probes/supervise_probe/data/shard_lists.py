"""Datasets that hold a list of their shards: shards in quarantine are removed from it.

The list is filtered when a loader begins a pass, before its workers start. It is replaced, never
changed in place, and restored when nothing of it is in quarantine any more. A list of which all
shards are in quarantine is not filtered, nor is a dataset that is read by index, where removing one
shard would shift all later ones.

Known are webdataset's `urls` of a pipeline stage, and any iterable dataset with a list under one of
the names below. Looks at instance attributes only.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterator, List, Set, Tuple

from .quarantine import Manifest

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
        if any(known() is dataset for known in self._datasets):
            return
        try:
            self._datasets.append(weakref.ref(dataset))
        except TypeError:  # it has no place for a weak reference
            pass

    def filterable(self) -> bool:
        """Whether the next pass of a loader of late would go by a list from which names can go."""
        return any(
            type(owner.__dict__.get(name)) in (list, tuple) and not self._by_index(owner)
            for known in self._datasets
            for owner in _within(known())
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
        kept = [entry for entry in was if not self._manifest.holds(_name(entry))]
        self._changed.pop(key, None)
        new = was
        if len(kept) < len(was):
            what = f"{name} of {type(owner).__name__}"
            if not kept:
                self._notify_once(f"all of {what} is in quarantine: nothing is removed")
            elif self._by_index(owner):
                self._notify_once(f"{what} is read by index, so nothing can be removed from it")
            else:
                new = type(was)(kept)
                self._changed[key] = was, new
                self._notify_once(f"{len(was) - len(kept)} of {len(was)} {what} are removed")
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
    seen: Set[int] = set()
    while todo and len(seen) < DATASETS_MAX:
        owner = todo.pop(0)
        if id(owner) in seen or not isinstance(getattr(owner, "__dict__", None), dict):
            continue
        seen.add(id(owner))
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
