"""The quarantine manifest of the run: what this process must not train on again.

The supervisor replaces the file atomically, with rising generations; this reads it when the process
starts, on a command, and on each query after the file has changed, which is how a loader's workers
get it. A person may write it too, with `kind` and `name` of each entry alone; the defaults of the
other keys are those of the supervisor (`store/quarantine_list.py`).
"""

from __future__ import annotations

import json
import os
from typing import Any, FrozenSet, NamedTuple, Optional, Tuple

from ..runtime import files
from .shard_provenance import name_of, short


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
    def known(self) -> bool:
        """Whether there is, or was, any entry, or a file that cannot be read."""
        return bool(self.generation or self.shards or self.batches or self.error)

    def refresh(self) -> bool:
        """Read the file if it has changed; return whether it had."""
        if self.path is None:
            return False
        try:
            there = os.stat(self.path)
        except OSError:  # none was written yet, or it cannot be reached
            return False
        read = (there.st_mtime_ns, there.st_ino, there.st_size)
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
            found = json.loads(files.read(path))
            generation = int(found.get("generation", 0))
            attempt = None if 0 < generation == self._hastened else self._attempt
            entries = [e for e in map(_entry, found["entries"]) if e.in_force(attempt)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            self.error = f"the quarantine cannot be read: {type(error).__name__}: {error}"
            return
        self.shards = frozenset(each.name for each in entries if each.kind == "shard")
        self.batches = frozenset(each.name for each in entries if each.kind == "batch")
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
