"""What must not be trained on again: the manifest of the run, as this process has to obey it.

The supervisor writes the file, whole and under rising generations; this reads it when the process
starts, when it is told of a new one, and when somebody asks and the file has changed, which is how
a loader's workers hear of it. Knows no loader and no step.
"""

from __future__ import annotations

import json
import os
from typing import Any, FrozenSet, Optional, Tuple

from .provenance import name_of, short


class Manifest:
    """The entries in force in this process.

    Attributes:
        generation: of the file that was read last; 0 before there is one.
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
        self._read: Optional[Tuple[int, int]] = None
        self.refresh()

    def refresh(self) -> None:
        """Read the file if it is another one than the last time: it is only ever replaced."""
        if self.path is None:
            return
        try:
            there = os.stat(self.path)
        except OSError:  # none was ever written, or nobody can reach it
            return
        read = (there.st_mtime_ns, there.st_ino)
        if read != self._read:
            self._read = read
            self._load(self.path)

    def holds(self, name: Any) -> bool:
        """Return whether a shard of this name, however it is written, is in quarantine."""
        if not self.shards:
            return False
        shard = name_of(name)
        return shard is not None and short(shard) in self.shards

    def _load(self, path: str) -> None:
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
            entries = [entry for entry in found["entries"] if self._in_force(entry)]
            shards = [name_of(each["name"]) for each in entries if each["kind"] == "shard"]
            batches = [int(each["name"]) for each in entries if each["kind"] == "batch"]
            generation = int(found["generation"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.trouble = f"the quarantine cannot be read: {type(error).__name__}: {error}"
            return
        self.shards = frozenset(short(name) for name in shards if name is not None)
        self.batches = frozenset(batches)
        self.generation, self.trouble = generation, ""

    def _in_force(self, entry: Any) -> bool:
        until = entry["until_attempt"]
        return entry["from_attempt"] <= self._attempt and (until is None or self._attempt < until)
