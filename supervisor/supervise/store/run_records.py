"""Answers from the records of a run: its outcome, its metrics, changed files.

The metrics include the frames of steps that a rollback undid, with another `attempt`. A live run
can be read up to some recent frame.

The audit log has digests of the policies, of each evidence bundle, and of the journal at each
adoption and at the end of the run. Files without a digest are reported as unchecked.
"""

from __future__ import annotations

import bisect
import csv
import hashlib
import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from msgspec import Struct

from ..core.model.decisions import JOB_ENDED, RECOVERED, SEVERITIES
from ..core.model.events import Announced, Frame, LateFrame
from ..core.model.failure import exit_text
from ..core.model.redaction import spreadsheet_cell
from ..core.model.verdicts import YES
from ..errors import MISSHAPEN, InputError, StoreError
from . import audit, files, journal, policies
from .journal import RETENTION
from .recorder import THINNED, incomplete_record
from .run_directory import RunDir

OUTCOMES = ("commit", "abort", "in_doubt")
ASKED = (75, 78, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes: policy, operator, signal
GRAVE, ADVISORY = ("SEV0", "SEV1"), "SEV2"
# As `audit` writes them; quotes inside of a text are escaped.
_INCIDENT, _APPROVAL = b'"kind":"incident"', b'"kind":"approval"'
_STOP = b'-stop"'  # the end of its action's id


class IncidentOutcome(Struct):
    """How far an incident has come.

    Attributes:
        phase: `open`, `held` or `closed`.
        unsettled: only the end of the job ended it.
        slow: it is about the time of a step.
        unanswered: the newest request about it, if nobody answered.
    """

    id: str
    severity: str | None
    phase: str
    step: int
    wall: str | None
    headline: str
    unsettled: bool = False
    slow: bool = False
    unanswered: str = ""


class Suspicion(NamedTuple):
    """What an incident says against the checkpoints of a run, as the engine judges them.

    Attributes:
        since: attempt and step of its first breach. until: of its end, None while it is open or
            where only the end of the job ended it.
        recovered: its last attempt is good again from its begin on.
    """

    incident: str
    since: tuple[int, int]
    until: tuple[int, int] | None = None
    recovered: bool = False

    def covers(self, attempt: int, step: int) -> bool:
        """Return whether a checkpoint of that attempt and step (-1: unknown) is suspect."""
        first_attempt, breach = self.since
        if attempt < first_attempt or (attempt == first_attempt and 0 <= step < breach):
            return False
        if self.until is None:
            return True
        is_good_again = self.recovered and attempt == self.until[0] > first_attempt
        return (attempt, step) <= self.until and not is_good_again


class StopOrder(NamedTuple):
    """A stop that ended the job.

    Attributes:
        action: its id. runbook: of the policy that ordered it, "" for an operator.
        returncode: of the job, None while nobody knows.
    """

    action: str
    runbook: str
    returncode: int | None = None

    @property
    def by(self) -> str:
        """Who ordered it."""
        return f"runbook {self.runbook}" if self.runbook else "an operator"


class RunEnd(NamedTuple):
    """The record with which a run ended."""

    exit_code: int
    wall: str | None


@dataclass(slots=True)
class RunOutcome:
    """How far a run has come.

    Attributes:
        step: of the newest record, -1 without one. end: None unless that ended the run.
        incidents: by id, oldest first.
        suspicions: against checkpoints, by incident.
        stop: the newest order to stop the job, None without one or where it failed.
        operator_action: id of the action with which an operator's `stop` was answered.
        relaunching: the newest action on the job is a relaunch without an outcome.
        incomplete: why the journal ends early, "" where it does not.
    """

    step: int = -1
    end: RunEnd | None = None
    incidents: dict[str, IncidentOutcome] = field(default_factory=dict)
    suspicions: dict[str, Suspicion] = field(default_factory=dict)
    stop: StopOrder | None = None
    operator_action: str = ""
    relaunching: bool = False
    incomplete: str = ""

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Take the next record."""
        kind, data = record["kind"], record.get("data") or {}
        self.step, self.end = int(record["step"]), None
        if kind == "run_end":
            self.end = RunEnd(int(data["exit_code"]), record.get("wall"))
        if kind in OUTCOMES and "action" in data:
            self.relaunching = False
            if self.stop is not None and data["action"]["id"] == self.stop.action:
                returncode = (data.get("result") or {}).get("returncode")
                is_done = kind == "commit"
                self.stop = self.stop._replace(returncode=returncode) if is_done else None
        elif kind == "intent":
            action = data["action"]
            self.relaunching = bool(action["verb"] == "relaunch")
            if action["verb"] == "stop":
                is_operators = str(action["id"]) == self.operator_action
                runbook = "" if is_operators else str(action["runbook"])
                self.stop = StopOrder(str(action["id"]), runbook)
            elif self.relaunching:
                self.stop = None
        elif kind == "note" and data.get("command") == "stop" and data.get("action"):
            self.operator_action = str(data["action"])
        elif kind == "incident":
            self._take_suspicion(record, str(data.get("what")))
            self._take_incident(record, str(data.get("what")))
        elif kind == "approval" and (asked := self.incidents.get(str(record["incident"]))):
            is_unanswered = data["what"] in ("expired", "withdrawn")
            asked.unanswered = str(data["id"]) if is_unanswered else ""

    def _take_incident(self, record: Mapping[str, Any], code: str) -> None:
        name, severity = str(record["incident"]), record.get("severity")
        if code == "opened":
            self.incidents[name] = IncidentOutcome(
                *(name, severity, "open", record["step"], record.get("wall"), record["reason"]),
                slow=bool(record["data"].get("slow_step")),
            )
        elif (previous := self.incidents.get(name)) is not None:
            if severity in SEVERITIES:
                previous.severity = min(str(previous.severity), str(severity))
            if code in ("closed", "held"):
                previous.phase = code
            if code == "closed":
                previous.unsettled = _is_unsettled(previous, record["data"])

    def _take_suspicion(self, record: Mapping[str, Any], code: str) -> None:
        name, data = str(record["incident"]), record["data"]
        at = int(record.get("attempt") or 0), int(record["step"])
        breach, previous = data.get("breach_step"), self.suspicions.get(name)
        if code == "opened":
            start = at[1] if breach is None else int(breach)
            self.suspicions[name] = Suspicion(name, (at[0], start))
        elif previous is not None and code == "closed":
            outcome = data.get("outcome")
            if outcome == JOB_ENDED and _rejoined(data).get("answer") == YES:
                del self.suspicions[name]  # the loss at the end is what it was before
                return
            until = None if outcome == JOB_ENDED else at
            self.suspicions[name] = previous._replace(until=until, recovered=outcome == RECOVERED)
        elif previous is not None and breach is not None:
            attempt, start = previous.since
            is_advisory = (known := self.incidents.get(name)) is None or known.severity == ADVISORY
            moved = int(breach) if is_advisory else min(int(breach), start)
            self.suspicions[name] = previous._replace(since=(attempt, moved))

    @property
    def stop_text(self) -> str:
        """Who ordered the stop, how the job ended, and what `supervise` returned; "" without one.

        The error of such an end is left out: the order made it.
        """
        if self.stop is None:
            return ""
        code, returned = self.stop.returncode, None if self.end is None else self.end.exit_code
        parts = [
            *([] if code is None else [f"the job {exit_text(code)}"]),
            *([] if returned is None else [f"supervise returned {returned}"]),
        ]
        return f"stopped by {self.stop.by}: {', '.join(parts)}"

    def suspicion_of(self, attempt: int, step: int) -> Suspicion | None:
        """Return why the job must not go back to a checkpoint, None where it may.

        An advisory incident says nothing against one: a signal alone is unusual often enough to
        leave no checkpoint of a long run in good repute.
        """
        grave = (
            suspicion
            for name, suspicion in self.suspicions.items()
            if (incident := self.incidents.get(name)) is not None and incident.severity != ADVISORY
        )
        return next((each for each in grave if each.covers(attempt, step)), None)

    @property
    def gravest(self) -> list[IncidentOutcome]:
        """The incidents: open ones first, then by severity, then the newest."""
        newest_first = reversed(self.incidents.values())
        return sorted(newest_first, key=lambda i: (i.phase == "closed", str(i.severity)))

    @property
    def worst(self) -> IncidentOutcome | None:
        """The incident of the highest severity in the whole run, the newest of these."""
        incidents = list(reversed(self.incidents.values()))
        return min(incidents, key=lambda i: str(i.severity), default=None)


def _is_unsettled(incident: IncidentOutcome, closed: Mapping[str, Any]) -> bool:
    """Return whether only the end of the job closed it: slow to the end, or its loss not back."""
    rejoined = _rejoined(closed)
    is_grave = incident.severity in GRAVE
    is_about_loss = is_grave or bool(closed.get("acted") or rejoined.get("excursion"))
    is_back = is_about_loss and rejoined.get("answer") == YES and not incident.slow
    return closed.get("outcome") == JOB_ENDED and not closed.get("asked") and not is_back


def _rejoined(closed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the answer to whether the loss came back, {} without one."""
    answer: Mapping[str, Any] = ((closed.get("spike") or {}).get("questions") or {}).get(
        "rejoined"
    ) or {}
    return answer


def read_outcome(records: Iterable[Mapping[str, Any]]) -> RunOutcome:
    """Fold all records of a log."""
    outcome = RunOutcome()

    def read_digests() -> Iterator[Mapping[str, Any]]:
        for record in records:
            outcome.add_record(record)
            yield record

    note = incomplete_record(read_digests())
    outcome.incomplete = "" if note is None else str(note.get("reason"))
    return outcome


def skim_run(path: Path) -> RunOutcome:
    """Return the incidents and the end from a log that is neither verified nor read in full.

    For lists of many runs. A damaged line is passed over: `audit verify` reports it.

    Raises:
        StoreError: the file cannot be read.
    """
    outcome, last_line = RunOutcome(), b""
    for line, _ in audit.log_lines(path):
        if line.endswith(b"\n"):
            last_line = line
            if _INCIDENT in line or _APPROVAL in line or _STOP in line:
                _take(outcome, line)
    if last_line and _INCIDENT not in last_line:
        _take(outcome, last_line)
    return outcome


def _take(outcome: RunOutcome, line: bytes) -> None:
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        outcome.add_record(json.loads(line[65:]))


HEAD = ("step", "rank", "attempt", "wall")
GROUP_ROWS = 1 << 14  # in memory before they are written


class Row(NamedTuple):
    """The values of one step of one rank.

    Attributes:
        wall: when the frame was made, in UTC; None where no record says so.
        values: metric id -> value in the metric's own unit; an absent value has no key.
    """

    step: int
    rank: int
    attempt: int
    wall: datetime | None
    values: dict[str, float]


class WallClock:
    """The time of day of an event, from the audit records that have both clocks.

    CLOCK_MONOTONIC starts again with each boot, so each boot has its own start: the earliest that a
    record implies, since one may be written later than its event happened.

    Args:
        path: the audit log; what is behind damage in it is not used.
    """

    def __init__(self, path: Path) -> None:
        starts: dict[str, tuple[int, datetime]] = {}  # boot -> first event, its moment zero
        with suppress(StoreError):
            for record in audit.read_audit(path):
                number, boot = record.get("event"), str(record.get("boot"))
                if not isinstance(number, int) or number < 0:
                    continue
                with suppress(ValueError, OverflowError):
                    wall = datetime.fromisoformat(record["wall"]).astimezone(UTC)
                    zero = wall - _since_boot(record["mono_ns"])
                    first, zero_ns = starts.get(boot, (number, zero))
                    starts[boot] = first, min(zero_ns, zero)
        self._starts = sorted(starts.values())

    def time_of(self, number: int, at_ns: int) -> datetime | None:
        """Return when event `number` happened, in UTC, None where that is not known."""
        if not self._starts:
            return None
        index = bisect.bisect_right(self._starts, number, key=lambda start: start[0])
        with suppress(OverflowError):
            return self._starts[max(0, index - 1)][1] + _since_boot(at_ns)
        return None


def _since_boot(at_ns: int) -> timedelta:
    return timedelta(microseconds=at_ns // 1000)


def read_rows(run: RunDir, *, late: bool = False) -> Iterator[Row]:
    """Yield all frames in the order of reception.

    Args:
        late: also what was measured of a step later, as rows of rank 0.

    Raises:
        StoreError: the journal is missing or damaged.
    """
    names: dict[int, tuple[str, ...]] = {}
    clock = WallClock(run.audit_path)
    kinds = (Announced, Frame, LateFrame) if late else (Announced, Frame)
    for number, event in journal.read_journal(run.journal_path, only=kinds):
        if isinstance(event, Announced):
            names[event.rank] = event.names
        elif isinstance(event, LateFrame):
            wall = clock.time_of(number, event.at_ns)
            yield Row(event.step, 0, event.attempt, wall, dict(event.values))
        elif isinstance(event, Frame):
            pairs = zip(names.get(event.rank, ()), event.values, strict=False)
            values = {name: value for name, value in pairs if value is not None}
            wall = clock.time_of(number, event.at_ns)
            yield Row(event.step, event.rank, event.attempt, wall, values)


def numbered_frames(
    run: RunDir, until: int | None = None
) -> Iterator[tuple[int, Frame, Sequence[str]]]:
    """Yield `(event number, frame, its names)` in the order of reception, as far as they are kept.

    Args:
        until: the last event number to yield; None for all.

    Raises:
        StoreError: the journal is missing or damaged.
    """
    names: dict[int, tuple[str, ...]] = {}
    for number, event in journal.read_journal(run.journal_path, only=(Announced, Frame)):
        if until is not None and number > until:
            return
        if isinstance(event, Announced):
            names[event.rank] = event.names
        elif isinstance(event, Frame):
            yield number, event, names.get(event.rank, ())


def metric_ids(run: RunDir) -> list[str]:
    """Return the ids of all metrics that were announced or came late, in order of first sight."""
    names: dict[str, None] = {}
    for _, event in journal.read_journal(run.journal_path, only=(Announced, LateFrame)):
        if isinstance(event, Announced):
            names.update(dict.fromkeys(event.names))
        elif isinstance(event, LateFrame):
            names.update(dict.fromkeys(event.values))
    return list(names)


def export_csv(run: RunDir, out: TextIO, metrics: Sequence[str]) -> int:
    """Write one row per step, rank and attempt, and return the number of rows.

    The columns are those of HEAD and the metrics, in order. Absent is empty, NaN is `nan`, infinity
    `inf`; numbers have all digits that a float64 needs; times are ISO-8601 with milliseconds.

    Raises:
        StoreError: the journal is missing or damaged.
    """
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*HEAD, *map(spreadsheet_cell, metrics)])
    count = 0
    for step, rank, attempt, wall, values in read_rows(run, late=True):
        time = "" if wall is None else wall.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        cells = [repr(values[name]) if name in values else "" for name in metrics]
        writer.writerow([step, rank, attempt, time, *cells])
        count += 1
    return count


def export_parquet(run: RunDir, out: BinaryIO, metrics: Sequence[str]) -> int:
    """Write the same as Parquet, zstd-compressed, and return the number of rows.

    `step` is int64, `rank` and `attempt` int32, `wall` a timestamp in UTC, metrics float64; absent
    is null. The id of the run is in the metadata of the file, under `supervise.run`.

    Raises:
        StoreError: the journal is missing or damaged.
        InputError: pyarrow is not installed.
    """
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        hint = "pip install 'supervise-train[backtest]', or export with --csv"
        raise InputError("Parquet needs the package 'pyarrow'", hint=hint) from error
    head = zip(
        HEAD, (arrow.int64(), *[arrow.int32()] * 2, arrow.timestamp("ms", "UTC")), strict=True
    )
    fields = [*head, *((name, arrow.float64()) for name in metrics)]
    schema = arrow.schema(fields, metadata={"supervise.run": run.id})
    count, source = 0, read_rows(run, late=True)
    with parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        while group := list(islice(source, GROUP_ROWS)):
            columns: list[Any] = list(zip(*(row[:4] for row in group), strict=True))
            columns += [[row.values.get(name) for row in group] for name in metrics]
            arrays = [arrow.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
            count += len(group)
    return count


GOOD, CHANGED, MISSING, UNCHECKED = "good", "changed", "missing", "unchecked"
MANIFEST = "manifest.json"
NOT_CHECKED = (
    "records removed from the end of the log (use --witness with the head in a notification)",
    "a log rewritten completely (likewise)",
    "the job's checkpoints, output and data",
    "state.json, checkpoints.json and quarantine.json",
)


@dataclass(frozen=True, slots=True)
class Part:
    """Result for one part of a run.

    Attributes:
        part: `policy`, `evidence` or `journal`.
        status: `good`, `changed`, `missing`, or `unchecked`: the log has no digest of it.
    """

    part: str
    status: str
    text: str


class Digests:
    """The digests in an audit log; `add_record` its records in order."""

    def __init__(self) -> None:
        self.policy: str | None = None
        self.reloaded: dict[str, None] = {}
        self.bundles: dict[str, str] = {}  # path -> digest of its manifest
        self.heads: list[tuple[int, int, str, int]] = []  # events, bytes, digest, record
        self.pieces: list[tuple[str, int, str]] | None = None  # name, bytes, digest; if thinned
        self.ended = False  # the run has ended with a complete journal

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Take the next record."""
        kind, data = record["kind"], record.get("data") or {}
        self.ended = kind == "run_end"
        if kind == "run_start" and self.policy is None:
            self.policy = _text(data.get("policy_digest"))
        elif kind == "policy_load" and (digest_after := _text(data.get("after"))):
            self.reloaded[digest_after] = None
        elif kind == "commit":
            result = data.get("result")
            facts = result if isinstance(result, dict) else {}
            path, digest = _text(facts.get("path")), _text(facts.get("sha256"))
            if path and digest and path.startswith("incidents/"):
                self.bundles[path] = digest
        head = data.get("journal")
        if record["actor"] == "app" and data.get("what") == THINNED:
            self.heads.clear()  # they are of what was there before
            self.pieces = []
        if record["actor"] == "app" and isinstance(head, dict) and "pieces" in head:
            self.pieces = [(str(n), int(size), str(sha)) for n, size, sha in head["pieces"]]
        elif record["actor"] == "app" and isinstance(head, dict):
            events, size, digest = head.get("events"), head.get("bytes"), head.get("sha256")
            if isinstance(events, int) and isinstance(size, int) and isinstance(digest, str):
                self.heads.append((events, size, digest, record["seq"]))


def check_files(run: RunDir, digests: Digests) -> Iterator[Part]:
    """Compare the files of a run with the digests; never raises StoreError."""
    yield from policy_parts(run, digests)
    gc = "removed by `supervise gc` at"
    unchecked = {part: f"{gc} {wall}" for part, wall in removed_parts(run).items()}
    if "incidents" in unchecked:
        yield Part("evidence", UNCHECKED, unchecked["incidents"])
    else:
        yield from _bundles(run, digests.bundles)
    if "journal" in unchecked:
        yield Part("journal", UNCHECKED, unchecked["journal"])
        return
    try:
        yield _journal(run, digests)
    except StoreError as error:
        yield Part("journal", CHANGED, str(error))


def digest_of(path: Path) -> str | None:
    """Return "sha256:..." of a policy's file, None if unreadable."""
    actual = _sha256(path)
    return None if actual is None else f"sha256:{actual}"


def explain_difference(subject: str, expected: str, actual: str | None) -> str:
    """Return a sentence about a file whose digest is not that in the log."""
    if actual is None:
        return f"{subject} is missing or unreadable: expected {expected}"
    return f"{subject} was changed: expected {expected}, actual {actual}"


def policy_parts(run: RunDir, digests: Digests) -> Iterator[Part]:
    """Compare the policies of the run with their digests."""
    initial = digests.policy
    if initial is None:
        yield Part("policy", UNCHECKED, "the log has no digest of policy.yaml")
    digests_of_files = [(run.policy_path, initial)] if initial else []
    digests_of_files += [
        (policies.reloaded_policy_path(run, digest), digest) for digest in digests.reloaded
    ]
    wrong = 0
    for path, expected in digests_of_files:
        actual = digest_of(path)
        if actual != expected:
            wrong += 1
            name = str(path.relative_to(run.path))
            status = MISSING if actual is None else CHANGED
            yield Part("policy", status, explain_difference(name, expected, actual))
    if digests_of_files and not wrong:
        count = len(digests.reloaded)
        suffix = f", and so are {count} reloaded policies" if count else ""
        yield Part("policy", GOOD, f"policy.yaml is unchanged{suffix}")


def _bundles(run: RunDir, bundles: Mapping[str, str]) -> Iterator[Part]:
    wrong = 0
    for path, expected in bundles.items():
        text = _bundle(run.path, path, expected)
        if text is not None:
            wrong += 1
            yield Part("evidence", CHANGED, text)
    if bundles and not wrong:
        yield Part("evidence", GOOD, f"{len(bundles)} bundles are unchanged")
    elif not bundles:
        yield Part("evidence", UNCHECKED, "the log lists no bundle")


def _bundle(home: Path, path: str, expected: str) -> str | None:
    """Return what is wrong with a bundle, None if it is unchanged."""
    if ".." in Path(path).parts:
        return f"{path} is not a path of a bundle"
    manifest = home / path / MANIFEST
    actual = _sha256(manifest)
    if actual != expected:
        return explain_difference(f"{path}/{MANIFEST}", expected, actual)
    try:
        listed = [(str(f["name"]), str(f["sha256"])) for f in files.read_json(manifest)["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path}/{MANIFEST} cannot be parsed: {error}"
    for name, digest in listed:
        if Path(name).name != name:
            return f"{path}/{MANIFEST} lists {name!r}, which is not a file of the bundle"
        actual = _sha256(manifest.with_name(name))
        if actual != digest:
            return explain_difference(f"{path}/{name}", digest, actual)
    return None


def _pieces(run: RunDir, pieces: list[tuple[str, int, str]], *, ended: bool) -> Part:
    """Compare the segments of a thinned journal with their digests."""
    count = journal.count_events(run.journal_path)
    if not pieces:
        text = "all checksums are valid; it was thinned, and the log has no digest of it yet"
        return Part("journal", UNCHECKED, text)
    for name, size, expected in pieces:
        path = run.journal_path / name
        if Path(name).name != name or not path.is_file():
            return Part("journal", MISSING, f"journal/{name} is missing")
        if ended and path.stat().st_size != size:
            return Part("journal", CHANGED, f"journal/{name} has another size than {size} bytes")
        if ended and (actual := _sha256(path)) != expected:
            return Part("journal", CHANGED, explain_difference(f"journal/{name}", expected, actual))
    cut = journal.first_events_of_thinned(run.journal_path)
    events = sum(end - first for first, end in cut)
    text = f"its {len(pieces)} segments are unchanged; frames of {events} of {count} events"
    return Part("journal", GOOD, f"{text} were removed (journal.max_gb)")


def _journal(run: RunDir, digests: Digests) -> Part:
    if digests.pieces is not None:
        return _pieces(run, digests.pieces, ended=digests.ended)
    actual = journal.hash_prefixes(run.journal_path, [size for _, size, _, _ in digests.heads])
    for events, size, expected, record in digests.heads:
        subject = f"the journal up to event {events} (byte {size}, record {record})"
        if size not in actual:
            return Part("journal", CHANGED, f"{subject} is incomplete")
        if actual[size] != expected:
            return Part("journal", CHANGED, explain_difference(subject, expected, actual[size]))
    count = journal.count_events(run.journal_path)
    if not digests.heads:
        return Part(
            "journal", UNCHECKED, "all checksums are valid; the log has no digest of it yet"
        )
    events, size, _, record = digests.heads[-1]
    if not digests.ended:
        return Part(
            "journal",
            GOOD,
            f"its first {events} events match record {record}; later ones have valid checksums, "
            "and no digest in the log yet",
        )
    if count > events:  # a partial event on a full disk does not count
        return Part(
            "journal",
            CHANGED,
            f"events were added after the last one, {events - 1} (byte {size}, record {record})",
        )
    return Part("journal", GOOD, f"its {events} events are unchanged")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _sha256(path: Path) -> str | None:
    try:
        with os.fdopen(files.open_file(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def read_digests(records: Iterable[Mapping[str, Any]]) -> Digests:
    """Return the digests in these records."""
    digests = Digests()
    for record in records:
        digests.add_record(record)
    return digests


def removed_parts(run: RunDir) -> dict[str, str]:
    """Return the parts that were removed, and when; empty where none was, or nobody knows."""
    try:
        rows = run.read_json(RETENTION)["removed"]
        return {str(row["part"]): str(row["wall"]) for row in rows}
    except (StoreError, *MISSHAPEN):
        return {}
