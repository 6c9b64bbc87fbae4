"""The audit log of a run: hash-chained, durable before effects, repaired after a crash.

Rule 1: a record is written completely, in one `os.write` where the file system takes it, or not at
all.
Rule 2: a record with `sync=True` (intent, commit, abort, in_doubt, approval) is on disk before
`append` returns; the others follow within GROUP_COMMIT_S.
Rule 3: after a failed fsync nothing more is written: the kernel may have dropped the pages, and a
second fsync may report success. A caller that gets a StoreError must do nothing destructive.
Rule 4: one writer. It holds `flock` on the log, which the kernel drops with the process; each
writer is an epoch.
Rule 5: the log has a reserve of space beyond its end, which nobody else can take, and beside it a
file of RESERVE_BYTES. The file goes first: it makes room for what else is written about the run.
When the log itself needs it, `trouble` says so.
Rule 6: if the log or the journal is removed during the run, the log counts as unwritable. The
committing thread checks once a second, because the check may hang.

Thread-safe. Records are opaque here.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import FULL, StoreError
from ..threads import Thread
from . import files
from .files import locked
from .hash_chain import MAX_LINE, VERSION, Chain, Report, decode, encode, lines, read, verify

__all__ = ["Audit", "Report", "decode", "encode", "locked", "read", "verify"]

GROUP_COMMIT_S = 0.2
CHECK_EVERY_S = 1.0
RESERVE_BYTES = 1 << 20  # room for about a thousand records on a disk that filled up
MAX_TAIL = 1 << 20  # bytes of a truncated record that are kept


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class Audit:
    """The writer; get one from `open`.

    Attributes:
        trouble: why the log is not reliable (the disk is full, an fsync failed, the file is
            missing), one sentence; None if it is. While it is set, start nothing destructive.
    """

    def __init__(self, path: Path, fd: int, chain: Chain) -> None:
        self.trouble: str | None = None
        self._path = path
        self._fd = fd
        self._chain = chain
        self._epoch = chain.epoch + 1
        self._boot = _boot_id()
        self._reserve = path.with_name(path.name + ".reserve")
        self._dead = False  # nothing more may be written
        self._opened = os.fstat(fd)
        self._reserved = 0  # offset up to which the disk has room for the log
        self._missing_journal: Callable[[], str | None] = lambda: None
        self._lock = threading.RLock()
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._committer = Thread(target=self._commit_often, name="audit", daemon=True)

    @classmethod
    def open(cls, path: Path, run_id: str, *, at_ns: int, wall: str) -> Audit:
        """Open or create the log, as the only writer.

        A truncated last record is copied to `<path>.truncated-<offset>`, removed, and reported in a
        `recovered` record.

        Args:
            at_ns, wall: the time now, for that record.

        Raises:
            TamperError: a record before the tail is bad. Nothing was changed.
            StoreError: another supervisor has it open, or it cannot be written.
        """
        fd = -1
        try:
            fd = files.open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            files.take(fd, path)
            chain, tail = _scan(path, run_id)
            remains = path.with_name(f"{path.name}.truncated-{chain.offset}")
            if tail:
                _keep(remains, path, chain.offset)
                os.ftruncate(fd, chain.offset)
            audit = cls(path, fd, chain)
            audit._fill_reserve()
            if remains.exists():  # also after a crash between the truncation and this record
                audit._record_recovery(remains, at_ns, wall)
        except OSError as error:
            _close(fd)
            raise StoreError(f"cannot open {path}: {error.strerror}") from error
        except BaseException:
            _close(fd)
            raise
        audit._start_thread()
        return audit

    def watch_journal(self, missing: Callable[[], str | None]) -> None:
        """Call `missing` regularly on the log's thread; it returns a sentence if files are gone."""
        self._missing_journal = missing

    @property
    def head(self) -> tuple[int, str]:
        """Number of records and the digest of the newest: "size head" in a message."""
        with self._lock:
            return self._chain.size, self._chain.head

    @property
    def epoch(self) -> int:
        """Number of the writing supervisor, from 1; a fencing token for commands."""
        return self._epoch

    def append(
        self,
        kind: str,
        *,
        actor: str,
        at_ns: int,
        wall: str,
        step: int,
        body: Mapping[str, Any],
        sync: bool,
    ) -> int:
        """Write one record and return its number.

        Args:
            at_ns, wall: CLOCK_MONOTONIC in nanoseconds, and UTC as ISO-8601.
            body: further fields (attempt, event, reason, incident, rule, severity, data), ready for
                JSON but for non-finite floats; without the names that the log itself sets.
            sync: on disk before returning.

        Raises:
            StoreError: it is not, or not certainly, in the log. See Rule 3.
        """
        with self._lock:
            if self._dead:
                raise StoreError(self.trouble or f"{self._path} is closed")
            seq = self._chain.size
            record = {
                "v": VERSION,
                "seq": seq,
                "prev": self._chain.head,
                "run": self._chain.run,
                "epoch": self._epoch,
                "boot": self._boot,
                "mono_ns": at_ns,
                "wall": wall,
                "step": step,
                "kind": kind,
                "actor": actor,
            }
            if clash := record.keys() & body.keys():
                raise ValueError(f"{sorted(clash)} are set by the log itself")
            line = self._chain.line({**record, **body})
            if len(line) > MAX_LINE:
                raise StoreError(f"record {seq} ({kind}) is too large: {len(line)} bytes")
            full = self._write(line)
            self._chain.take(line)
            if full:
                self._record_full(at_ns, wall, step)
            if sync or not self._start_thread():
                self._sync()
            else:
                self._dirty.set()
            return seq

    def _record_full(self, at_ns: int, wall: str, step: int) -> None:
        reason = "the disk is full; the log uses its reserve"
        self.trouble = f"{self._path}: {reason}"
        note = {"reason": reason, "data": {"reserve_bytes": RESERVE_BYTES}}
        self.append(
            "disk_full", actor="store", at_ns=at_ns, wall=wall, step=step, body=note, sync=False
        )

    def reserve(self, size_bytes: int) -> None:
        """Make sure of so many bytes for what comes. Raises OSError."""
        with self._lock:
            if self._dead:
                return
            end = self._chain.offset + size_bytes
            if end > self._reserved:
                files.allocate(self._fd, self._chain.offset, size_bytes)
                self._reserved = end

    def renew_reserve(self) -> None:
        """Make the file beside the log, unless it is there."""
        if not self._reserve.exists():
            self._fill_reserve()

    @property
    def reserve_bytes(self) -> int:
        """Bytes that can be written though the disk is full."""
        return max(0, self._reserved - self._chain.offset)

    def release_reserve(self) -> None:
        """Give up the file beside the log, for all else that is written about the run."""
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def commit(self) -> None:
        """Sync all records to disk. Raises StoreError."""
        self._sync()

    def close(self) -> None:
        """Commit and release the lock. Never raises: see `trouble`."""
        self._closing.set()
        self._dirty.set()
        if self._committer.is_alive():
            with files.waiting():
                self._committer.join()
        with self._lock:
            if self._fd < 0:
                return
            try:
                if not self._dead:
                    self._sync()
            except StoreError:
                pass  # see `trouble`
            self._dead = True
            self.release_reserve()
            if self._reserved:
                with suppress(OSError):
                    os.ftruncate(self._fd, self._chain.offset)
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                _close(fd)

    def _start_thread(self) -> bool:
        """Start the thread once; False at the limit of threads, then `append` commits."""
        if self._committer.ident is None:
            try:
                self._committer.start()
            except RuntimeError:
                return False
        return True

    def _commit_often(self) -> None:
        checked_s, missing = time.monotonic(), None
        while not self._closing.is_set():
            if self._dirty.wait(CHECK_EVERY_S):
                self._closing.wait(GROUP_COMMIT_S)
                try:
                    self._sync()
                except StoreError:
                    return  # see `trouble`; every later append raises
            if time.monotonic() >= checked_s + CHECK_EVERY_S:
                missing = self._check_files(missing)
                checked_s = time.monotonic()

    def _check_files(self, before: str | None) -> str | None:
        """Return what is missing; counts if found twice: a network disk may err briefly."""
        found = files.missing(self._path, self._opened) or self._missing_journal()
        if found is not None and found == before and self.trouble is None:
            self.trouble = found
        return found

    def _sync(self) -> None:
        self._dirty.clear()
        try:
            files.sync(self._fd)
        except OSError as error:
            with self._lock:
                self._dead = True
                self.trouble = f"{self._path} cannot be made durable: {error.strerror}"
            raise StoreError(self.trouble) from error

    def _write(self, line: bytes) -> bool:
        """Write `line` completely or not at all; return True if it needed the reserve."""
        try:
            self._write_line(line)
            return False
        except OSError as error:
            if error.errno not in FULL or not self._reserve.exists():
                raise self._unwritable(error) from error
        self._reserve.unlink()
        try:
            self._write_line(line)
            return True
        except OSError as error:
            raise self._unwritable(error) from error

    def _write_line(self, line: bytes) -> None:
        _, error = files.write_all(self._fd, line)
        if error is not None:
            try:
                os.ftruncate(self._fd, self._chain.offset)
                self._reserved = 0
            except OSError:
                self._dead = True  # it may be half written; the next `open` repairs it
            raise error

    def _unwritable(self, error: OSError) -> StoreError:
        self.trouble = f"{self._path} cannot be written: {error.strerror}"
        return StoreError(self.trouble)

    def _fill_reserve(self) -> None:
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)
        try:
            fd = files.create(self._reserve)
            try:
                os.posix_fallocate(fd, 0, RESERVE_BYTES)
            finally:
                os.close(fd)
        except OSError:
            with suppress(OSError):  # already full: the first append reports it
                self._reserve.unlink(missing_ok=True)

    def _record_recovery(self, remains: Path, at_ns: int, wall: str) -> None:
        with os.fdopen(files.open_file(remains), "rb") as file:
            tail = file.read(2 * MAX_TAIL)
        data = {
            "file": remains.name,
            "offset": self._chain.offset,
            "bytes": len(tail),
            "sha256": hashlib.sha256(tail).hexdigest(),
        }
        body = {"reason": "the last record was truncated by a crash and was removed", "data": data}
        self.append(
            "recovered", actor="store", at_ns=at_ns, wall=wall, step=-1, body=body, sync=True
        )


def _scan(path: Path, run_id: str) -> tuple[Chain, int]:
    """Return the state after the good records, and the length of a truncated one."""
    chain = Chain(run_id)
    for line, length in lines(path):
        if not line.endswith(b"\n"):
            return chain, length
        chain.check(chain.take(line))
    return chain, 0


def _keep(remains: Path, path: Path, offset: int) -> None:
    """Append the truncated record to its copy, which may exist after a crash during a repair.

    It is part of one record; of the zeros of a disk that lost power the beginning is enough.
    """
    with os.fdopen(files.open_file(path), "rb") as file:
        file.seek(offset)
        tail = file.read(MAX_TAIL)
    before = b""
    if remains.exists():
        with os.fdopen(files.open_file(remains), "rb") as file:
            before = file.read(MAX_TAIL)
    if not before.endswith(tail):
        before += tail
    files.replace(remains, before, durable=True)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
