"""The audit log of a run: hash-chained, durable before effects, repaired after a crash.

Rule 1: one record is one `os.write` to a file opened with O_APPEND.
Rule 2: a record with `sync=True` (intent, commit, abort, in_doubt, approval) is on the disk before
`append` returns; the others follow within GROUP_COMMIT_S.
Rule 3: after an error of fsync nothing more is written: the kernel may have dropped the pages, and
a second fsync may report success. Whoever gets a StoreError here must do nothing destructive.
Rule 4: one writer. The lock is `flock` on the log itself, and goes with the process; each writer
is an epoch.
Rule 5: a log that was removed under the writer, or the journal beside it, is one that cannot be
written. The thread that commits looks once a second, for a look may hang.

Does not know what the records mean. Safe to call from several threads.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import StoreError
from . import files, lock
from .hash_chain import MAX_LINE, VERSION, Chain, Report, decode, encode, lines, read, verify
from .lock import locked

__all__ = ["Audit", "Report", "decode", "encode", "locked", "read", "verify"]

GROUP_COMMIT_S = 0.2
LOOK_S = 1.0
RESERVE_BYTES = 1 << 20  # room for about a thousand records on a disk that filled up
MAX_TAIL = 1 << 20  # bytes of a torn tail that are kept
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class Audit:
    """The writer; get one from `open`.

    Attributes:
        trouble: why the log cannot be relied on any more (the disk is full, an fsync failed, the
            file is gone), one sentence; None while all is well. While it is set, start nothing
            destructive.
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
        self._beside: Callable[[], str | None] = lambda: None
        self._lock = threading.RLock()
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._committer = threading.Thread(target=self._commit_often, name="audit", daemon=True)

    @classmethod
    def open(cls, path: Path, run_id: str, *, at_ns: int, wall: str) -> Audit:
        """Open or create the log, as the only writer.

        A torn tail is copied to `<path>.torn-<offset>`, cut off, and told in a `recovered` record.

        Args:
            at_ns, wall: the time now, for that record.

        Raises:
            TamperError: a record before the tail is bad. Nothing was changed.
            StoreError: another supervisor has it open, or it cannot be written.
        """
        fd = -1
        try:
            fd = files.open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            lock.take(fd, path)
            chain, tail = _scan(path, run_id)
            if not chain.size:
                files.sync_directory(path.parent)
            torn = path.with_name(f"{path.name}.torn-{chain.offset}")
            if tail:
                _keep(torn, path, chain.offset)
                os.ftruncate(fd, chain.offset)
            audit = cls(path, fd, chain)
            audit._fill_reserve()
            if torn.exists():  # also when a crash came between the cut and this record
                audit._tell_recovered(torn, at_ns, wall)
        except OSError as error:
            _close(fd)
            raise StoreError(f"cannot open {path}: {error.strerror}") from error
        except BaseException:
            _close(fd)
            raise
        audit._begin()
        return audit

    def beside(self, gone: Callable[[], str | None]) -> None:
        """Let `gone` say what is missing beside the log; it is called on a thread of the log."""
        self._beside = gone

    @property
    def head(self) -> tuple[int, str]:
        """Number of records and the Merkle root over them: "size root" in a message."""
        with self._lock:
            return self._chain.size, self._chain.tree.root()

    @property
    def epoch(self) -> int:
        """Incarnation of the supervisor, 1 for the first; a fencing token for commands."""
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
                JSON but for non-finite floats; none of the names that the log itself sets.
            sync: be on the disk before returning.

        Raises:
            StoreError: it is not in the log, or not surely so. See Rule 3.
        """
        with self._lock:
            if self._dead:
                raise StoreError(self.trouble or f"{self._path} is closed")
            seq = self._chain.size
            record = {
                "v": VERSION,
                "seq": seq,
                "prev": self._chain.prev,
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
                self._tell_full(at_ns, wall, step)
            if sync or not self._begin():
                self._sync()
            else:
                self._dirty.set()
            return seq

    def _tell_full(self, at_ns: int, wall: str, step: int) -> None:
        reason = "the disk is full; the log is written from its reserve"
        self.trouble = f"{self._path}: {reason}"
        note = {"reason": reason, "data": {"reserve_bytes": RESERVE_BYTES}}
        self.append(
            "disk_full", actor="store", at_ns=at_ns, wall=wall, step=step, body=note, sync=False
        )

    def commit(self) -> None:
        """Put all records on the disk now. Raises StoreError."""
        self._sync()

    def close(self) -> None:
        """Commit and let go of the lock. Never raises: `trouble` tells whether all was kept."""
        self._closing.set()
        self._dirty.set()
        if self._committer.is_alive():
            self._committer.join()
        with self._lock:
            if self._fd < 0:
                return
            try:
                if not self._dead:
                    self._sync()
            except StoreError:
                pass  # told by `trouble`
            self._dead = True
            with suppress(OSError):  # the directory may be closed to us, or gone
                self._reserve.unlink(missing_ok=True)
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                _close(fd)

    def _begin(self) -> bool:
        """Start the thread unless it was; False at the limit of threads, and `append` commits."""
        if self._committer.ident is None:
            try:
                self._committer.start()
            except RuntimeError:
                return False
        return True

    def _commit_often(self) -> None:
        looked_s, missed = time.monotonic(), None
        while not self._closing.is_set():
            if self._dirty.wait(LOOK_S):
                self._closing.wait(GROUP_COMMIT_S)
                try:
                    self._sync()
                except StoreError:
                    return  # told by `trouble`, and by every later append
            if time.monotonic() >= looked_s + LOOK_S:
                missed = self._look(missed)
                looked_s = time.monotonic()

    def _look(self, missed: str | None) -> str | None:
        """Return what is missing; it counts the second time, for a network may err for a moment."""
        found = files.gone(self._path, self._opened) or self._beside()
        if found is not None and found == missed and self.trouble is None:
            self.trouble = found
        return found

    def _sync(self) -> None:
        self._dirty.clear()
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            with self._lock:
                self._dead = True
                self.trouble = f"{self._path} cannot be made durable: {error.strerror}"
            raise StoreError(self.trouble) from error

    def _write(self, line: bytes) -> bool:
        """Write `line` whole or not at all; return True if it took the reserve to do so."""
        try:
            self._write_whole(line)
            return False
        except OSError as error:
            if error.errno not in _FULL or not self._reserve.exists():
                raise self._unwritable(error) from error
        self._reserve.unlink()
        try:
            self._write_whole(line)
            return True
        except OSError as error:
            raise self._unwritable(error) from error

    def _write_whole(self, line: bytes) -> None:
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            try:
                os.ftruncate(self._fd, self._chain.offset)
            except OSError:
                self._dead = True  # half a record may stand there; the next `open` repairs it
            raise

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
            with suppress(OSError):  # already full: the first append will tell
                self._reserve.unlink(missing_ok=True)

    def _tell_recovered(self, torn: Path, at_ns: int, wall: str) -> None:
        with os.fdopen(files.open_file(torn), "rb") as file:
            tail = file.read(2 * MAX_TAIL)
        data = {
            "file": torn.name,
            "offset": self._chain.offset,
            "bytes": len(tail),
            "sha256": hashlib.sha256(tail).hexdigest(),
        }
        body = {"reason": "the last record was incomplete and was cut off", "data": data}
        self.append(
            "recovered", actor="store", at_ns=at_ns, wall=wall, step=-1, body=body, sync=True
        )


def _scan(path: Path, run_id: str) -> tuple[Chain, int]:
    """Return the state after the good records, and the length of a torn tail."""
    chain = Chain(run_id)
    for line, length in lines(path):
        if not line.endswith(b"\n"):
            return chain, length
        chain.check(chain.take(line))
    return chain, 0


def _keep(torn: Path, path: Path, offset: int) -> None:
    """Keep a torn tail; one that is already there (a crash during a repair) is not lost either.

    A tail is part of one record: of a longer one, the zeros of a disk that lost power, the
    beginning says all.
    """
    with os.fdopen(files.open_file(path), "rb") as file:
        file.seek(offset)
        tail = file.read(MAX_TAIL)
    before = b""
    if torn.exists():
        with os.fdopen(files.open_file(torn), "rb") as file:
            before = file.read(MAX_TAIL)
    if not before.endswith(tail):
        before += tail
    files.replace(torn, before, durable=True)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
