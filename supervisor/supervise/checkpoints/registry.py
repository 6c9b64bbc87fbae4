"""The register of the job's checkpoints: `checkpoints.json` in the run directory.

What was found, what became of it, and which of them are pinned below `checkpoints/`. Written whole
and atomically after each change, so that a supervisor that takes over knows all that was known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..store import files

NAME = "checkpoints.json"
PINNED = "checkpoints"  # directory of the pinned ones, by id
FOUND, VERIFIED, BAD = "found", "verified", "bad"
UNVERIFIED, VANISHED = "unverified", "vanished"
COPIED = "copied"  # it is being copied, or the copy verified: what is written next is another one
GLOB = "glob"  # nobody told of it
NEAR = 100  # steps that a file may be found after it was saved
KEPT = 256  # newest ones that the register lists, besides those that are still there

Stamp = tuple[tuple[str, int, int, int], ...]  # per file: name, size, mtime in ns, inode


@dataclass
class Entry:
    """One checkpoint. A path that is written again is another checkpoint.

    Attributes:
        path: absolute, as the job names it; a file or a directory.
        step: 0-based, the last optimizer step in it; -1 where nobody knows.
        how: who told of it: `torch.save`, a library, ..., or `glob`.
        saved, verified: UTC; when it was told or first seen, when it was last verified.
        seconds: what the save took, None where nobody told.
        bytes, files: of all files; per name relative to the directory `{"size", "sha256"}`.
        tensors: bytes of the tensors in it, 0 where nobody looked.
        inside: the step that an integer in it tells, in the job's own count.
        rng: whether random states are in it.
        problems: one sentence each.
        there: its files are still at `path`, as they were when they were last looked at.
        stamp: what they looked like then.
        python: the interpreter that wrote it, None where nobody told.
        probe_batch: what the job told of the fixed batch: `{"path", "value"}`, or `{"why"}` there
            is no value; None where it told nothing.
        values: metrics of the newest frame when it was told.
    """

    id: str
    path: str
    step: int = -1
    attempt: int = 0
    how: str = GLOB
    saved: str = ""
    verified: str = ""
    seconds: float | None = None
    bytes: int = 0
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: int = 0
    inside: int | None = None
    rng: bool = False
    state: str = FOUND
    problems: list[str] = field(default_factory=list)
    pinned: bool = False
    there: bool = True
    stamp: Stamp = ()
    python: str | None = None
    probe_batch: dict[str, Any] | None = None
    values: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return Path(self.path).name

    @property
    def earliest(self) -> int:
        """The least step that it may turn out to be of: a file that was found is known late."""
        return self.step - NEAR if self.how == GLOB else self.step

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 by file."""
        return {name: str(about["sha256"]) for name, about in self.files.items()}

    def describe(self, found: Mapping[str, Any]) -> None:
        """Take over what the verifier found in it, see `verifier.Answer`."""
        self.files = dict(found.get("files", {}))
        self.bytes = sum(file["size"] for file in self.files.values()) or self.bytes
        self.tensors = int(found.get("bytes", 0))
        self.inside, self.rng = found.get("step"), bool(found.get("rng"))
        # Seen by its file alone it is known late; a count of steps in it that is near tells which.
        if self.how == GLOB and self.inside is not None:
            late = self.step - (self.inside - 1)
            if 0 <= late <= NEAR:
                self.step = self.inside - 1


class Register:
    """All checkpoints of one run, oldest first.

    Attributes:
        entries: in the order in which they were found.
        before: stamps of what lay there before the run, by path: none of it is ours.
        fresh: nobody kept a register in this run directory yet.
    """

    def __init__(self, run: Path) -> None:
        """Read the register of a run, or begin one.

        Raises:
            StoreError: there is one, and it cannot be read.
        """
        self._path = run / NAME
        self.entries: list[Entry] = []
        self.before: dict[str, Stamp] = {}
        self._next = 1
        self.fresh = not self._path.exists()
        if not self.fresh:
            known = read(run)
            self._next = int(known["next"])
            self.before = {path: _stamp(rows) for path, rows in known["before"].items()}
            self.entries = [_entry(row) for row in known["checkpoints"]]

    def add(self, path: str, **about: Any) -> Entry:
        """Begin the entry of another checkpoint and return it."""
        entry = Entry(f"ckpt-{self._next}", path, **about)
        self._next += 1
        self.entries.append(entry)
        old = [e for e in self.entries if not e.there and not e.pinned]
        for gone in old[: max(0, len(self.entries) - KEPT)]:
            self.entries.remove(gone)
        return entry

    def get(self, name: str) -> Entry | None:
        """Return the entry with this id, None if there is none."""
        return next((entry for entry in self.entries if entry.id == name), None)

    def at(self, path: str) -> Entry | None:
        """Return the newest entry whose files are still at `path`."""
        found = (e for e in reversed(self.entries) if e.path == path and e.there)
        return next(found, None)

    def write(self) -> None:
        """Write it all. Raises OSError: the old file is still there."""
        whole = {
            "next": self._next,
            "checkpoints": [asdict(entry) for entry in self.entries],
            "before": self.before,
        }
        files.replace(self._path, (json.dumps(whole, indent=1) + "\n").encode(), durable=True)


def read(run: Path) -> dict[str, Any]:
    """Return the register of a run as it was written; an empty one if there is none.

    Raises:
        StoreError: it cannot be read.
    """
    path = run / NAME
    try:
        known = files.read_json(path)
        if not isinstance(known["checkpoints"], list) or not isinstance(known["next"], int):
            raise TypeError("next is no number, or checkpoints no list")
        for rows in known["before"].values():
            _stamp(rows)
        rows = [asdict(_entry(row)) for row in known["checkpoints"]]
    except FileNotFoundError:
        return {"next": 1, "checkpoints": [], "before": {}}
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise StoreError(f"{path} is no register of checkpoints: {error}") from error
    return {**known, "checkpoints": rows}


_MOST = 1 << 63
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("id", "path", "how", "saved", "verified", "state"), str),
    **dict.fromkeys(("step", "attempt", "bytes", "tensors"), int),
    **dict.fromkeys(("rng", "pinned", "there"), bool),
    **dict.fromkeys(("files", "values"), dict),
    "problems": list,
    "inside": int | None,
    "seconds": int | float | None,
    "python": str | None,
    "probe_batch": dict | None,
}


def _is(value: Any, kind: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) and (not whole or -_MOST <= value < _MOST)


def _entry(row: Mapping[str, Any]) -> Entry:
    for key in ("id", "path"):
        row[key]  # the others have a value of their own
    for key, kind in _KINDS.items():
        if key in row and not _is(row[key], kind):
            raise TypeError(f"the {key} of {str(row.get('id'))[:40]!r} is {str(row[key])[:40]!r}")
    names = {each.name for each in fields(Entry)}
    known = {key: value for key, value in row.items() if key in names}
    return Entry(**{**known, "stamp": _stamp(row.get("stamp", ()))})


def _stamp(rows: Any) -> Stamp:
    return tuple((str(name), int(size), int(at), int(node)) for name, size, at, node in rows)
