"""Keeps checkpoints: hard-link holds before the verification, pinned copies after it.

    <run>/checkpoints/.held-<id>/data/...

A hard link costs nothing while the job keeps the file, and its disk blocks afterwards: few
checkpoints are held, and none while the disk is short of space. A file that the job overwrites in
place changes in the hold too; `HardLinkHolds.intact` detects that.

The register and the holds are changed under `Retention.lock`, pinned files under `Retention.disk`;
code that needs both takes `disk` first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..core.model.checkpoint_registry import WEIGHTS_ONLY
from ..errors import StoreError
from ..store import files
from .discovery import stamp
from .notifications import CheckpointNotifications
from .pin_store import PinStore, is_short
from .registry import COPIED, FOUND, PINNED, UNVERIFIED, VANISHED, VERIFIED, Entry, Register, Stamp

MAX_HELD = 2  # besides the pinned ones: the one being verified and the newest; project default
HELD = ".held-"
OFTEN = 5  # overwrites without a verdict before a note is sent; project default
CLOSE_S = 2.0


class HardLinkHolds:
    """The held checkpoints of one run. Callers hold the lock of the register.

    Args:
        home: directory of the pinned copies; holds of a supervisor that died are removed.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._held: dict[str, Entry] = {}  # oldest first
        self._tried: set[str] = set()
        self._busy = ""
        for left in home.glob(f"{HELD}*"):
            files.remove_tree(left)

    def path(self, entry: Entry) -> Path | None:
        """Return the held file or directory, None if it is not held."""
        try:
            return next((self._folder(entry) / "data").iterdir(), None)
        except OSError:
            return None

    def intact(self, entry: Entry, wanted: Stamp | None = None) -> bool:
        """Whether it is held with the content of its stamp; its present name does not matter.

        Args:
            wanted: an earlier stamp; default: that of the entry.
        """
        wanted = entry.stamp if wanted is None else wanted
        if entry.id not in self._held or (path := self.path(entry)) is None:
            return False
        held = stamp(str(path)) or ()
        if path.is_dir():
            return held == wanted
        return [row[1:] for row in held] == [row[1:] for row in wanted]

    def exclusive(self, entry: Entry) -> bool:
        """Whether it is intact and its files have no other name, so that it cannot change."""
        path = self.path(entry)
        if path is None or not self.intact(entry):
            return False
        held = [path / name for name, *_ in entry.stamp] if path.is_dir() else [path]
        try:
            return all(file.stat().st_nlink == 1 for file in held)
        except OSError:
            return False

    def acquire(self, entry: Entry) -> Path | None:
        """Keep an intact hold until `release` and return its path; None if there is none."""
        if not self.intact(entry):
            return None
        self._busy = entry.id
        return self.path(entry)

    def release(self, entry: Entry) -> None:
        """End `acquire`; the hold is removed if there is a verdict."""
        self._busy = ""
        if entry.state != FOUND:
            self.remove(entry)

    def update(self, ready: Sequence[Entry]) -> list[Entry]:
        """Hold the newest entries, remove surplus holds, and return the removed ones.

        Args:
            ready: complete, not verified, oldest first.
        """
        for entry in ready[-MAX_HELD:]:
            if entry.id not in self._held and entry.id not in self._tried:
                self._hold(entry)
        idle = [e for e in self._held.values() if e.id != self._busy]
        drop = [e for e in idle if e.state != FOUND]
        idle = [e for e in idle if e.state == FOUND]
        drop += idle[: max(0, len(self._held) - len(drop) - MAX_HELD)]
        if idle and is_short(self._home, max(e.bytes for e in idle)):
            drop += [e for e in idle if e not in drop]
        for entry in drop:
            self.remove(entry)
        return drop

    def verifiable(self, entries: Sequence[Entry], ready: Sequence[Entry]) -> list[Entry]:
        """Return those of `entries` that are ready, or held after the job removed the files."""
        removed = {e.id for e in self._held.values() if e.state == FOUND and not e.present}
        names = removed | {e.id for e in ready}
        return [e for e in entries if e.id in names]

    def remove(self, entry: Entry) -> None:
        """Remove the links of one entry."""
        self._held.pop(entry.id, None)
        files.remove_tree(self._folder(entry))

    def clear(self) -> None:
        """Remove all links."""
        for entry in list(self._held.values()):
            self.remove(entry)

    def _folder(self, entry: Entry) -> Path:
        return self._home / f"{HELD}{entry.id}"

    def _hold(self, entry: Entry) -> None:
        self._tried.add(entry.id)
        source = Path(entry.path)
        target = self._folder(entry) / "data" / entry.name
        if is_short(self._home, entry.bytes):
            return
        try:
            names = [name for name, *_ in entry.stamp] if source.is_dir() else [""]
            files.make_directory(self._folder(entry))
            for name in names:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(source / name, target / name)
        except OSError:  # another file system, or just removed
            self.remove(entry)
            return
        self._held[entry.id] = entry
        if not self.intact(entry):
            self.remove(entry)


class OverwriteTracker:
    """Paths that the job overwrites faster than they can be verified.

    A path is listed from the first such overwrite until a verification finishes in time.
    """

    def __init__(self, notifications: CheckpointNotifications) -> None:
        self._notifications = notifications
        self._count: dict[str, int] = {}  # since the last verdict

    def __contains__(self, path: str) -> bool:
        return path in self._count

    def __len__(self) -> int:
        return len(self._count)

    def on_overwrite(self, path: str) -> None:
        """Count an overwrite before a verdict; paths that no longer exist are dropped."""
        counts = {**self._count, path: self._count.get(path, 0) + 1}
        self._count = {each: count for each, count in counts.items() if Path(each).exists()}
        if self._count.get(path) == OFTEN:
            self._notifications.note(
                f"{path} was overwritten {OFTEN} times in a row before it could be verified: none "
                "of these checkpoints can be used for a rollback; save less often, or keep files "
                "longer",
                once=f"overwritten {path}",
            )

    def on_verdict(self, path: str, *, overwritten: bool) -> None:
        """Record a verdict. Args: overwritten: the path now has another checkpoint."""
        if overwritten:
            self._count[path] = 0
        else:
            self._count.pop(path, None)


class Retention:
    """Decides which checkpoints of a register stay held or pinned.

    Attributes:
        lock: of the register; the loop never waits for it.
        disk: of the pinned files.
        closed: set at the end of the run; copies under way stop.
        reserved: id of the checkpoint about to be restored; it stays pinned.
        overwrites: for these paths a copy is verified.

    Args:
        keep_good: number of newest good checkpoints that stay pinned.
        link: pin by hard links, not by copies.
    """

    def __init__(
        self,
        register: Register,
        notifications: CheckpointNotifications,
        run: Path,
        *,
        keep_good: int,
        link: bool,
    ) -> None:
        self.register, self.notifications = register, notifications
        self.keep_good, self.link = keep_good, link
        self.lock, self.disk = threading.RLock(), threading.RLock()
        self.closed, self._claimed = threading.Event(), threading.Event()
        self.reserved = ""
        self.overwrites = OverwriteTracker(notifications)
        self.pins = PinStore(
            run, link=link, stopped=lambda: self.closed.is_set() or self._claimed.is_set()
        )
        self.holds = HardLinkHolds(run / PINNED)
        self.pins.clear()
        for entry in register.entries:
            entry.pinned = entry.pinned and self.pins.data(entry).exists()
            if entry.state == COPIED or (entry.state == FOUND and not entry.present):
                self.release(entry)  # no verification is under way after a restart

    @contextmanager
    def exclusive_disk(self) -> Iterator[None]:
        """Lock the pinned files at once; a copy under way is given up and made later."""
        self._claimed.set()
        with self.disk:
            self._claimed.clear()
            yield

    def write(self) -> None:
        """Write the register; a failure is reported, and the next change writes it again."""
        try:
            self.register.write()
        except OSError as error:
            self.notifications.note(
                f"the register of checkpoints cannot be written: {error}; a supervisor that adopts "
                "this run will not know the newest ones",
                once="write",
            )

    def hold(self, ready: Sequence[Entry]) -> bool:
        """Hold the newest ready entries, see `HardLinkHolds.update`.

        Returns:
            Whether the last link to the files of any entry was removed.
        """
        dropped = [e for e in self.holds.update(ready) if e.state == FOUND and not e.present]
        for entry in dropped:
            self.release(entry)
        return bool(dropped)

    def close(self) -> None:
        """Remove all holds at the end of the run, and write the register."""
        if not self.lock.acquire(timeout=CLOSE_S):
            return  # the disk hangs
        try:
            self.holds.clear()
            for entry in self.register.entries:
                if entry.state == FOUND and stamp(entry.path) is None:
                    entry.present = False
                    self.release(entry)
            self.write()
        finally:
            self.lock.release()

    def unpin_old(self, judged: Collection[str], suspects: Collection[str]) -> None:
        """Remove pinned copies that newer good ones replace.

        Args:
            judged: ids that the run has had time to suspect; others are neither removed nor
                counted.
            suspects: ids that are removed first, and never count as good.
        """
        with self.disk, self.lock:
            known = [e for e in self.register.entries if e.pinned and e.id in judged]
            sound = [e for e in known if e.state == VERIFIED]
            good = [e for e in sound if e.id not in suspects]
            keep = (good or sound)[-self.keep_good :]
            whole = [e for e in good or sound if e.resumable != WEIGHTS_ONLY]
            if whole and whole[-1] not in keep:  # a relaunch prefers it to newer ones
                keep[0] = whole[-1]
            drop = [e for e in known if e not in keep and e.id != self.reserved]
            for entry in drop:
                self.pins.drop(entry)
                entry.pinned = False
                if not entry.present and entry.state == VERIFIED:
                    self.mark_unavailable(entry, "newer good ones are kept")
            if drop:
                self.write()

    def on_lost(self, entry: Entry) -> None:
        """Update an entry whose files were changed or removed at its path."""
        if entry.pinned and self.link and self.pins.differs_by_stamp(entry):
            self.pins.drop(entry)
            entry.pinned = False
        if entry.state == VERIFIED and not entry.pinned:
            self.mark_unavailable(entry, "its files were changed or removed")
        elif entry.state == UNVERIFIED and entry.id in self.notifications.delivered:
            self.notifications.unavailable(entry, "; ".join(entry.problems))

    def stage(self, entry: Entry) -> Path:
        """See `PinStore.stage`. A damaged copy without another is marked as gone."""
        try:
            return self.pins.stage(entry)
        except StoreError as error:
            with self.lock:
                if entry.state == VERIFIED and not entry.present:
                    self.mark_unavailable(entry, str(error))
                    self.write()
            raise

    def mark_unavailable(self, entry: Entry, why: str) -> None:
        """Record and report that no copy of a good checkpoint is left."""
        entry.state, entry.problems = VANISHED, [why]
        self.notifications.unavailable(entry, why)

    def has_room(self, entry: Entry) -> bool:
        """Whether the disk has room for a pinned copy; if not, a note says why."""
        why = self.pins.no_room(entry.bytes)
        if why:
            self.notifications.note(f"checkpoints are not pinned: {why}", once="room")
        return not why

    def release(self, entry: Entry, *, overwritten: bool = False) -> None:
        """Drop copies of an entry without a verdict; if its files are intact it is tried again."""
        if overwritten:
            self.overwrites.on_overwrite(entry.path)
        self.pins.drop(entry)
        entry.pinned = False
        intact = entry.present and stamp(entry.path) == entry.stamp
        if entry.state == COPIED and (intact or self.holds.intact(entry)):
            entry.state = FOUND
        elif entry.state == COPIED or (entry.state == FOUND and not entry.present):
            what = "overwritten" if entry.state == COPIED else "removed"
            entry.state, entry.present = VANISHED, False
            entry.problems = [f"it was {what} before it was verified"]
