"""What must not be trained on again: the manifest of the run, as this process has to obey it.

The supervisor writes the file, whole and under rising generations; this reads it when the process
starts, when it is told of a new one, and when somebody asks and the file has changed, which is how
a loader's workers hear of it. A person may write it too, with the `kind` and `name` of each entry
alone; what is left out means here what it means to the supervisor (`store/quarantine_list.py`).
Knows no loader and no step.
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


class Manifest:
    """The entries in force in this process.

    Attributes:
        generation: of the file that was read last; 0 before there is one, and of one by hand.
        shards: short names. batches: fingerprints.
        trouble: why the file that is there could not be read; what was in force stays so.
    """

    def __init__(self, path: Optional[str], attempt: int) -> None:
        self.path = path
        self.generation = 0
        self.shards: FrozenSet[str] = frozenset()
        self.batches: FrozenSet[int] = frozenset()
        self.trouble = ""
        self._attempt = attempt  # of this launch: what came later waits for the next one
        self._read: Optional[Tuple[int, int, int]] = None
        self.refresh()

    @property
    def known(self) -> bool:
        """Whether there is, or was, anything in it, or a file that cannot be read."""
        return bool(self.generation or self.shards or self.batches or self.trouble)

    def refresh(self) -> bool:
        """Read the file if it is another one than the last time; return whether it was."""
        if self.path is None:
            return False
        try:
            there = os.stat(self.path)
        except OSError:  # none was ever written, or nobody can reach it
            return False
        read = (there.st_mtime_ns, there.st_ino, there.st_size)
        if read == self._read:
            return False
        self._read = read
        self._load(self.path)
        return True

    def holds(self, name: Any) -> bool:
        """Return whether a shard of this name, however it is written, is in quarantine."""
        if not self.shards:
            return False
        shard = name_of(name)
        return shard is not None and short(shard) in self.shards

    def _load(self, path: str) -> None:
        try:
            found = json.loads(files.read(path))
            entries = [each for each in map(_entry, found["entries"]) if self._in_force(each)]
            generation = int(found.get("generation", 0))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            self.trouble = f"the quarantine cannot be read: {type(error).__name__}: {error}"
            return
        self.shards = frozenset(each.name for each in entries if each.kind == "shard")
        self.batches = frozenset(each.name for each in entries if each.kind == "batch")
        self.generation, self.trouble = generation, ""

    def _in_force(self, entry: Entry) -> bool:
        return entry.since <= self._attempt and (entry.until is None or self._attempt < entry.until)


def _entry(entry: Any) -> Entry:
    """Return an entry of the file; raises what is told of as one that cannot be read."""
    kind, name = entry["kind"], entry["name"]
    if not isinstance(name, (str, int)) or isinstance(name, bool) or name == "":
        raise ValueError(f"{name!r} is no name")
    if kind == "batch":
        name = int(name)
    elif kind == "shard":
        name = short(name_of(name) or "")
    else:
        raise ValueError(f"kind {kind!r} is neither shard nor batch")
    since, until = int(entry.get("from_attempt", 0)), entry.get("until_attempt")
    return Entry(kind, name, since, None if until is None else int(until))
