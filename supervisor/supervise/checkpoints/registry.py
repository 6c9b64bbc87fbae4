"""The register of the job's checkpoints, their manifests, and the events about them.

The register is `checkpoints.json` in the run directory.

It lists each checkpoint, its state, and whether a copy is pinned below `checkpoints/`. The file is
replaced atomically after each change, so that an adopting supervisor starts from the same state.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .. import system
from ..core.model.checkpoint_registry import UNKNOWN, WEIGHTS_ONLY
from ..core.model.events import Event, Notice
from ..core.model.payload import CheckpointState, Json, Payload
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


PIECE = 1 << 24  # bytes


def inputs(paths: Sequence[str], cwd: Path) -> dict[str, str | None]:
    """Return the SHA-256 of each file, None for one that cannot be read."""
    found: dict[str, str | None] = {}
    for name in paths:
        sha = hashlib.sha256()
        try:
            with os.fdopen(files.open_file(cwd / name, foreign=True), "rb") as file:
                while piece := file.read(PIECE):
                    sha.update(piece)
            found[name] = "sha256:" + sha.hexdigest()
        except OSError:
            found[name] = None
    return found


def describe(
    entry: Entry,
    facts: Mapping[str, Any],
    code: Mapping[str, Any],
    environment: Mapping[str, Any],
    inputs: Mapping[str, str | None],
) -> dict[str, Any]:
    """Return the manifest of a checkpoint, JSON-ready.

    Args:
        facts: of the run: its command, its policy.
        code: its version at the first launch: later edits are not part of the run.
    """
    return {
        "checkpoint": {
            "id": entry.id,
            "path": entry.path,
            "step": entry.step,
            "attempt": entry.attempt,
            "saved": entry.saved,
            "verified": entry.verified,
            "bytes": entry.bytes,
            "files": entry.files,
        },
        **facts,
        "code": code,
        "environment": environment,
        "inputs": inputs,
        "rng": "random states are in the checkpoint" if entry.rng else "no random states",
        "metrics": entry.values,
    }


METRICS = ("checkpoint_ok", "checkpoint_size")


class CheckpointNotifications:
    """Queues filled by any thread and drained by the loop. No method blocks.

    Attributes:
        delivered: ids of the checkpoints whose event the loop has taken.
    """

    def __init__(self) -> None:
        self._events: deque[Notice] = deque()
        self._frames: deque[dict[str, float]] = deque()
        self._notes: set[str] = set()
        self.delivered: set[str] = set()

    def verdict(self, entry: Entry, ok: bool | None) -> None:
        """Report the result of a verification; None: it could not be verified."""
        if ok is None:
            why = "; ".join(entry.problems)
            self.note(f"checkpoint {entry.id} in {entry.path} could not be verified: {why}")
        elif ok:
            self.verified(entry)
        else:
            self.bad(entry)

    def verified(self, entry: Entry, *, first: bool = True) -> None:
        """Report a good checkpoint; the `first` report also fills the metrics of a frame."""
        size = f"{entry.bytes:,} bytes in {entry.path}"
        if entry.resumable == WEIGHTS_ONLY:
            size += "; it holds weights only: the job cannot resume its optimizer from it"
        self._event(entry, True, f"was verified: {size}", measured=first)

    def bad(self, entry: Entry) -> None:
        """Report a bad checkpoint."""
        damage = "; ".join(entry.problems[:3])
        self._event(entry, False, f"is bad: {damage}", measured=True, damage=damage)

    def unavailable(self, entry: Entry, why: str) -> None:
        """Report that a checkpoint is no longer available for a rollback."""
        self._event(entry, False, f"is no longer available: {why}", measured=False)

    def foreign(self, entry: Entry) -> None:
        """Report a checkpoint that is not the job's own, once per reason."""
        why = "; ".join(entry.problems)
        self.note(
            f"{entry.path} is left alone: {why}; `supervise checkpoints RUN` lists all such files",
            once=f"foreign {entry.how} {why}",
        )

    def note(self, sentence: str, once: str = "") -> None:
        """Queue a note for people; notes with the same `once` key are queued once."""
        if once and once in self._notes:
            return
        self._notes.add(once)
        self._events.append(Notice(system.monotonic_ns(), "note", sentence))

    def take(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        events: list[Event] = []
        while self._events:
            event = self._events.popleft()
            events.append(event)
            if event.kind == "checkpoint":
                self.delivered.add(event.data.parse(CheckpointState).id)
        return events

    def frame(self) -> dict[str, float]:
        """Return the metrics of the next checkpoint, `{}` if there is none."""
        return self._frames.popleft() if self._frames else {}

    def _event(
        self, entry: Entry, ok: bool, what: str, *, measured: bool, damage: str = ""
    ) -> None:
        if measured:
            values = [float(ok)]
            # Tensors only: other files in a checkpoint grow independently.
            if ok:
                values.append(float(entry.tensor_bytes or entry.bytes))
            self._frames.append(dict(zip(METRICS, values, strict=False)))
        data: dict[str, Json] = {
            "id": entry.id,
            "step": entry.step,
            "attempt": entry.attempt,
            "path": entry.path,
            "ok": ok,
            "bytes": entry.bytes,
            "seconds": entry.seconds,
            "problems": list(entry.problems),
            "resumable": entry.resumable,
            "damage": damage,
        }
        step = entry.step if entry.step >= 0 else None
        of = "" if step is None else f" of step {step}"
        message = f"checkpoint {entry.id}{of} {what}"
        now_ns = system.monotonic_ns()
        self._events.append(Notice(now_ns, "checkpoint", message, step=step, data=Payload(data)))
