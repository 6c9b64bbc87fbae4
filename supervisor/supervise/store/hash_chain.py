"""The format of the audit log and its verification.

    line = <64 hex digits> SP <json> LF        digest = SHA-256(0x00 || json bytes as written)

The json has `prev`, the digest of the previous record; for record 0 it is
SHA-256("supervise-audit-v1" || run id). Digests are compared as text and over the stored bytes,
never over a re-serialised record. The chain reveals edits, reordering and gaps, but neither records
removed from its end nor a log rewritten completely: for these compare the head, the
digest of the newest record, with one that left the machine (every notification has one).

A log is truncated if it has no final LF (a killed writer, a power cut, a zero-filled page) or no
record: recoverable. A complete but wrong line is tampering.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..core.model.decisions import plain as encode
from ..errors import StoreError, TamperError
from . import files


def leaf(record: bytes) -> bytes:
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
_NON_FINITE = {"NaN": float("nan"), "+Inf": float("inf"), "-Inf": float("-inf")}

__all__ = ["Chain", "Report", "decode", "encode", "read", "verify"]


def decode(value: Any) -> Any:
    """Return `value` with "NaN", "+Inf" and "-Inf" as floats; for numbers, not for text."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, Mapping):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [decode(item) for item in value]
    return value


def genesis(run_id: str) -> str:
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
        return self._head or genesis(self.run or "")

    def line(self, record: Mapping[str, Any]) -> bytes:
        """Return the line of the next record; call `take` once it is written."""
        text = json.dumps(
            encode(record), allow_nan=False, ensure_ascii=False, separators=(",", ":")
        )
        body = text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes its JSON escape
        return leaf(body).hex().encode() + b" " + body + b"\n"

    def take(self, line: bytes) -> dict[str, Any]:
        """Check one complete line as the next record, and return it.

        Raises:
            TamperError: it does not continue the chain.
        """
        digest, space, body = line[:64], line[64:65], line[65:-1]
        hashed = leaf(body)
        if space != b" " or line[-1:] != b"\n" or hashed.hex().encode() != digest:
            raise self._tampered("its digest does not match its content")
        try:
            record = json.loads(body)
            seq, prev, run, epoch = (record[key] for key in ("seq", "prev", "run", "epoch"))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._tampered("it is not a record of this log") from None
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

    def check(self, record: Mapping[str, Any]) -> None:
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
        if not wrong and not files.shallow(record.get("data")):
            wrong = ["data"]
        if wrong:
            number, why = self.size - 1, f"its field {wrong[0]!r} is missing or invalid"
            raise TamperError(f"audit record {number} was changed: {why}", seq=number, hint=_GOOD)

    def _tampered(self, why: str) -> TamperError:
        message = f"audit record {self.size} (byte {self.offset}) was changed: {why}"
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


def lines(path: Path) -> Iterator[tuple[bytes, int]]:
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
                    more, ended = _rest(file)
                    length += more
                    line = line[:_BLOCK] + b"\n" * ended
                yield line, length
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error


def _rest(file: BinaryIO) -> tuple[int, bool]:
    """Skip to the end of a line; return the number of bytes, and whether there is a line feed."""
    length = 0
    while True:
        at = file.tell()
        try:  # holes are zeros and contain no line feed
            data = os.lseek(file.fileno(), at, os.SEEK_DATA)
        except OSError as error:
            data = os.fstat(file.fileno()).st_size if error.errno == errno.ENXIO else at
        file.seek(data)
        length += data - at
        block = file.readline(_BLOCK)
        length += len(block)
        if not block or block.endswith(b"\n"):
            return length, bool(block)


def verify(path: Path, run: str | None = None, witness: tuple[int, str] | None = None) -> Report:
    """Check the whole log.

    Args:
        run: the run it must belong to; None: as in record 0.
        witness: a size and a head, or its first WITNESS digits or more, from a notification.

    Raises:
        StoreError: the file cannot be read.
    """
    chain = Chain(run)
    seen = None  # the head at the size of the witness

    def report(status: str, message: str, bad_seq: int | None = None) -> Report:
        return Report(status, chain.size, chain.head, bad_seq, chain.offset, message)

    tail = 0
    try:
        for line, length in lines(path):
            if not line.endswith(b"\n"):
                tail = length
                break
            chain.check(chain.take(line))
            if witness is not None and chain.size == witness[0]:
                seen = chain.head
    except TamperError as error:
        return report("tampered", str(error), error.seq)
    size = chain.size
    if witness is not None and seen is None:
        text = f"the log has {size} records, the witness {witness[0]}: records were removed"
        return report("tampered", text, size)
    head = "" if witness is None else witness[1].lower()
    if witness is not None and not (len(head) >= WITNESS and str(seen).startswith(head)):
        text = f"the first {witness[0]} records differ from those of the witness (head {seen})"
        return report("tampered", text)
    if tail:
        text = f"record {size} (byte {chain.offset}) is truncated, {tail} bytes of it exist"
        return report("truncated", text, size)
    if not size:
        return report("truncated", "record 0 (byte 0) is missing: the log is empty", 0)
    return report("good", f"{size} records are unchanged")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in order, as stored (non-finite numbers as text); stop at a truncated one.

    Raises:
        TamperError: at the first bad record.
        StoreError: the file cannot be read.
    """
    chain = Chain()
    for line, _ in lines(path):
        if not line.endswith(b"\n"):
            return
        record = chain.take(line)
        chain.check(record)
        yield record
