"""Keeps copies of checkpoints where the job's own rotation cannot reach, and puts them back.

    <run>/checkpoints/<id>/data/...        the files          .../<id>/manifest.json
    <run>/checkpoints/.<id>/data/...       a copy that is not complete, or not verified yet
    <run>/checkpoints/aside/<id>-<name>    what a job must not take for the newest

Every copy is synced and hashed before it counts. A name appears when all of it is there.
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
from .hard_link_holds import RESERVE, RESERVE_BYTES
from .registry import PINNED, Entry

PIECE = 1 << 24  # bytes
DATA, ASIDE = "data", "aside"


class PinStore:
    """The pinned checkpoints of one run.

    Args:
        run: the run directory.
        link: by hard links: at no cost, and lost when the job writes into the same files again.
        over: asked between two pieces; true ends a copy with InterruptedError.
    """

    def __init__(self, run: Path, *, link: bool, over: Callable[[], bool]) -> None:
        self._home = run / PINNED
        self._link = link
        self._over = over

    def clear(self) -> None:
        """Remove the copies that a supervisor which died never finished, or never verified."""
        for left in self._home.glob(".ckpt-*"):
            self.unstage(left)

    def folder(self, entry: Entry) -> Path:
        """Return the directory of a pinned checkpoint."""
        return self._home / entry.id

    def data(self, entry: Entry) -> Path:
        """Return where the files of a pinned one are: a file or a directory, named as the job's."""
        return self.folder(entry) / DATA / entry.name

    def no_room(self, size: int) -> str:
        """Return why `size` bytes cannot be pinned, "" if they can."""
        if self._link:
            return ""
        files.make_directory(self._home)
        disk = shutil.disk_usage(self._home)
        keep = max(disk.total * RESERVE, RESERVE_BYTES)
        if disk.free - size >= keep:
            return ""
        return (
            f"{disk.free / 1e9:.1f} GB are free, {size / 1e9:.1f} GB are needed, and "
            f"{keep / 1e9:.1f} GB stay free"
        )

    def pin(self, entry: Entry, source: Path | None = None, *, link: bool = False) -> None:
        """Pin a verified checkpoint; a copy has the hashes that were verified, or is none.

        Args:
            source: where its files are, if not at its path. link: a copy is not needed.

        Raises:
            StoreError: its files have changed since.
            OSError: it cannot be copied or linked. InterruptedError: `over`.
        """
        self._hold(entry, entry.hashes, source, link=link)
        self.keep(entry)

    def hold(self, entry: Entry) -> Path:
        """Copy one that is not verified yet, and return where the copy is; then `keep` or `drop`.

        Raises:
            StoreError: it was written again meanwhile.
            OSError: it cannot be copied or linked. InterruptedError: `over`.
        """
        fresh = self._hold(entry, {name: None for name, *_ in entry.stamp})
        if stamp(entry.path) != entry.stamp:
            self.drop(entry)
            raise StoreError(f"{entry.path} was written again while it was copied")
        return fresh / DATA / entry.name

    def keep(self, entry: Entry) -> None:
        """Let what is held be the pinned copy. Raises OSError: it is gone."""
        shutil.rmtree(self.folder(entry), ignore_errors=True)
        try:
            self._fresh(entry).rename(self.folder(entry))
        except OSError:
            self.drop(entry)
            raise
        sync_directory(self._home)

    def _fresh(self, entry: Entry) -> Path:
        return self._home / f".{entry.id}"

    def _hold(
        self,
        entry: Entry,
        hashes: Mapping[str, str | None],
        source: Path | None = None,
        *,
        link: bool = False,
    ) -> Path:
        fresh = self._fresh(entry)
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            files.make_directory(self._home)
            files.make_directory(fresh)
            target = fresh / DATA / entry.name
            self._bring(source or Path(entry.path), target, hashes, link=link or self._link)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        return fresh

    def drop(self, entry: Entry) -> None:
        """Let go of a pinned one, or of what is held."""
        for folder in (self.folder(entry), self._fresh(entry)):
            shutil.rmtree(folder, ignore_errors=True)

    def differs(self, entry: Entry, path: Path) -> str:
        """Return in what the files at `path` are not those that were verified, "" if in nothing.

        Raises:
            OSError: they are there, and cannot be read. InterruptedError: `over`.
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
        """Whether a linked one was written into, as sizes and times tell."""
        return stamp(str(self.data(entry))) != entry.stamp

    def stage(self, entry: Entry) -> Path:
        """Copy a pinned one beside the path that the job knows, by a hidden name; return it.

        Raises:
            StoreError: the pinned copy is not what was verified.
            OSError: it cannot be read or copied. InterruptedError: `over`. Nothing is left behind.
        """
        pinned, path = self.data(entry), Path(entry.path)
        wrong = self.differs(entry, pinned)
        if wrong:
            raise StoreError(f"the pinned copy of {entry.id} is damaged: {wrong}")
        fresh = path.with_name(f".{path.name}.{entry.id}")
        _remove(fresh)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._bring(pinned, fresh, entry.hashes, link=False)
        except BaseException:
            _remove(fresh)
            raise
        return fresh

    def place(self, entry: Entry, fresh: Path) -> Path | None:
        """Put what was staged to the path that the job knows; return where what lay there is now.

        A file is replaced in one go. A directory is moved aside first: for an instant there is
        none.

        Raises:
            OSError: what lay there is still there, and the staged copy is gone.
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
        """Remove a copy that is of no use any more, if it is still there."""
        with suppress(OSError):
            _remove(fresh)

    def aside(self, path: Path, mark: str, *, keep: bool = False) -> Path:
        """Move what lies at `path` out of the job's way, and return where it is now.

        Into the run directory; where that is on another disk, to a hidden name beside, since a
        copy might not fit. A file that is to be replaced in one go may `keep` its name as well.
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

    def _bring(
        self, source: Path, target: Path, hashes: Mapping[str, str | None], *, link: bool
    ) -> None:
        """Copy or link all files of one checkpoint; `hashes`: by file, None where nobody knows.

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
            by_kernel = True  # shares blocks where the file system can
            while not self._interrupted():
                try:
                    count = (
                        os.copy_file_range(old.fileno(), new.fileno(), PIECE) if by_kernel else 0
                    )
                except OSError:  # not between these two file systems
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
        if self._over():
            raise InterruptedError("the supervisor ends")
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
