"""The register of the job's checkpoints: `checkpoints.json` in the run directory.

It lists each checkpoint, its state, and whether a copy is pinned below `checkpoints/`. The file is
replaced atomically after each change, so that an adopting supervisor starts from the same state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..core.model.checkpoint_registry import UNKNOWN
from ..errors import StoreError
from ..store import files

NAME = "checkpoints.json"
PINNED = "checkpoints"  # directory of the pinned copies, by id
FOUND, VERIFIED, BAD = "found", "verified", "bad"
UNVERIFIED, VANISHED = "unverified", "vanished"
COPIED = "copied"  # a copy is being made or verified; the next write is a new checkpoint
JUDGED = (FOUND, COPIED, VERIFIED, BAD)
GLOB = "glob"  # found by a pattern, not reported by the job
NEAR = 100  # steps by which a file may be found after its save
KEPT = 256  # newest entries that the register keeps, besides those whose files are present

Stamp = tuple[tuple[str, int, int, int], ...]  # per file: name, size, mtime in ns, inode


@dataclass
class Entry:
    """One checkpoint. Each write to the same path is another checkpoint.

    Attributes:
        path: absolute, as the job names it; a file or a directory.
        step: 0-based, the last optimizer step in it; -1 if unknown.
        how: what reported it: `torch.save`, a library, ..., or `glob`.
        saved, verified: UTC; time of the save or of the first sight, and of the last verification.
        seconds: duration of the save, None if not reported.
        bytes, files: of all files; per name relative to the directory `{"size", "sha256"}`.
        tensor_bytes: bytes of the tensors in it, 0 before verification.
        internal_step: the step that an integer in it gives, in the job's own count.
        rng: whether it contains random states.
        resumable: whether the job can resume from it, see `core.model.checkpoint_registry`.
        problems: one sentence each.
        present: its files are still at `path`, as they were at the last scan.
        stamp: name, size, time and inode of its files at the last scan.
        python: the interpreter that wrote it, None if not reported.
        probe_batch: what the job reported of the fixed batch: `{"path", "value"}`, or `{"why"}` if
            there is no value; None if nothing was reported.
        counters: of the steps in it, by rank; under "all" those of the rank that saved, and of
            each rank that is not listed. `{}` if they were not reported.
        values: metrics of the newest frame at the time of the save.
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
    tensor_bytes: int = 0
    internal_step: int | None = None
    rng: bool = False
    resumable: str = UNKNOWN
    state: str = FOUND
    problems: list[str] = field(default_factory=list)
    pinned: bool = False
    present: bool = True
    stamp: Stamp = ()
    python: str | None = None
    probe_batch: dict[str, Any] | None = None
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return Path(self.path).name

    @property
    def label(self) -> str:
        """Its id and step, for people."""
        return f"{self.id} of {f'step {self.step}' if self.step >= 0 else 'an unknown step'}"

    @property
    def earliest(self) -> int:
        """The earliest step it may belong to: a file found by a pattern is seen late."""
        return self.step - NEAR if self.how == GLOB else self.step

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 by file."""
        return {name: str(about["sha256"]) for name, about in self.files.items()}

    def describe(self, found: Mapping[str, Any]) -> None:
        """Store what the verifier found in it, see `verification.Verdict`."""
        self.files = dict(found.get("files", {}))
        self.bytes = sum(file["size"] for file in self.files.values()) or self.bytes
        self.tensor_bytes = int(found.get("bytes", 0))
        self.internal_step, self.rng = found.get("step"), bool(found.get("rng"))
        self.resumable = str(found.get("resumable", UNKNOWN))
        # A file found by a pattern is seen late; a plausible step count inside it corrects that.
        if self.how == GLOB and self.internal_step is not None:
            late = self.step - (self.internal_step - 1)
            if 0 <= late <= NEAR:
                self.step = self.internal_step - 1


class Register:
    """All checkpoints of one run, oldest first.

    Attributes:
        entries: in the order in which they were found.
        before: stamps of files that existed before the run, by path; they are not the job's.
        fresh: the run directory had no register yet.
    """

    def __init__(self, run: Path) -> None:
        """Read the register of a run, or create one.

        Raises:
            StoreError: it exists and cannot be read.
        """
        self._path = run / NAME
        self.entries: list[Entry] = []
        self.before: dict[str, Stamp] = {}
        self._next = 1
        # A FIFO that the job's user put there is replaced at the first write, not read.
        self.fresh = not self._path.is_file()
        if not self.fresh:
            known = read(run)
            self._next = int(known["next"])
            self.before = {path: _stamp(rows) for path, rows in known["before"].items()}
            self.entries = [_entry(row) for row in known["checkpoints"]]

    def add(self, path: str, **about: Any) -> Entry:
        """Add an entry for a new checkpoint and return it."""
        entry = Entry(f"ckpt-{self._next}", path, **about)
        self._next += 1
        self.entries.append(entry)
        old = [e for e in self.entries if not e.present and not e.pinned]
        for dropped in old[: max(0, len(self.entries) - KEPT)]:
            self.entries.remove(dropped)
        return entry

    def get(self, name: str) -> Entry | None:
        """Return the entry with this id, None if there is none."""
        return next((entry for entry in self.entries if entry.id == name), None)

    def at(self, path: str) -> Entry | None:
        """Return the newest entry whose files are still present at `path`."""
        found = (e for e in reversed(self.entries) if e.path == path and e.present)
        return next(found, None)

    def newest(self) -> Entry | None:
        """Return the newest that is still there and the job's own, None without any."""
        return next((e for e in reversed(self.entries) if e.present and e.state in JUDGED), None)

    def write(self) -> None:
        """Write the register. Raises OSError; the old file is unchanged then."""
        document = {
            "next": self._next,
            "checkpoints": [asdict(entry) for entry in self.entries],
            "before": self.before,
        }
        files.replace(self._path, (json.dumps(document, indent=1) + "\n").encode(), durable=True)


def read(run: Path) -> dict[str, Any]:
    """Return the register of a run as written; an empty one if there is none.

    Raises:
        StoreError: it cannot be read.
    """
    path = run / NAME
    try:
        known = files.read_json(path)
        if not isinstance(known["checkpoints"], list) or not isinstance(known["next"], int):
            raise TypeError("next is not a number, or checkpoints is not a list")
        for rows in known["before"].values():
            _stamp(rows)
        rows = [asdict(_entry(row)) for row in known["checkpoints"]]
    except FileNotFoundError:
        return {"next": 1, "checkpoints": [], "before": {}}
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise StoreError(f"{path} is not a register of checkpoints: {error}") from error
    return {**known, "checkpoints": rows}


_INT64 = 1 << 63
_FIELD_TYPES: dict[str, Any] = {
    **dict.fromkeys(("id", "path", "how", "saved", "verified", "state", "resumable"), str),
    **dict.fromkeys(("step", "attempt", "bytes", "tensor_bytes"), int),
    **dict.fromkeys(("rng", "pinned", "present"), bool),
    **dict.fromkeys(("files", "values", "counters"), dict),
    "problems": list,
    "internal_step": int | None,
    "seconds": int | float | None,
    "python": str | None,
    "probe_batch": dict | None,
}


def _matches(value: Any, kind: Any) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) and (not is_int or -_INT64 <= value < _INT64)


def _entry(row: Mapping[str, Any]) -> Entry:
    for key in ("id", "path"):
        row[key]  # the other fields have defaults
    for key, kind in _FIELD_TYPES.items():
        if key in row and not _matches(row[key], kind):
            raise TypeError(f"the {key} of {str(row.get('id'))[:40]!r} is {str(row[key])[:40]!r}")
    names = {each.name for each in fields(Entry)}
    known = {key: value for key, value in row.items() if key in names}
    return Entry(**{**known, "stamp": _stamp(row.get("stamp", ()))})


def _stamp(rows: Any) -> Stamp:
    return tuple((str(name), int(size), int(at), int(node)) for name, size, at, node in rows)
