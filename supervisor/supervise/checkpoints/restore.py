"""Restores a checkpoint to the job's path: prepared while it runs, completed when it has ended."""

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
from .discovery import OwnershipResolver
from .registry import BAD, FOUND, VANISHED, VERIFIED, Entry, Stamp
from .retention import Retention


@dataclass(frozen=True)
class Prepared:
    """A checkpoint ready to be restored: intact at its path with `stamp`, else a staged `copy`."""

    id: str
    stamp: Stamp | None = None
    copy: Path | None = None


@dataclass
class Restorer:
    """Restores kept checkpoints.

    Attributes:
        owners: decides which files are another job's; those are never touched.
        scan: updates the register with the job's last writes.
    """

    kept: Retention
    owners: OwnershipResolver
    scan: Callable[[], object]
    _prepared: Prepared | None = field(default=None, init=False)

    def prepare(self, name: str) -> None:
        """See `CheckpointService.prepare`."""
        kept = self.kept
        with kept.exclusive_disk():
            self.discard_prepared()
            with kept.lock:
                entry = self._verified(name)
            kept.reserved = name
            try:
                self._check_set_aside(entry)
                stamp = discovery.stamp(entry.path)
                if self._reads_intact(entry):
                    self._prepared = Prepared(name, stamp=stamp)
                else:
                    self._check_replace(entry)
                    self._prepared = Prepared(name, copy=kept.stage(self._require_pinned(entry)))
            except OSError as error:
                raise StoreError(f"checkpoint {name} cannot be restored: {error}") from error

    def restore(self, name: str) -> dict[str, Any]:
        """See `CheckpointService.restore`."""
        kept = self.kept
        with kept.exclusive_disk(), kept.lock:
            try:
                self.scan()
                entry = self._verified(name)
                moved = [] if self._intact(entry) else self._replace(entry)
                moved += self._set_aside(entry)
            except OSError as error:
                raise StoreError(f"checkpoint {name} cannot be restored: {error}") from error
            finally:
                self.discard_prepared()
            kept.write()
            facts = {"probe_batch": entry.probe_batch, "counters": entry.counters}
            reported = {key: value for key, value in facts.items() if value}
            return {"path": entry.path, "moved": [str(path) for path in moved], **reported}

    def discard_prepared(self) -> None:
        """Remove an unused prepared copy."""
        prepared, self._prepared = self._prepared, None
        self.kept.reserved = ""
        if prepared is not None and prepared.copy is not None:
            self.kept.pins.unstage(prepared.copy)

    def _verified(self, name: str) -> Entry:
        entry = self.kept.register.get(name)
        if entry is None or entry.state != VERIFIED:
            state = "is not known" if entry is None else f"is {entry.state}"
            raise StoreError(
                f"checkpoint {name} {state}: only a verified one can be restored",
                hint="list them with `supervise checkpoints RUN`",
            )
        return entry

    def _require_pinned(self, entry: Entry) -> Entry:
        if entry.pinned:
            return entry
        raise StoreError(
            f"checkpoint {entry.id} is no longer in {entry.path}, and was not pinned",
            hint="list the pinned ones with `supervise checkpoints RUN`",
        )

    def _intact(self, entry: Entry) -> bool:
        """Whether the verified files are at the job's path."""
        prepared = self._prepared
        if prepared is not None and prepared.id == entry.id:
            return prepared.stamp is not None and discovery.stamp(entry.path) == prepared.stamp
        return self._reads_intact(entry)

    def _reads_intact(self, entry: Entry) -> bool:
        """Whether the files at the job's path have the verified hashes; unreadable ones do not."""
        try:
            return entry.present and not self.kept.pins.differs(entry, Path(entry.path))
        except InterruptedError:
            raise
        except OSError:
            return False

    def _replace(self, entry: Entry) -> list[Path]:
        kept, prepared = self.kept, self._prepared
        self._check_replace(entry)
        copy = prepared.copy if prepared is not None and prepared.id == entry.id else None
        before = kept.pins.place(entry, copy or kept.stage(self._require_pinned(entry)))
        for other in kept.register.entries:
            if other.path == entry.path and other.present and other is not entry:
                self._mark_moved(other)
        entry.present, entry.stamp = True, discovery.stamp(entry.path) or ()
        return [] if before is None else [before]

    def _set_aside(self, entry: Entry) -> list[Path]:
        """Move checkpoints that are newer than `entry`, or bad, out of the job's way."""
        moved = []
        for other, newer in self._own_others(entry):
            if other.present and (newer or other.state == BAD):
                path = Path(other.path)
                if path.exists():
                    moved.append(self.kept.pins.aside(path, other.id))
                self._mark_moved(other)
            elif newer and other.state == FOUND and not other.present:  # only held
                self._mark_moved(other)
        return moved

    def _own_others(self, entry: Entry) -> list[tuple[Entry, bool]]:
        """Return the job's other checkpoints, each with whether its step or save is newer."""
        entries = list(self.kept.register.entries)
        at = entries.index(entry)
        others = [(i, e) for i, e in enumerate(entries) if e is not entry and self.owners.is_own(e)]
        return [(other, i > at or other.step > entry.step) for i, other in others]

    def _check_replace(self, entry: Entry) -> None:
        """Raise StoreError if the file at its path belongs to another run."""
        with self.kept.lock:
            run = self.owners.claimant(discovery.stamp(entry.path) or ())
        if run:
            raise StoreError(
                f"checkpoint {entry.id} is not restored: the run {run} has written {entry.path} "
                "since; give each job a checkpoint directory of its own"
            )

    def _check_set_aside(self, entry: Entry) -> None:
        """Check that the files in the way can be moved. Raises OSError.

        A move needs write permission for the directory, and no disk space.
        """
        with self.kept.lock:
            others = self._own_others(entry)
            paths = [Path(o.path) for o, newer in others if o.present and (newer or o.state == BAD)]
        for folder in {path.parent for path in paths if path.exists()}:
            trial = files.unpredictable(folder / "supervise")
            try:
                os.close(files.create(trial))
                trial.unlink()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise

    def _mark_moved(self, entry: Entry) -> None:
        """Record that the files were moved from the job's path."""
        entry.present = False
        if entry.state == VERIFIED and not entry.pinned:
            self.kept.mark_unavailable(entry, "it was set aside")
        elif entry.state == FOUND:
            entry.state, entry.problems = VANISHED, ["it was set aside before it was verified"]
