"""Whose a checkpoint is that a pattern found: patterns match what other jobs write, too.

What the job told of is its own, and so is what lies in a directory that it told of. Once that is
where the patterns lead, nothing else they find is. Before, or where a job tells of nothing, they
must name one directory. What the register of a run beside this one has is never this one's.
"""

from __future__ import annotations

import glob
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import StoreError
from . import discovery, registry
from .registry import GLOB, Entry, Register, Stamp
from .save_report import SaveReport

FOREIGN = "another job"  # `Entry.how` of what is not ours, and
CONTESTED = "several runs"  # of what nobody told of, and another run has found too
UNTOLD = (GLOB, FOREIGN, CONTESTED)
ELSEWHERE = "another job wrote it: this one saves elsewhere"
UNNAMED = "nobody told whose it is, and job.checkpoints.glob does not name one directory"
MARKS = 64  # newest saves whose files are known again under another name; project default
RECENT_NS = 3600 * 10**9  # two disks' clocks may be apart; project default

Rows = set[tuple[int, int, int]]  # size, time of writing and inode of files


class OwnershipResolver:
    """Tells what is not the job's own. Whoever calls has the lock of the register.

    Args:
        patterns: where checkpoints are; relative ones from `cwd`.
        run: the run directory. runs: where other runs may be, besides its neighbours.
    """

    def __init__(
        self, register: Register, patterns: Sequence[str], cwd: Path, run: Path, runs: Path | None
    ) -> None:
        self._register, self._run = register, run
        self._beside = {run.parent, run.parent if runs is None else runs.absolute()}
        folders = {Path(os.path.normpath(cwd / pattern)).parent for pattern in patterns}
        alone = len(folders) == 1 and not glob.has_magic(str(next(iter(folders))))
        self._named = folders.pop() if alone else None
        self._marks: deque[discovery.FileIdentity] = deque(maxlen=MARKS)
        self._places: set[str] = set()  # directories that the job told of
        self._covered = False  # the patterns lead to one of them
        self._known: dict[Path, tuple[tuple[int, int], list[tuple[str, Rows]]]] = {}
        self._claims: list[tuple[str, str, Rows]] | None = None

    def told(self, saved: SaveReport) -> None:
        """The job tells of a save."""
        if saved.mark is not None:
            self._marks.append(saved.mark)

    def look(self, matched: Sequence[str]) -> None:
        """Look anew where the job saves, and at other runs. Args: matched: by the patterns."""
        self._claims = None
        own = (e.path for e in self._register.entries if e.how not in UNTOLD)
        self._places |= {_place(path) for path in own}
        self._covered |= any(_place(path) in self._places for path in matched)

    def verdict(self, entry: Entry) -> tuple[str, str]:
        """Return how a checkpoint is not ours, `FOREIGN` or `CONTESTED`, and why; else two "".

        What was not ours stays so until the job tells of it.
        """
        if entry.how not in UNTOLD:
            return "", ""
        if entry.how != GLOB:
            return entry.how, "; ".join(entry.problems)
        rows = _rows(entry.stamp)
        place = _place(entry.path)
        if any(discovery.has(entry.stamp, mark) for mark in self._marks):
            self._places.add(place)  # it was renamed from where it was told of
            return "", ""
        claims = [(name, how) for name, how, theirs in self._others() if rows & theirs]
        for name, how in claims:
            if how not in UNTOLD:
                return FOREIGN, f"another job wrote it: it is of the run {name}"
        if place not in self._places and self._covered:
            return FOREIGN, ELSEWHERE
        if place not in self._places and (self._named is None or place != _real(self._named)):
            return FOREIGN, UNNAMED
        if claims:
            return CONTESTED, (
                f"the run {claims[0][0]} found it too, and nobody told whose it is: name a "
                "directory of its own in job.checkpoints.glob"
            )
        return "", ""

    def ours(self, entry: Entry) -> bool:
        """Whether it is the job's own, by `verdict`."""
        return not self.verdict(entry)[0]

    def claimant(self, look: Stamp) -> str:
        """Return the run whose job told of the files that look like this, "" if it is none."""
        rows = _rows(look)
        if any(rows & _rows(e.stamp) for e in self._register.entries if e.how not in UNTOLD):
            return ""
        claims = (
            name for name, how, theirs in self._others() if how not in UNTOLD and rows & theirs
        )
        return next(claims, "")

    def _others(self) -> list[tuple[str, str, Rows]]:
        """Return run, `how` and files of what the runs beside this one have for their own."""
        if self._claims is None:
            self._claims = list(self._read())
        return self._claims

    def _read(self) -> Iterator[tuple[str, str, Rows]]:
        oldest_ns = min(
            (row[2] for e in self._register.entries if e.how in UNTOLD for row in e.stamp),
            default=0,
        )
        for place in {p for folder in self._beside for p in folder.glob(f"*/{registry.NAME}")}:
            if place.parent == self._run:
                continue
            try:
                found = place.stat()
                if found.st_mtime_ns < oldest_ns - RECENT_NS:
                    continue  # that run ended before
                look = (found.st_mtime_ns, found.st_ino)
                if self._known.get(place, (None,))[0] != look:
                    rows = registry.read(place.parent)["checkpoints"]
                    self._known[place] = look, [(e["how"], _rows(e["stamp"])) for e in rows]
            except (OSError, StoreError, KeyError, TypeError):
                continue  # it is being removed, or is somebody else's file
            for how, theirs in self._known[place][1]:
                if how != FOREIGN:
                    yield place.parent.name, how, theirs


def _rows(look: Iterable[Sequence[Any]]) -> Rows:
    return {(size, at, node) for _, size, at, node in look}


@lru_cache(4096)
def _place(path: str) -> str:
    """Return the directory that it is in; one that links lead to has several names."""
    return _real(Path(path).parent)


def _real(folder: Path) -> str:
    return os.path.realpath(folder)
