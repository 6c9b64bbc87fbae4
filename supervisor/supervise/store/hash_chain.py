"""The bytes of the audit log, and what makes a record the rightful successor of the one before.

    line = <64 hex digits> SP <json> LF        digest = SHA-256(0x00 || json bytes as written)

The json holds `prev`, the digest of the record before; that of record 0 is
SHA-256("supervise-audit-v1" || run id). Digests are compared as text and over the stored bytes,
never over a re-serialised record. A chain shows edits, reordering and gaps, but not records
dropped from its end, nor a log rewritten as a whole: for these compare the Merkle root with one
that was sent out of the machine (every notification carries one).

Torn is a file without a final LF (a killed writer, a power cut, a zero-filled page) or without any
record: recoverable. A complete line that is wrong is tampering. Knows nothing of writing.
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

from ..core.model.json_form import plain as encode
from ..errors import StoreError, TamperError
from . import files, merkle

VERSION = 1
MAX_LINE = 16 << 20  # bytes; the largest record is that of a reload, a few hundred kB
GENESIS = b"supervise-audit-v1"
EXIT_CODES = {"good": 0, "tampered": 1, "torn": 2}

_BLOCK = 1 << 20
# What every record holds, and what the fields are that only some have.
_ALWAYS: dict[str, Any] = {
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
_SOMETIMES: dict[str, Any] = {
    "event": int,
    "attempt": int,
    "incident": str | None,
    "rule": str | None,
    "severity": str | None,
    "data": dict | None,
}
_MOST = 1 << 63
_GOOD = "the records before it are good; every message to people carries a root to compare"
_NON_FINITE = {"NaN": float("nan"), "+Inf": float("inf"), "-Inf": float("-inf")}

__all__ = ["Chain", "Report", "decode", "encode", "read", "verify"]


def decode(value: Any) -> Any:
    """Return `value` with "NaN", "+Inf" and "-Inf" as floats again; for numbers, not for prose."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, Mapping):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [decode(item) for item in value]
    return value


def genesis(run_id: str) -> str:
    """Return the `prev` of record 0 of the run `run_id`."""
    return hashlib.sha256(GENESIS + run_id.encode()).hexdigest()


def _is(value: Any, kind: Any) -> bool:
    if kind is int:
        return type(value) is int and -_MOST <= value < _MOST
    return isinstance(value, kind)


class Chain:
    """The state after some good records: what the next one has to look like.

    Attributes:
        run: id of the run; None until record 0 has told it.
        epoch: incarnation of the supervisor that wrote the newest record, 1 for the first.
        offset: bytes of the file taken so far.
        tree: Merkle tree over the records.
    """

    def __init__(self, run: str | None = None) -> None:
        self.run = run
        self.epoch = 0
        self.offset = 0
        self.tree = merkle.Tree()
        self._prev = ""

    @property
    def size(self) -> int:
        """Number of records taken."""
        return self.tree.size

    @property
    def prev(self) -> str:
        """Digest of the newest record."""
        return self._prev or genesis(self.run or "")

    def line(self, record: Mapping[str, Any]) -> bytes:
        """Return the line of the next record; `take` it once it is written."""
        text = json.dumps(
            encode(record), allow_nan=False, ensure_ascii=False, separators=(",", ":")
        )
        body = text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes its JSON escape
        return merkle.leaf(body).hex().encode() + b" " + body + b"\n"

    def take(self, line: bytes) -> dict[str, Any]:
        """Check one complete line as the next record, and return it.

        Raises:
            TamperError: it is not what the writer wrote after the records before it.
        """
        digest, space, body = line[:64], line[64:65], line[65:-1]
        leaf = merkle.leaf(body)
        if space != b" " or line[-1:] != b"\n" or leaf.hex().encode() != digest:
            raise self._tampered("its digest does not match its bytes")
        try:
            record = json.loads(body)
            seq, prev, run, epoch = (record[key] for key in ("seq", "prev", "run", "epoch"))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._tampered("it is not a record of this log") from None
        if type(epoch) is not int or type(seq) is not int:
            raise self._tampered(f"{seq!r} and {epoch!r} are not its number and epoch")
        if self.run is None:
            self.run = str(run)
        if run != self.run:
            raise self._tampered(f"it belongs to the run {run!r}, not {self.run!r}")
        if seq != self.size:
            raise self._tampered(f"its own number is {seq!r}")
        if prev != self.prev:
            raise self._tampered("it does not name the record before it")
        if epoch not in (self.epoch, self.epoch + 1) or epoch < 1:
            raise self._tampered(f"its epoch {epoch!r} does not follow {self.epoch}")
        self.epoch, self._prev = epoch, digest.decode()
        self.tree.add(leaf)
        self.offset += len(line)
        return dict(record)

    def check(self, record: Mapping[str, Any]) -> None:
        """Check the newest record's fields: a log may be forged as a whole, digests and all.

        Raises:
            TamperError: a field is missing, or is not what it must be.
        """
        wrong = [name for name, kind in _ALWAYS.items() if not _is(record.get(name), kind)]
        wrong += [
            name
            for name, kind in _SOMETIMES.items()
            if name in record and not _is(record[name], kind)
        ]
        if record.get("actor") == "engine" and "event" not in record:
            wrong.append("event")
        if not wrong and not files.shallow(record.get("data")):
            wrong = ["data"]
        if wrong:
            number, at = self.size - 1, f"it is not a record of this log: see its {wrong[0]!r}"
            raise TamperError(f"audit record {number} was changed: {at}", seq=number, hint=_GOOD)

    def _tampered(self, why: str) -> TamperError:
        message = f"audit record {self.size} (byte {self.offset}) was changed: {why}"
        return TamperError(message, seq=self.size, hint=_GOOD)


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found.

    Attributes:
        status: `good`, `tampered` or `torn`.
        records: number of good records before the first bad one.
        root: Merkle root over these, 64 hex digits.
        bad_seq: number of the first bad record, None if there is none.
        offset: bytes of good records; the first bad one starts here.
    """

    status: str
    records: int
    root: str
    bad_seq: int | None
    offset: int
    message: str

    @property
    def exit_code(self) -> int:
        """0 good, 1 tampered, 2 torn tail only."""
        return EXIT_CODES[self.status]


def lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield each line of a log and its length; what is longer than a record comes cut short.

    Only the last one may lack its line feed.

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
    """Read on to the end of a line; return its bytes, and whether it has one."""
    length = 0
    while True:
        at = file.tell()
        try:  # holes are zeros, and no line ends in them
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
        run: the run it must belong to; None takes the word of record 0.
        witness: a size and root that were sent out of the machine earlier.

    Raises:
        StoreError: the file cannot be read.
    """
    chain = Chain(run)
    seen = None  # the root at the size of the witness

    def report(status: str, message: str, bad_seq: int | None = None) -> Report:
        return Report(status, chain.size, chain.tree.root(), bad_seq, chain.offset, message)

    tail = 0
    try:
        for line, length in lines(path):
            if not line.endswith(b"\n"):
                tail = length
                break
            chain.check(chain.take(line))
            if witness is not None and chain.size == witness[0]:
                seen = chain.tree.root()
    except TamperError as error:
        return report("tampered", str(error), error.seq)
    size = chain.size
    if witness is not None and seen is None:
        text = f"the log holds {size} records, the witness saw {witness[0]}: its end was cut off"
        return report("tampered", text, size)
    if witness is not None and seen != witness[1].lower():
        text = f"the first {witness[0]} records are not those that the witness saw (root {seen})"
        return report("tampered", text)
    if tail:
        text = f"torn tail: record {size} (byte {chain.offset}) is incomplete, {tail} bytes"
        return report("torn", text, size)
    if not size:
        return report("torn", "record 0 (byte 0) is missing: the log is empty", 0)
    return report("good", f"{size} records are as they were written")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in order, as stored (non-finite numbers as text); stop at a torn tail.

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
