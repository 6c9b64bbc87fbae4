"""Puts a checkpoint back: what takes long while the job still runs, the rest when it is dead."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..store import files
from . import discovery
from .ownership import OwnershipResolver
from .registry import BAD, FOUND, VANISHED, VERIFIED, Entry, Stamp
from .verification_scheduler import VerificationScheduler


@dataclass(frozen=True)
class Prepared:
    """A checkpoint that can be put back: where it lies, it was unhurt at `stamp`; else a `copy`."""

    id: str
    stamp: Stamp | None = None
    copy: Path | None = None


@dataclass
class Restorer:
    """Puts back what a keeper keeps.

    Attributes:
        owners: tells what is another job's, which is never touched.
        look: sees what the job has written last.
    """

    keeper: VerificationScheduler
    owners: OwnershipResolver
    look: Callable[[], object]
    _prepared: Prepared | None = field(default=None, init=False)

    def prepare(self, name: str) -> None:
        """See `Guard.prepare`."""
        keeper = self.keeper
        with keeper.at_once():
            self.forget()
            with keeper.lock:
                entry = self._verified(name)
            keeper.reserved = name
            try:
                self._may_set_aside(entry)
                look = discovery.stamp(entry.path)
                if self._lies(entry):
                    self._prepared = Prepared(name, stamp=look)
                else:
                    self._may_replace(entry)
                    self._prepared = Prepared(name, copy=keeper.stage(self._pinned(entry)))
            except OSError as error:
                raise StoreError(f"checkpoint {name} cannot be put back: {error}") from error

    def put_back(self, name: str) -> dict[str, Any]:
        """See `Guard.put_back`."""
        keeper = self.keeper
        with keeper.at_once(), keeper.lock:
            try:
                self.look()
                entry = self._verified(name)
                moved = [] if self._unhurt(entry) else self._restore(entry)
                moved += self._set_aside(entry)
            except OSError as error:
                raise StoreError(f"checkpoint {name} cannot be put back: {error}") from error
            finally:
                self.forget()
            keeper.write()
            told = {"probe_batch": entry.probe_batch} if entry.probe_batch else {}
            return {"path": entry.path, "moved": [str(path) for path in moved], **told}

    def forget(self) -> None:
        """Remove what was prepared and not used."""
        prepared, self._prepared = self._prepared, None
        self.keeper.reserved = ""
        if prepared is not None and prepared.copy is not None:
            self.keeper.pins.unstage(prepared.copy)

    def _verified(self, name: str) -> Entry:
        entry = self.keeper.register.get(name)
        if entry is None or entry.state != VERIFIED:
            state = "is not known" if entry is None else f"is {entry.state}"
            raise StoreError(f"checkpoint {name} {state}: only a verified one is put back")
        return entry

    def _pinned(self, entry: Entry) -> Entry:
        if entry.pinned:
            return entry
        raise StoreError(
            f"checkpoint {entry.id} is not in {entry.path} any more, and was not pinned",
            hint="supervise checkpoints RUN lists those that are",
        )

    def _unhurt(self, entry: Entry) -> bool:
        """Whether what was verified lies where the job looks for it."""
        prepared = self._prepared
        if prepared is not None and prepared.id == entry.id:
            return prepared.stamp is not None and discovery.stamp(entry.path) == prepared.stamp
        return self._lies(entry)

    def _lies(self, entry: Entry) -> bool:
        """Read it where the job looks for it; what cannot be read is not there."""
        try:
            return entry.there and not self.keeper.pins.differs(entry, Path(entry.path))
        except InterruptedError:
            raise
        except OSError:
            return False

    def _restore(self, entry: Entry) -> list[Path]:
        keeper, prepared = self.keeper, self._prepared
        self._may_replace(entry)
        copy = prepared.copy if prepared is not None and prepared.id == entry.id else None
        before = keeper.pins.place(entry, copy or keeper.stage(self._pinned(entry)))
        for other in keeper.register.entries:
            if other.path == entry.path and other.there and other is not entry:
                self._left(other)
        entry.there, entry.stamp = True, discovery.stamp(entry.path) or ()
        return [] if before is None else [before]

    def _set_aside(self, entry: Entry) -> list[Path]:
        """Move what is newer than `entry`, or bad, out of the job's way."""
        moved = []
        for other, newer in self._others(entry):
            if other.there and (newer or other.state == BAD):
                path = Path(other.path)
                if path.exists():
                    moved.append(self.keeper.pins.aside(path, other.id))
                self._left(other)
            elif newer and other.state == FOUND and not other.there:  # it is held only
                self._left(other)
        return moved

    def _others(self, entry: Entry) -> list[tuple[Entry, bool]]:
        """Return each other one of the job's own, and whether it is newer.

        By its step or by when it was saved.
        """
        entries = list(self.keeper.register.entries)
        at = entries.index(entry)
        others = [(i, e) for i, e in enumerate(entries) if e is not entry and self.owners.ours(e)]
        return [(other, i > at or other.step > entry.step) for i, other in others]

    def _may_replace(self, entry: Entry) -> None:
        """Make sure that what lies in its place is no other run's. Raises StoreError."""
        with self.keeper.lock:
            whose = self.owners.claimant(discovery.stamp(entry.path) or ())
        if whose:
            raise StoreError(
                f"checkpoint {entry.id} is not put back to {entry.path}: what lies there by now is "
                f"of the run {whose}"
            )

    def _may_set_aside(self, entry: Entry) -> None:
        """Make sure that what is in the way can be moved. Raises OSError.

        For that its directory must be written to; room it takes none.
        """
        with self.keeper.lock:
            others = self._others(entry)
            there = [Path(o.path) for o, newer in others if o.there and (newer or o.state == BAD)]
        for folder in {path.parent for path in there if path.exists()}:
            mine = files.unpredictable(folder / "supervise")
            try:
                os.close(files.create(mine))
                mine.unlink()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise

    def _left(self, entry: Entry) -> None:
        """It is not where the job left it."""
        entry.there = False
        if entry.state == VERIFIED and not entry.pinned:
            self.keeper.gone(entry, "it was set aside")
        elif entry.state == FOUND:
            entry.state, entry.problems = VANISHED, ["it was set aside before it was verified"]
