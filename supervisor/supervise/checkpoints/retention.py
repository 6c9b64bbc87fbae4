"""Keeps checkpoints: hard-link holds before the verification, pinned copies after it.

    <run>/checkpoints/.held-<id>/data/...

A hard link costs nothing while the job keeps the file, and its disk blocks afterwards: few
checkpoints are held, and none while the disk is short of space. A file that the job overwrites in
place changes in the hold too; `HardLinkHolds.is_intact` detects that.

The register and the holds are changed under `Retention.lock`, pinned files under `Retention.disk`;
code that needs both takes `disk` first.

    <run>/checkpoints/<id>/data/...        the files          .../<id>/manifest.json
    <run>/checkpoints/.<id>/data/...       a copy that is incomplete or not verified yet
    <run>/checkpoints/aside/<id>-<name>    files that a restarted job must not load

Each copy is synced and hashed before it is renamed to its final name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..core.model.checkpoint_registry import WEIGHTS_ONLY
from ..errors import StoreError
from ..store import files
from ..store.files import sync_directory
from .discovery import stamp_files
from .registry import (
    COPIED,
    FOUND,
    PINNED,
    UNVERIFIED,
    VANISHED,
    VERIFIED,
    CheckpointNotifications,
    Entry,
    Register,
    Stamp,
)

PIECE = 1 << 24  # bytes
DATA, ASIDE = "data", "aside"
RESERVE = 0.05  # share of the disk that stays free, but at least
RESERVE_BYTES = 1 << 30  # so many bytes; project defaults


class PinStore:
    """The pinned checkpoints of one run.

    Args:
        run: the run directory.
        link: pin by hard links: free, and lost when the job overwrites the files in place.
        stopped: called between two pieces; true ends a copy with InterruptedError.
    """

    def __init__(self, run: Path, *, link: bool, stopped: Callable[[], bool]) -> None:
        self._home = run / PINNED
        self._link = link
        self._stopped = stopped

    def clear(self) -> None:
        """Remove unfinished and unverified copies of a supervisor that died."""
        for remnant in self._home.glob(".ckpt-*"):
            self.remove_staged(remnant)

    def folder(self, entry: Entry) -> Path:
        """Return the directory of a pinned checkpoint."""
        return self._home / entry.id

    def data(self, entry: Entry) -> Path:
        """Return the pinned file or directory; it has the name that the job gave it."""
        return self.folder(entry) / DATA / entry.name

    def explain_no_room(self, size: int) -> str:
        """Return why `size` bytes cannot be pinned, "" if they can."""
        if self._link:
            return ""
        files.make_directory(self._home)
        free, reserve = _space(self._home)
        if free - size >= reserve:
            return ""
        return (
            f"{free / 1e9:.1f} GB are free, {size / 1e9:.1f} GB are needed, and "
            f"{reserve / 1e9:.1f} GB are reserved for the job; free disk space for "
            f"{self._home} to pin them again"
        )

    def pin(self, entry: Entry, source: Path | None = None, *, link: bool = False) -> None:
        """Pin a verified checkpoint; the copy has the verified hashes.

        Args:
            source: of its files, if not its path. link: link instead of copying.

        Raises:
            StoreError: its files have changed since.
            OSError: it cannot be copied or linked. InterruptedError: `stopped`.
        """
        self._fetch(entry, entry.hashes, source, link=link)
        self.commit_staged_copy(entry)

    def copy(self, entry: Entry) -> Path:
        """Copy an unverified checkpoint and return the path; then call `keep` or `drop`.

        Raises:
            StoreError: it was overwritten meanwhile.
            OSError: it cannot be copied or linked. InterruptedError: `stopped`.
        """
        fresh = self._fetch(entry, {name: None for name, *_ in entry.stamp})
        if stamp_files(entry.path) != entry.stamp:
            self.drop(entry)
            raise StoreError(f"{entry.path} was overwritten while it was copied")
        return fresh / DATA / entry.name

    def unverified(self, entry: Entry) -> Path | None:
        """Return what `copy` made, None if there is no such copy."""
        copy = self._fresh(entry) / DATA / entry.name
        return copy if copy.exists() else None

    def commit_staged_copy(self, entry: Entry) -> None:
        """Make the copy the pinned one. Raises OSError; the copy is removed then."""
        files.remove_tree(self.folder(entry))
        try:
            self._fresh(entry).rename(self.folder(entry))
        except OSError:
            self.drop(entry)
            raise
        sync_directory(self._home)

    def _fresh(self, entry: Entry) -> Path:
        return self._home / f".{entry.id}"

    def _fetch(
        self,
        entry: Entry,
        hashes: Mapping[str, str | None],
        source: Path | None = None,
        *,
        link: bool = False,
    ) -> Path:
        fresh = self._fresh(entry)
        files.remove_tree(fresh)
        try:
            files.make_directory(self._home)
            files.make_directory(fresh)
            target = fresh / DATA / entry.name
            self._transfer(source or Path(entry.path), target, hashes, link=link or self._link)
        except BaseException:
            files.remove_tree(fresh)
            raise
        return fresh

    def drop(self, entry: Entry) -> None:
        """Remove the pinned copy and any unfinished one."""
        for folder in (self.folder(entry), self._fresh(entry)):
            files.remove_tree(folder)

    def explain_differences(self, entry: Entry, path: Path) -> str:
        """Return how the files at `path` differ from the verified ones, "" if they do not.

        Raises:
            OSError: they exist and cannot be read. InterruptedError: `stopped`.
        """
        for name, digest in entry.hashes.items():
            file = _member(path, name, entry)
            try:
                if self._digest(file) != digest:
                    return f"{file} does not have the hash that was verified"
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                return f"{file}: {error.strerror}"
        return "" if entry.hashes else "it was never verified"

    def differs_by_stamp(self, entry: Entry) -> bool:
        """Whether a linked copy was overwritten in place, by size and time."""
        return stamp_files(str(self.data(entry))) != entry.stamp

    def stage(self, entry: Entry) -> Path:
        """Copy a pinned checkpoint to a hidden name beside the job's path; return it.

        Raises:
            StoreError: the pinned copy is damaged.
            OSError: it cannot be read or copied. InterruptedError: `stopped`.
        """
        pinned, path = self.data(entry), Path(entry.path)
        wrong = self.explain_differences(entry, pinned)
        if wrong:
            raise StoreError(f"the pinned copy of {entry.id} is damaged: {wrong}")
        fresh = path.with_name(f".{path.name}.{entry.id}")
        _remove(fresh)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._transfer(pinned, fresh, entry.hashes, link=False)
        except BaseException:
            _remove(fresh)
            raise
        return fresh

    def replace_job_file(self, entry: Entry, staged: Path) -> Path | None:
        """Move the staged copy to the job's path; return the new path of the old file, if any.

        A file is replaced atomically. A directory is moved aside first, so for an instant there is
        none.

        Raises:
            OSError: the old file is unchanged, and the staged copy is removed.
        """
        path = Path(entry.path)
        try:
            moved = (
                self.move_aside(path, f"before-{entry.id}", keep=True) if path.exists() else None
            )
            staged.replace(path)
        except BaseException:
            _remove(staged)
            raise
        sync_directory(path.parent)
        return moved

    def remove_staged(self, fresh: Path) -> None:
        """Remove an unused copy if it exists."""
        with suppress(OSError):
            _remove(fresh)

    def move_aside(self, path: Path, mark: str, *, keep: bool = False) -> Path:
        """Move the file at `path` out of the job's way, and return its new path.

        It goes into the run directory or, if that is on another disk, to a hidden name beside it:
        a copy might not fit. A file that is replaced atomically may `keep` its name as well.
        Raises OSError.
        """
        home = self._home / ASIDE
        files.make_directory(home)
        target = home / f"{mark}-{path.name}"
        near = path.with_name(f".aside-{mark}-{path.name}")
        _remove(target)
        _remove(near)
        keep = keep and path.is_file()
        try:
            target.hardlink_to(path) if keep else path.rename(target)
        except OSError:
            target = near
            near.hardlink_to(path) if keep else path.rename(near)
        sync_directory(path.parent)
        return target

    def _transfer(
        self, source: Path, target: Path, hashes: Mapping[str, str | None], *, link: bool
    ) -> None:
        """Copy or link all files of one checkpoint; `hashes`: by file, None if unknown.

        Raises:
            StoreError: a file does not have its hash.
            OSError: it cannot be read or written.
        """
        directory = source.is_dir()
        folders = {target.parent}
        for name, digest in hashes.items():
            old = source / name if directory else source
            new = target / name if directory else target
            new.parent.mkdir(parents=True, exist_ok=True)
            folders |= {new.parent}
            if link:
                os.link(old, new)
            else:
                self._copy(old, new)
            if digest is not None and self._digest(new) != digest:
                raise StoreError(f"{old} has changed since it was verified")
        for folder in folders:
            sync_directory(folder)

    def _copy(self, source: Path, target: Path) -> None:
        with _reading(source) as old, os.fdopen(files.create_file(target), "wb") as new:
            by_kernel = True  # shares disk blocks if the file system can
            while not self._interrupted():
                try:
                    count = (
                        os.copy_file_range(old.fileno(), new.fileno(), PIECE) if by_kernel else 0
                    )
                except OSError:  # not supported between these file systems
                    count, by_kernel = 0, False
                if not count:
                    old.seek(new.seek(0, os.SEEK_END))
                    piece = old.read(PIECE)
                    count = new.write(piece)
                    new.flush()
                if not count:
                    break
            os.fsync(new.fileno())
        shutil.copystat(source, target)

    def _digest(self, path: Path) -> str:
        sha = hashlib.sha256()
        with _reading(path) as file:
            while not self._interrupted() and (piece := file.read(PIECE)):
                sha.update(piece)
        return sha.hexdigest()

    def _interrupted(self) -> bool:
        if self._stopped():
            raise InterruptedError("the supervisor is ending")
        return False


def _reading(path: Path) -> BinaryIO:
    return os.fdopen(files.open_file(path, foreign=True), "rb")


def _member(path: Path, name: str, entry: Entry) -> Path:
    single = list(entry.files) == [entry.name] and not path.is_dir()
    return path if single else path / name


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_short(home: Path, size: int) -> bool:
    """Whether keeping `size` bytes below `home` would eat into the reserve for the job's saves."""
    try:
        files.make_directory(home)
        free, reserve = _space(home)
    except OSError:
        return True
    return free - size < reserve


def _space(home: Path) -> tuple[int, float]:
    """Return free and reserved bytes of a disk."""
    disk = shutil.disk_usage(home)
    return disk.free, max(disk.total * RESERVE, RESERVE_BYTES)


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
        for remnant in home.glob(f"{HELD}*"):
            files.remove_tree(remnant)

    def path(self, entry: Entry) -> Path | None:
        """Return the held file or directory, None if it is not held."""
        try:
            return next((self._folder(entry) / "data").iterdir(), None)
        except OSError:
            return None

    def is_intact(self, entry: Entry, required_stamp: Stamp | None = None) -> bool:
        """Whether it is held with the content of its stamp; its present name does not matter.

        Args:
            required_stamp: an earlier stamp; default: that of the entry.
        """
        required_stamp = entry.stamp if required_stamp is None else required_stamp
        if entry.id not in self._held or (path := self.path(entry)) is None:
            return False
        held_stamp = stamp_files(str(path)) or ()
        if path.is_dir():
            return held_stamp == required_stamp
        return [row[1:] for row in held_stamp] == [row[1:] for row in required_stamp]

    def is_exclusive(self, entry: Entry) -> bool:
        """Whether it is intact and its files have no other name, so that it cannot change."""
        path = self.path(entry)
        if path is None or not self.is_intact(entry):
            return False
        held_files = [path / name for name, *_ in entry.stamp] if path.is_dir() else [path]
        try:
            return all(file.stat().st_nlink == 1 for file in held_files)
        except OSError:
            return False

    def acquire(self, entry: Entry) -> Path | None:
        """Keep an intact hold until `release` and return its path; None if there is none."""
        if not self.is_intact(entry):
            return None
        self._busy = entry.id
        return self.path(entry)

    def release(self, entry: Entry) -> None:
        """End `acquire`; the hold is removed if there is a verdict."""
        self._busy = ""
        if entry.state != FOUND:
            self.remove(entry)

    def hold_newest(self, ready: Sequence[Entry]) -> list[Entry]:
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

    def verifiable_entries(self, entries: Sequence[Entry], ready: Sequence[Entry]) -> list[Entry]:
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
        if not self.is_intact(entry):
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
        self._count = {name: count for name, count in counts.items() if Path(name).exists()}
        if self._count.get(path) == OFTEN:
            self._notifications.queue_note(
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
    def lock_pinned_files(self) -> Iterator[None]:
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
            self.notifications.queue_note(
                f"the register of checkpoints cannot be written: {error}; a supervisor that adopts "
                "this run will not know the newest ones",
                once="write",
            )

    def update_holds(self, ready: Sequence[Entry]) -> bool:
        """Hold the newest ready entries, see `HardLinkHolds.hold_newest`.

        Returns:
            Whether the last link to the files of any entry was removed.
        """
        dropped = [e for e in self.holds.hold_newest(ready) if e.state == FOUND and not e.present]
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
                if entry.state == FOUND and stamp_files(entry.path) is None:
                    entry.present = False
                    self.release(entry)
            self.write()
        finally:
            self.lock.release()

    def unpin_old(self, judged_ids: Collection[str], suspects: Collection[str]) -> None:
        """Remove pinned copies that newer good ones replace.

        Args:
            judged_ids: ids that the run has had time to suspect; others are neither removed nor
                counted.
            suspects: ids that are removed first, and never count as good.
        """
        with self.disk, self.lock:
            judged_entries = [e for e in self.register.entries if e.pinned and e.id in judged_ids]
            sound = [e for e in judged_entries if e.state == VERIFIED]
            good = [e for e in sound if e.id not in suspects]
            keep = (good or sound)[-self.keep_good :]
            resumable = [e for e in good or sound if e.resumable != WEIGHTS_ONLY]
            if resumable and resumable[-1] not in keep:  # a relaunch prefers it to newer ones
                keep[0] = resumable[-1]
            drop = [e for e in judged_entries if e not in keep and e.id != self.reserved]
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
            self.notifications.report_unavailable(entry, "; ".join(entry.problems))

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

    def mark_unavailable(self, entry: Entry, reason: str) -> None:
        """Record and report that no copy of a good checkpoint is left."""
        entry.state, entry.problems = VANISHED, [reason]
        self.notifications.report_unavailable(entry, reason)

    def has_room(self, entry: Entry) -> bool:
        """Whether the disk has room for a pinned copy; if not, a note says why."""
        reason = self.pins.explain_no_room(entry.bytes)
        if reason:
            self.notifications.queue_note(f"checkpoints are not pinned: {reason}", once="room")
        return not reason

    def release(self, entry: Entry, *, overwritten: bool = False) -> None:
        """Drop copies of an entry without a verdict; if its files are intact it is tried again."""
        if overwritten:
            self.overwrites.on_overwrite(entry.path)
        self.pins.drop(entry)
        entry.pinned = False
        intact = entry.present and stamp_files(entry.path) == entry.stamp
        if entry.state == COPIED and (intact or self.holds.is_intact(entry)):
            entry.state = FOUND
        elif entry.state == COPIED or (entry.state == FOUND and not entry.present):
            cause = "overwritten" if entry.state == COPIED else "removed"
            entry.state, entry.present = VANISHED, False
            entry.problems = [f"it was {cause} before it was verified"]
