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

    line = <64 hex digits> SP <json> LF        digest = SHA-256(0x00 || json bytes as written)

The json has `prev`, the digest of the previous record; for record 0 it is
SHA-256("supervise-audit-v1" || run id). Digests are compared as text and over the stored bytes,
never over a re-serialised record. The chain reveals edits, reordering and gaps, but neither records
removed from its end nor a log rewritten completely: for these compare the head, the digest of the
newest record, with one that left the machine (every notification has one).

A log is truncated if it has no final LF (a killed writer, a power cut, a zero-filled page) or no
record: recoverable. A complete but wrong line is tampering.

`sign` makes a detached Ed25519 signature (RFC 8032, extra `sign`) over the bytes of a file: 64 raw
bytes beside it, which any tool can check:

    openssl pkeyutl -verify -pubin -inkey public.pem -rawin -in record.json -sigfile record.json.sig
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .. import __version__
from ..core.model.decisions import json_document
from ..errors import FULL, StoreError, TamperError, UsageError
from ..system import Thread
from . import files


def hash_record(record: bytes) -> bytes:
    """Return the 32-byte leaf digest of one record."""
    return hashlib.sha256(b"\x00" + record).digest()


VERSION = 1
MAX_LINE = 16 << 20  # bytes; the largest record is that of a reload, a few hundred kB
GENESIS = b"supervise-audit-v1"
EXIT_CODES = {"good": 0, "tampered": 1, "truncated": 2}

WITNESS = 12  # digits of a head that a message for people shows: 48 bits
_BLOCK = 1 << 20
# Types of the fields of every record, and of those that some have.
_REQUIRED: dict[str, Any] = {
    "seq": int,
    "prev": str,
    "run": str,
    "epoch": int,
    "step": int,
    "kind": str,
    "actor": str,
    "mono_ns": int,
    "wall": str,
}
_OPTIONAL: dict[str, Any] = {
    "event": int,
    "attempt": int,
    "incident": str | None,
    "rule": str | None,
    "severity": str | None,
    "data": dict | None,
}
_INT64 = 1 << 63
_GOOD = "the records before it are intact; compare with a head in an earlier notification"


def hash_genesis(run_id: str) -> str:
    """Return the `prev` of record 0 of the run `run_id`."""
    return hashlib.sha256(GENESIS + run_id.encode("utf-8", "backslashreplace")).hexdigest()


def _matches(value: Any, kind: Any) -> bool:
    if kind is int:
        return type(value) is int and -_INT64 <= value < _INT64
    return isinstance(value, kind)


class Chain:
    """The state after some valid records, against which the next one is checked.

    Attributes:
        run: id of the run; None before record 0 if unknown.
        epoch: number of the supervisor that wrote the newest record, from 1.
        offset: bytes of the file taken so far.
        size: number of records taken.
    """

    def __init__(self, run: str | None = None) -> None:
        self.run = run
        self.epoch = 0
        self.offset = 0
        self.size = 0
        self._head = ""

    @property
    def head(self) -> str:
        """Digest of the newest record; before record 0 what its `prev` has to be."""
        return self._head or hash_genesis(self.run or "")

    def line(self, record: Mapping[str, Any]) -> bytes:
        """Return the line of the next record; call `check_line` once it is written."""
        body = json_document(record, separators=(",", ":")).encode()
        return hash_record(body).hex().encode() + b" " + body + b"\n"

    def check_line(self, line: bytes) -> dict[str, Any]:
        """Check one complete line as the next record, and return it.

        Raises:
            TamperError: it does not continue the chain. StoreError: it is of another version.
        """
        digest, space, body = line[:64], line[64:65], line[65:-1]
        hashed = hash_record(body)
        if space != b" " or line[-1:] != b"\n" or hashed.hex().encode() != digest:
            raise self._tampered("its digest does not match its content")
        try:
            record = json.loads(body)
            seq, prev, run, epoch = (record[key] for key in ("seq", "prev", "run", "epoch"))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._tampered("it is not a record of this log") from None
        if record.get("v", VERSION) != VERSION:
            raise StoreError(
                f"audit record {self.size} is of version {record['v']!r:.40}; this is supervise "
                f"{__version__}, which reads version {VERSION}",
                hint="use the version of supervise that wrote it",
            )
        if type(epoch) is not int or type(seq) is not int:
            raise self._tampered(f"{seq!r} and {epoch!r} are not a number and an epoch")
        if self.run is None:
            self.run = str(run)
        if run != self.run:
            raise self._tampered(f"it belongs to the run {run!r}, not {self.run!r}")
        if seq != self.size:
            raise self._tampered(f"its number is {seq!r}")
        if prev != self.head:
            raise self._tampered("it does not contain the digest of the previous record")
        if epoch not in (self.epoch, self.epoch + 1) or epoch < 1:
            raise self._tampered(f"its epoch {epoch!r} does not follow {self.epoch}")
        self.epoch, self._head = epoch, digest.decode()
        self.size += 1
        self.offset += len(line)
        return dict(record)

    def check_fields(self, record: Mapping[str, Any]) -> None:
        """Check the newest record's fields, since a whole log may be forged with valid digests.

        Raises:
            TamperError: a field is missing or has the wrong type.
        """
        wrong = [name for name, kind in _REQUIRED.items() if not _matches(record.get(name), kind)]
        wrong += [
            name
            for name, kind in _OPTIONAL.items()
            if name in record and not _matches(record[name], kind)
        ]
        if record.get("actor") == "engine" and "event" not in record:
            wrong.append("event")
        if not wrong and not files.is_shallow(record.get("data")):
            wrong = ["data"]
        if wrong:
            number, reason = self.size - 1, f"its field {wrong[0]!r} is missing or invalid"
            raise TamperError(
                f"audit record {number} was changed: {reason}", seq=number, hint=_GOOD
            )

    def _tampered(self, reason: str) -> TamperError:
        message = f"audit record {self.size} (byte {self.offset}) was changed: {reason}"
        return TamperError(message, seq=self.size, hint=_GOOD)


@dataclass(frozen=True, slots=True)
class Report:
    """Result of `verify`.

    Attributes:
        status: `good`, `tampered` or `truncated`.
        records: number of valid records before the first bad one.
        head: digest of the newest of these, 64 hex digits; of an empty log that of its run.
        bad_seq: number of the first bad record, None if there is none.
        offset: bytes of valid records; the first bad one starts here.
    """

    status: str
    records: int
    head: str
    bad_seq: int | None
    offset: int
    message: str

    @property
    def exit_code(self) -> int:
        """0 good, 1 tampered, 2 only truncated."""
        return EXIT_CODES[self.status]


def log_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield each line of a log and its length; lines longer than a record are cut.

    Only the last line may lack its line feed.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        with os.fdopen(files.open_file(path), "rb") as file:
            while line := file.readline(MAX_LINE):
                length = len(line)
                if length == MAX_LINE and not line.endswith(b"\n"):
                    remaining, ended = _read_rest(file)
                    length += remaining
                    line = line[:_BLOCK] + b"\n" * ended
                yield line, length
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error


def _read_rest(file: BinaryIO) -> tuple[int, bool]:
    """Skip to the end of a line; return the number of bytes, and whether there is a line feed."""
    length = 0
    while True:
        offset = file.tell()
        try:  # holes are zeros and contain no line feed
            data = os.lseek(file.fileno(), offset, os.SEEK_DATA)
        except OSError as error:
            data = os.fstat(file.fileno()).st_size if error.errno == errno.ENXIO else offset
        file.seek(data)
        length += data - offset
        block = file.readline(_BLOCK)
        length += len(block)
        if not block or block.endswith(b"\n"):
            return length, bool(block)


def verify_audit(
    path: Path, run: str | None = None, witness: tuple[int, str] | None = None
) -> Report:
    """Check the whole log.

    Args:
        run: the run it must belong to; None: as in record 0.
        witness: a size and a head, or its first WITNESS digits or more, from a notification.

    Raises:
        StoreError: the file cannot be read.
    """
    chain = Chain(run)
    witness_head = None  # the head at the size of the witness

    def report(status: str, message: str, bad_seq: int | None = None) -> Report:
        return Report(status, chain.size, chain.head, bad_seq, chain.offset, message)

    tail = 0
    try:
        for line, length in log_lines(path):
            if not line.endswith(b"\n"):
                tail = length
                break
            chain.check_fields(chain.check_line(line))
            if witness is not None and chain.size == witness[0]:
                witness_head = chain.head
    except TamperError as error:
        return report("tampered", str(error), error.seq)
    size = chain.size
    if witness is not None and witness_head is None:
        text = f"the log has {size} records, the witness {witness[0]}: records were removed"
        return report("tampered", text, size)
    head = "" if witness is None else witness[1].lower()
    if witness is not None and not (len(head) >= WITNESS and str(witness_head).startswith(head)):
        text = (
            f"the first {witness[0]} records differ from those of the witness (head {witness_head})"
        )
        return report("tampered", text)
    if tail:
        text = f"record {size} (byte {chain.offset}) is truncated, {tail} bytes of it exist"
        return report("truncated", text, size)
    if not size:
        return report("truncated", "record 0 (byte 0) is missing: the log is empty", 0)
    return report("good", f"{size} records are unchanged")


def read_audit(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in order, as stored (non-finite numbers as text); stop at a truncated one.

    Raises:
        TamperError: at the first bad record.
        StoreError: the file cannot be read.
    """
    chain = Chain()
    for line, _ in log_lines(path):
        if not line.endswith(b"\n"):
            return
        record = chain.check_line(line)
        chain.check_fields(record)
        yield record


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
            files.lock_file(fd, path)
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
            self._chain.check_line(line)
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
                files.allocate_bytes(self._fd, self._chain.offset, size_bytes)
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
            with files.waiting_for_disk():
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

    def _check_files(self, head_before: str | None) -> str | None:
        """Return what is missing; counts if found twice: a network disk may err briefly."""
        trouble = files.explain_missing(self._path, self._opened) or self._missing_journal()
        if trouble is not None and trouble == head_before and self.trouble is None:
            self.trouble = trouble
        return trouble

    def _sync(self) -> None:
        self._dirty.clear()
        try:
            files.sync_file(self._fd)
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
            fd = files.create_file(self._reserve)
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
    for line, length in log_lines(path):
        if not line.endswith(b"\n"):
            return chain, length
        chain.check_fields(chain.check_line(line))
    return chain, 0


def _keep(remains: Path, path: Path, offset: int) -> None:
    """Append the truncated record to its copy, which may exist after a crash during a repair.

    It is part of one record; of the zeros of a disk that lost power the beginning is enough.
    """
    with os.fdopen(files.open_file(path), "rb") as file:
        file.seek(offset)
        tail = file.read(MAX_TAIL)
    earlier_tail = b""
    if remains.exists():
        with os.fdopen(files.open_file(remains), "rb") as file:
            earlier_tail = file.read(MAX_TAIL)
    if not earlier_tail.endswith(tail):
        earlier_tail += tail
    files.replace_file(remains, earlier_tail, durable=True)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


MAKE_KEY = "make one with: openssl genpkey -algorithm ed25519 -out key.pem"
MAKE_PUBLIC = "make it with: openssl pkey -in key.pem -pubout -out public.pem"


def sign_bytes(data: bytes, key: Path) -> bytes:
    """Return the signature of `data` by the private key in a PEM file. Raises UsageError."""
    from_pem, _, private, _ = _cryptography()
    private_key = _load(lambda raw: from_pem(raw, password=None), key, MAKE_KEY)
    if not isinstance(private_key, private):
        raise UsageError(f"{key} is not an Ed25519 private key", hint=MAKE_KEY)
    return bytes(private_key.sign(data))


def is_signed(data: bytes, signature: bytes, key: Path) -> bool:
    """Return whether a signature is that of the public key in a PEM file. Raises UsageError."""
    _, public_pem, _, public = _cryptography()
    from cryptography.exceptions import InvalidSignature

    public_key = _load(public_pem, key, MAKE_PUBLIC)
    if not isinstance(public_key, public):
        raise UsageError(f"{key} is not an Ed25519 public key", hint=MAKE_PUBLIC)
    try:
        public_key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _cryptography() -> tuple[Any, Any, Any, Any]:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
        from cryptography.hazmat.primitives.serialization import (
            load_pem_private_key,
            load_pem_public_key,
        )
    except ImportError:
        raise UsageError(
            "signatures need the package cryptography, which is not installed",
            hint="pip install 'supervise-train[sign]'",
        ) from None
    return (
        load_pem_private_key,
        load_pem_public_key,
        ed25519.Ed25519PrivateKey,
        ed25519.Ed25519PublicKey,
    )


def _load(load: Any, path: Path, hint: str) -> Any:
    try:
        with os.fdopen(files.open_file(path, foreign=True), "rb") as file:
            return load(file.read(1 << 16))
    except OSError as error:
        raise UsageError(f"cannot read the key {path}: {error.strerror}", hint=hint) from error
    except (ValueError, TypeError) as error:  # no PEM, encrypted, or of an unknown kind
        raise UsageError(f"{path} holds no usable key: {error}", hint=hint) from error
