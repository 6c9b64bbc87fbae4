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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from .. import system
from ..core.model.checkpoint_registry import UNKNOWN, WEIGHTS_ONLY, checkpoint_number, order_by_age
from ..core.model.events import Event, LateFrame, Notice
from ..core.model.payload import CheckpointState, Json, Payload
from ..errors import StoreError
from ..store import files
from ..store.run_records import RunOutcome

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


Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
BatchFacts = dict[str, str | float | None]  # `{"path", "value"}` of the fixed batch, or `{"why"}`
RankCounters = dict[str, dict[str, float]]


class FileFacts(msgspec.Struct, frozen=True):
    """Size and hash of a file of a checkpoint."""

    size: Int64
    sha256: str


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What the verifier found in a checkpoint, see `supervise_offline.verify`.

    Attributes:
        bytes: of its tensors. step: that an integer in it gives. rng: it has random states.
    """

    files: dict[str, FileFacts] = {}
    bytes: Int64 = 0
    step: Int64 | None = None
    rng: bool = False
    resumable: str = UNKNOWN


class Entry(msgspec.Struct, eq=False):
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
        evaluation: the same of a save by a library, or by one of several ranks, whose resume it is
            not compared with.
        counters: of the steps in it, by rank; under "all" those of the rank that saved, and of
            each rank that is not listed. `{}` if they were not reported.
        values: metrics of the newest frame at the time of the save.
        save: of those of an unknown step the number of the first one of the same save, 0 for none.
    """

    id: str
    path: str
    step: Int64 = -1
    attempt: Int64 = 0
    how: str = GLOB
    saved: str = ""
    verified: str = ""
    seconds: float | None = None
    bytes: Int64 = 0
    files: dict[str, FileFacts] = {}
    tensor_bytes: Int64 = 0
    internal_step: Int64 | None = None
    rng: bool = False
    resumable: str = UNKNOWN
    state: str = FOUND
    problems: list[str] = []
    pinned: bool = False
    present: bool = True
    stamp: Stamp = ()
    python: str | None = None
    probe_batch: BatchFacts | None = None
    evaluation: BatchFacts | None = None
    counters: RankCounters = {}
    values: dict[str, float] = {}
    save: Int64 = 0

    @property
    def name(self) -> str:
        """The last part of the path."""
        return Path(self.path).name

    @property
    def number(self) -> int:
        """The number in its id: they are counted as they are found."""
        return checkpoint_number(self.id)

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
        return {name: file.sha256 for name, file in self.files.items()}

    def take_findings(self, findings: Findings) -> None:
        """Store what the verifier found in it."""
        self.files = dict(findings.files)
        self.bytes = sum(file.size for file in self.files.values()) or self.bytes
        self.tensor_bytes = findings.bytes
        self.internal_step, self.rng = findings.step, findings.rng
        self.resumable = findings.resumable
        # A file found by a pattern is seen late, and so is the step of the run; a plausible step
        # count inside it corrects both.
        inside = self.internal_step
        if self.how != GLOB or self.step < 0 or inside is None:
            return
        if abs(self.step - (inside - 1)) <= NEAR:
            self.step = inside - 1


def find_good_checkpoint(checkpoints: Sequence[Entry], outcome: RunOutcome) -> Entry | None:
    """Return what a relaunch begins from, None without one.

    That is the newest verified one that no incident made suspect; one with weights only if there
    is no other.
    """
    good = [
        entry
        for entry in checkpoints
        if entry.state == VERIFIED and outcome.suspicion_of(entry.attempt, entry.step) is None
    ]
    return next(
        (entry for entry in reversed(good) if entry.resumable != WEIGHTS_ONLY),
        good[-1] if good else None,
    )


def describe_suspicion(entry: Entry, outcome: RunOutcome) -> str:
    """Return why the job must not go back to a checkpoint, "" where no incident says so."""
    suspicion = outcome.suspicion_of(entry.attempt, entry.step)
    if suspicion is None:
        return ""
    return f"saved since the incident of step {suspicion.since[1]}: not for going back"


def describe_passed_over(
    checkpoints: Sequence[Entry], outcome: RunOutcome, good: Entry | None
) -> str:
    """Return why the newest verified checkpoint is passed over for the `good` one, or ""."""
    newest = next((e for e in reversed(checkpoints) if e.state == VERIFIED), None)
    if newest is None or newest is good or not (reason := describe_suspicion(newest, outcome)):
        return ""
    return f"{newest.label} is verified, {reason}"


class RegisterDocument(msgspec.Struct, frozen=True):
    """The content of `checkpoints.json`; `first_steps` as pairs of attempt and step."""

    next: int
    checkpoints: list[Entry]
    before: dict[str, Stamp]
    first_steps: list[tuple[Int64, Int64]] = []


class Register:
    """All checkpoints of one run, oldest first.

    Attributes:
        entries: in the order in which they were found.
        before: stamps of files that existed before the run, by path; they are not the job's.
        first_steps: by attempt, of those after the first; what older attempts made from this step
            on was undone.
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
        self.first_steps: dict[int, int] = {}
        self._next = 1
        # A FIFO that the job's user put there is replaced at the first write, not read.
        self.fresh = not self._path.is_file()
        if not self.fresh:
            document = read_registry(run)
            self._next, self.before = document.next, document.before
            self.entries, self.first_steps = document.checkpoints, dict(document.first_steps)

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

    def entry_at(self, path: str) -> Entry | None:
        """Return the newest entry whose files are still present at `path`."""
        matching = (e for e in reversed(self.entries) if e.path == path and e.present)
        return next(matching, None)

    def newest(self) -> Entry | None:
        """Return the newest that is still there and the job's own, None without any."""
        return find_newest_checkpoint(self.entries)

    def write(self) -> None:
        """Write the register. Raises OSError; the old file is unchanged then."""
        first_steps = sorted(self.first_steps.items())
        document = RegisterDocument(self._next, self.entries, self.before, first_steps)
        text = json.dumps(msgspec.to_builtins(document), indent=1) + "\n"
        files.replace_file(self._path, text.encode(), durable=True)


def find_newest_checkpoint(entries: Iterable[Entry]) -> Entry | None:
    """Return the own one of the newest step that is still there, None without any.

    Of several the damaged one, as `core.model.checkpoint_registry` does, else the last one found.
    """

    def order(entry: Entry) -> tuple[int, ...]:
        damaged = entry.state == BAD
        return order_by_age(entry.attempt, entry.step, entry.save, entry.number, damaged)

    own = (entry for entry in entries if entry.present and entry.state in JUDGED)
    return max(own, key=order, default=None)


def read_registry(run: Path) -> RegisterDocument:
    """Return the register of a run as written; an empty one if there is none.

    Raises:
        StoreError: it cannot be read.
    """
    path = run / NAME
    try:
        return msgspec.convert(files.read_json(path), RegisterDocument)
    except FileNotFoundError:
        return RegisterDocument(1, [], {})
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(f"{path} is not a register of checkpoints: {error}") from error


def predecessors(
    entries: Sequence[Entry], first_steps: Mapping[int, int], entry: Entry
) -> list[Entry]:
    """Return those whose training led to it, without the branches that rollbacks have left.

    Args:
        first_steps: see `Register`. Of an attempt without one its checkpoints tell.
    """
    past = [e for e in entries if e.attempt <= entry.attempt and e.step >= 0]
    starts = [*first_steps.items(), *((e.attempt, e.step) for e in past)]
    starts = [start for start in starts if start[0] <= entry.attempt]
    return [
        e
        for e in past
        if e.step < entry.step
        and all(e.step < step for attempt, step in starts if attempt > e.attempt)
    ]


PIECE = 1 << 24  # bytes


def hash_files(paths: Sequence[str], cwd: Path) -> dict[str, str | None]:
    """Return the SHA-256 of each file, None for one that cannot be read."""
    digests: dict[str, str | None] = {}
    for name in paths:
        sha = hashlib.sha256()
        try:
            with os.fdopen(files.open_file(cwd / name, foreign=True), "rb") as file:
                while piece := file.read(PIECE):
                    sha.update(piece)
            digests[name] = "sha256:" + sha.hexdigest()
        except OSError:
            digests[name] = None
    return digests


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a manifest about the files of the checkpoint."""

    id: str
    path: str
    step: int
    attempt: int
    saved: str
    verified: str
    bytes: int
    files: dict[str, FileFacts]


class Environment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The interpreter that read a checkpoint; `lock` is a hash of all installed packages."""

    python: str = ""
    executable: str = ""
    torch: str = ""
    cuda: str | None = None
    packages: int = 0
    lock: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a checkpoint: its run, code, data and randomness.

    Attributes:
        code: its version at the first launch: later edits are not part of the run.
    """

    checkpoint: CheckpointFacts
    argv: Sequence[str]
    policy: str
    policy_digest: str
    code: object
    environment: Environment
    inputs: Mapping[str, str | None]
    rng: str
    metrics: dict[str, float]


class RunFacts(msgspec.Struct, frozen=True):
    """The part of a manifest about the run: its command without secrets, and its policy."""

    argv: Sequence[str] = ()
    policy: str = ""
    policy_digest: str = ""


def build_manifest(
    entry: Entry,
    facts: RunFacts,
    code: object,
    environment: Environment,
    inputs: Mapping[str, str | None],
) -> Manifest:
    """Return the manifest of a checkpoint."""
    return Manifest(
        checkpoint=CheckpointFacts(
            id=entry.id,
            path=entry.path,
            step=entry.step,
            attempt=entry.attempt,
            saved=entry.saved,
            verified=entry.verified,
            bytes=entry.bytes,
            files=entry.files,
        ),
        argv=facts.argv,
        policy=facts.policy,
        policy_digest=facts.policy_digest,
        code=code,
        environment=environment,
        inputs=inputs,
        rng="random states are in the checkpoint" if entry.rng else "no random states",
        metrics=entry.values,
    )


METRICS = ("checkpoint_ok", "checkpoint_size")
# What is no rule's yet: metric, limit in percent, what it may mean.
SUSPECT = {
    "codec_score": (60.0, "a file of `val` may have been trained on"),
    "memorization_rate": (1.0, "look for duplicates in the training data"),
}


class CheckpointNotifications:
    """Queues filled by any thread and drained by the loop. No method blocks.

    Attributes:
        delivered: ids of the checkpoints whose event the loop has taken.
    """

    def __init__(self) -> None:
        # With the metrics of a frame, which follow the event: whoever reads them knows the file.
        self._events: deque[tuple[Notice | LateFrame, dict[str, float]]] = deque()
        self._frames: deque[dict[str, float]] = deque()
        self._notes: set[str] = set()
        self.delivered: set[str] = set()

    def report_verdict(self, entry: Entry, ok: bool | None) -> None:
        """Report the result of a verification; None: it could not be verified."""
        if ok is None:
            reason = "; ".join(entry.problems)
            self.queue_note(
                f"checkpoint {entry.id} in {entry.path} could not be verified: {reason}",
                unverified=[entry.attempt, entry.step],
            )
        elif ok:
            self.report_good(entry)
        else:
            self.report_bad(entry)

    def report_good(self, entry: Entry, *, first: bool = True) -> None:
        """Report a good checkpoint; the `first` report also fills the metrics of a frame."""
        size = f"{entry.bytes:,} bytes in {entry.path}"
        if entry.resumable == WEIGHTS_ONLY:
            size += "; it holds weights only: the job cannot resume its optimizer from it"
        self._event(entry, True, f"was verified: {size}", measured=first)

    def report_bad(self, entry: Entry) -> None:
        """Report a bad checkpoint."""
        damage = "; ".join(entry.problems[:3])
        self._event(entry, False, f"is bad: {damage}", measured=True, damage=damage)

    def report_unavailable(self, entry: Entry, reason: str) -> None:
        """Report that a checkpoint is no longer available for a rollback."""
        self._event(entry, False, f"is no longer available: {reason}", measured=False)

    def report_evaluation(self, entry: Entry, values: Mapping[str, float], reason: str) -> None:
        """Report what an evaluation measured; `reason`: why nothing is known, "" where it is."""
        now_ns, step = system.monotonic_ns(), max(0, entry.step)
        self._events.append((LateFrame(now_ns, "checkpoint", entry.attempt, step, values), {}))
        for name, (limit, suspicion) in SUSPECT.items():
            value = values.get(name, 0.0)
            if value > limit:
                self.queue_note(
                    f"{name} of checkpoint {entry.label} is {value:.3g} %: above {limit:g} % "
                    f"{suspicion}",
                    once=f"suspect {name}",
                )
        if reason:
            text = f"nothing is known of the model in checkpoint {entry.label}: {reason}"
            self.queue_note(text, once=f"unknown {reason}")

    def report_evaluation_artefact(self, entry: Entry, digest: str) -> None:
        """Report by which evaluation a checkpoint was measured, once for each."""
        if digest:
            self.queue_note(
                f"checkpoint {entry.label} was evaluated by sha256:{digest}: compare only "
                "checkpoints with the same one",
                once=f"artefact {digest}",
                artefact=digest,
            )

    def report_unmeasured(self, entry: Entry, reasons: Mapping[str, str]) -> None:
        """Report what an evaluation lacks, once for each metric of a run."""
        fresh = {
            name: why for name, why in reasons.items() if f"unmeasured {name}" not in self._notes
        }
        self._notes |= {f"unmeasured {name}" for name in fresh}
        if fresh:
            lines = "; ".join(f"{name}: {why}" for name, why in fresh.items())
            self.queue_note(f"not measured of checkpoint {entry.label}: {lines}")

    def report_foreign(self, entry: Entry) -> None:
        """Report a checkpoint that is not the job's own, once per reason."""
        reason = "; ".join(entry.problems)
        self.queue_note(
            f"{entry.path} is left alone: {reason}; `supervise checkpoints RUN` lists all such "
            "files",
            once=f"foreign {entry.how} {reason}",
        )

    def queue_note(self, sentence: str, once: str = "", **data: Json) -> None:
        """Queue a note for people; notes with the same `once` key are queued once."""
        if once and once in self._notes:
            return
        self._notes.add(once)
        now_ns = system.monotonic_ns()
        self._events.append((Notice(now_ns, "note", sentence, data=Payload(data)), {}))

    def take_events(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        events: list[Event] = []
        while self._events:
            event, measured = self._events.popleft()
            events.append(event)
            if measured:
                self._frames.append(measured)
            if isinstance(event, Notice) and event.kind == "checkpoint":
                self.delivered.add(event.data.parse(CheckpointState).id)
        return events

    def frame(self) -> dict[str, float]:
        """Return the metrics of the next checkpoint, `{}` if there is none."""
        return self._frames.popleft() if self._frames else {}

    def _event(
        self, entry: Entry, ok: bool, text: str, *, measured: bool, damage: str = ""
    ) -> None:
        values = [float(ok)] if measured else []
        # Tensors only: other files in a checkpoint grow independently.
        if measured and ok:
            values.append(float(entry.tensor_bytes or entry.bytes))
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
        data |= {"save": entry.save} if entry.step < 0 else {}
        step = entry.step if entry.step >= 0 else None
        step_text = "" if step is None else f" of step {step}"
        message = f"checkpoint {entry.id}{step_text} {text}"
        now_ns = system.monotonic_ns()
        notice = Notice(now_ns, "checkpoint", message, step=step, data=Payload(data))
        self._events.append((notice, dict(zip(METRICS, values, strict=False))))
