"""Keeps copies of checkpoints out of reach of the job's own rotation, and restores them.

    <run>/checkpoints/<id>/data/...        the files          .../<id>/manifest.json
    <run>/checkpoints/.<id>/data/...       a copy that is incomplete or not verified yet
    <run>/checkpoints/aside/<id>-<name>    files that a restarted job must not load

Each copy is synced and hashed before it is renamed to its final name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import StoreError
from ..store import files
from ..store.files import sync_directory
from .discovery import stamp
from .registry import PINNED, Entry

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
        for left in self._home.glob(".ckpt-*"):
            self.unstage(left)

    def folder(self, entry: Entry) -> Path:
        """Return the directory of a pinned checkpoint."""
        return self._home / entry.id

    def data(self, entry: Entry) -> Path:
        """Return the pinned file or directory; it has the name that the job gave it."""
        return self.folder(entry) / DATA / entry.name

    def no_room(self, size: int) -> str:
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
        self.keep(entry)

    def copy(self, entry: Entry) -> Path:
        """Copy an unverified checkpoint and return the path; then call `keep` or `drop`.

        Raises:
            StoreError: it was overwritten meanwhile.
            OSError: it cannot be copied or linked. InterruptedError: `stopped`.
        """
        fresh = self._fetch(entry, {name: None for name, *_ in entry.stamp})
        if stamp(entry.path) != entry.stamp:
            self.drop(entry)
            raise StoreError(f"{entry.path} was overwritten while it was copied")
        return fresh / DATA / entry.name

    def unverified(self, entry: Entry) -> Path | None:
        """Return what `copy` made, None if there is no such copy."""
        found = self._fresh(entry) / DATA / entry.name
        return found if found.exists() else None

    def keep(self, entry: Entry) -> None:
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

    def differs(self, entry: Entry, path: Path) -> str:
        """Return how the files at `path` differ from the verified ones, "" if they do not.

        Raises:
            OSError: they exist and cannot be read. InterruptedError: `stopped`.
        """
        for name, wanted in entry.hashes.items():
            file = _member(path, name, entry)
            try:
                if self._digest(file) != wanted:
                    return f"{file} does not have the hash that was verified"
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                return f"{file}: {error.strerror}"
        return "" if entry.hashes else "it was never verified"

    def differs_by_stamp(self, entry: Entry) -> bool:
        """Whether a linked copy was overwritten in place, by size and time."""
        return stamp(str(self.data(entry))) != entry.stamp

    def stage(self, entry: Entry) -> Path:
        """Copy a pinned checkpoint to a hidden name beside the job's path; return it.

        Raises:
            StoreError: the pinned copy is damaged.
            OSError: it cannot be read or copied. InterruptedError: `stopped`.
        """
        pinned, path = self.data(entry), Path(entry.path)
        wrong = self.differs(entry, pinned)
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

    def place(self, entry: Entry, fresh: Path) -> Path | None:
        """Move the staged copy to the job's path; return the new path of the old file, if any.

        A file is replaced atomically. A directory is moved aside first, so for an instant there is
        none.

        Raises:
            OSError: the old file is unchanged, and the staged copy is removed.
        """
        path = Path(entry.path)
        try:
            moved = self.aside(path, f"before-{entry.id}", keep=True) if path.exists() else None
            fresh.replace(path)
        except BaseException:
            _remove(fresh)
            raise
        sync_directory(path.parent)
        return moved

    def unstage(self, fresh: Path) -> None:
        """Remove an unused copy if it exists."""
        with suppress(OSError):
            _remove(fresh)

    def aside(self, path: Path, mark: str, *, keep: bool = False) -> Path:
        """Move the file at `path` out of the job's way, and return its new path.

        It goes into the run directory or, if that is on another disk, to a hidden name beside it:
        a copy might not fit. A file that is replaced atomically may `keep` its name as well.
        Raises OSError.
        """
        home = self._home / ASIDE
        files.make_directory(home)
        there = home / f"{mark}-{path.name}"
        near = path.with_name(f".aside-{mark}-{path.name}")
        _remove(there)
        _remove(near)
        keep = keep and path.is_file()
        try:
            there.hardlink_to(path) if keep else path.rename(there)
        except OSError:
            there = near
            near.hardlink_to(path) if keep else path.rename(near)
        sync_directory(path.parent)
        return there

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
        for name, wanted in hashes.items():
            old = source / name if directory else source
            new = target / name if directory else target
            new.parent.mkdir(parents=True, exist_ok=True)
            folders |= {new.parent}
            if link:
                os.link(old, new)
            else:
                self._copy(old, new)
            if wanted is not None and self._digest(new) != wanted:
                raise StoreError(f"{old} has changed since it was verified")
        for folder in folders:
            sync_directory(folder)

    def _copy(self, source: Path, target: Path) -> None:
        with _reading(source) as old, os.fdopen(files.create(target), "wb") as new:
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
