"""Holds what waits to be verified by hard links, out of reach of the job's own rotation.

    <run>/checkpoints/.held-<id>/data/...

A link costs nothing while the job keeps the file, and its blocks from then on: few are held, none
while the disk is short. What is written again in place is written again here too; `intact` tells.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..store import files
from .discovery import stamp
from .registry import FOUND, Entry, Stamp

MOST = 2  # besides the pinned ones: the one that is verified, and the newest; project default
HELD = ".held-"
RESERVE = 0.05  # of the disk, and
RESERVE_BYTES = 1 << 30  # that much, stays free; project defaults


class HardLinkHolds:
    """What is held of one run. Whoever calls has the lock of the register."""

    def __init__(self, home: Path) -> None:
        """Sweep what a supervisor that died held. Args: home: see `Pins`."""
        self._home = home
        self._held: dict[str, Entry] = {}  # oldest first
        self._tried: set[str] = set()
        self._busy = ""
        for left in home.glob(f"{HELD}*"):
            shutil.rmtree(left, ignore_errors=True)

    def folder(self, entry: Entry) -> Path:
        """Return the directory of a held one."""
        return self._home / f"{HELD}{entry.id}"

    def path(self, entry: Entry) -> Path | None:
        """Return where the files of a held one are, None if it is not held."""
        try:
            return next((self.folder(entry) / "data").iterdir(), None)
        except OSError:
            return None

    def intact(self, entry: Entry, wanted: Stamp | None = None) -> bool:
        """Whether it is held, as its stamp says; what the job calls its file does not matter.

        Args:
            wanted: a stamp of before, if not that of the entry.
        """
        wanted = entry.stamp if wanted is None else wanted
        if entry.id not in self._held or (path := self.path(entry)) is None:
            return False
        look = stamp(str(path)) or ()
        if path.is_dir():
            return look == wanted
        return [row[1:] for row in look] == [row[1:] for row in wanted]

    def alone(self, entry: Entry) -> bool:
        """Whether it is intact, and nobody else has a name for any of its files: it stays so."""
        path = self.path(entry)
        if path is None or not self.intact(entry):
            return False
        held = [path / name for name, *_ in entry.stamp] if path.is_dir() else [path]
        try:
            return all(file.stat().st_nlink == 1 for file in held)
        except OSError:
            return False

    def begin(self, entry: Entry) -> Path | None:
        """Return where an intact one is; until `end` it is not let go. None: there is none."""
        if not self.intact(entry):
            return None
        self._busy = entry.id
        return self.path(entry)

    def end(self, entry: Entry) -> None:
        """There is a verdict, or none."""
        self._busy = ""
        if entry.state != FOUND:
            self.let_go(entry)

    def keep(self, ready: Sequence[Entry]) -> list[Entry]:
        """Hold the newest of these, and let go of all that is too much; return what was.

        Args:
            ready: complete, not verified, oldest first.
        """
        for entry in ready[-MOST:]:
            if entry.id not in self._held and entry.id not in self._tried:
                self._hold(entry)
        idle = [e for e in self._held.values() if e.id != self._busy]
        drop = [e for e in idle if e.state != FOUND]
        idle = [e for e in idle if e.state == FOUND]
        drop += idle[: max(0, len(self._held) - len(drop) - MOST)]
        if idle and self._short(max(e.bytes for e in idle)):
            drop += [e for e in idle if e not in drop]
        for entry in drop:
            self.let_go(entry)
        return drop

    def with_held(self, entries: Sequence[Entry], ready: Sequence[Entry]) -> list[Entry]:
        """Return those of `entries` that are ready, or held while the job's files are gone."""
        gone = {e.id for e in self._held.values() if e.state == FOUND and not e.there}
        names = gone | {e.id for e in ready}
        return [e for e in entries if e.id in names]

    def let_go(self, entry: Entry) -> None:
        """Remove its links."""
        self._held.pop(entry.id, None)
        shutil.rmtree(self.folder(entry), ignore_errors=True)

    def clear(self) -> None:
        """Remove all."""
        for entry in list(self._held.values()):
            self.let_go(entry)

    def _hold(self, entry: Entry) -> None:
        self._tried.add(entry.id)
        source = Path(entry.path)
        target = self.folder(entry) / "data" / entry.name
        if self._short(entry.bytes):
            return
        try:
            names = [name for name, *_ in entry.stamp] if source.is_dir() else [""]
            files.make_directory(self.folder(entry))
            for name in names:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(source / name, target / name)
        except OSError:  # another file system, or it went away while we looked
            self.let_go(entry)
            return
        self._held[entry.id] = entry
        if not self.intact(entry):
            self.let_go(entry)

    def _short(self, size: int) -> bool:
        """Whether the job's next save would find little room if `size` bytes were kept from it."""
        try:
            files.make_directory(self._home)
            disk = shutil.disk_usage(self._home)
        except OSError:
            return True
        return disk.free - size < max(disk.total * RESERVE, RESERVE_BYTES)
