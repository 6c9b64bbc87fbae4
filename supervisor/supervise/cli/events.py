"""`supervise events`, `audit`, `replay`: the decisions of a run: as lines, checked, recomputed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
from msgspec import Struct
from msgspec.structs import replace

from ..core.model.decisions import Notified, json_document
from ..core.model.payload import Payload
from ..core.rule_scope import WIRING
from ..errors import StoreError, TamperError, UsageError, reading_recorded_data
from ..store import audit, journal, policies, recorder, run_records
from ..store.files import is_locked
from ..store.run_directory import RunDir
from ._output import echo, echo_json, show_events_read
from ._params import parse_duration
from ._runs import HIDDEN, LogTail, event_line, run_argument
from .why import INSPECT

POLL_S = 0.5


@click.command(name="events")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Print new records until the run is over.")
@click.option(
    "--since",
    metavar="TIME",
    help="Only records of the last 10m, 2h, or since a time (2026-01-05T10:11).",
)
@click.option("--all", "everything", is_flag=True, help="Also rules, near misses and messages.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record a line, as stored.")
def events_command(
    run: Path, follow: bool, since: str | None, everything: bool, as_json: bool
) -> None:
    """Print the decisions and incidents of a run, a line each.

    With --follow it prints until the run is over. The death of the supervisor is reported on stderr
    and does not end it. Times are UTC. The log is not verified: see `supervise audit verify`.

    \b
    Examples:
      supervise events --since 10m
      supervise events -f runs/20260105-101112-7f3a9c
      supervise events -f --json | jq -r 'select(.kind == "intent") | .reason'

    Exit codes: 0; 64 no such run, or not a time; 141 the reader closed the pipe.
    """
    directory = RunDir.open(run)
    moment = None if since is None else _moment(since)
    tail = LogTail(directory.audit_path)
    is_reported, is_over = False, False
    while True:
        alive = is_locked(
            directory.audit_path
        )  # before the records: the last one may come meanwhile
        records = tail.read()
        with reading_recorded_data(
            f"the records in {directory.audit_path}", "supervise audit verify RUN"
        ):
            _print(records, moment, everything=everything, as_json=as_json)
        if records:
            is_over = records[-1].get("kind") == "run_end"
        if not follow or (is_over and not alive):
            return
        if not alive and not is_reported:
            is_reported = True
            text = f"supervise: the supervisor of {run} died; try: supervise adopt {run}"
            echo(text, err=True)
        time.sleep(POLL_S)


def _print(
    records: Iterable[dict[str, Any]], moment: datetime | None, *, everything: bool, as_json: bool
) -> None:
    for record in records:
        if not (everything or _is_shown(record)):
            continue
        if moment is not None and not _is_newer(record, moment):
            continue
        echo_json(record) if as_json else echo(event_line(record))


def _is_shown(record: dict[str, Any]) -> bool:
    """Return whether a record is shown without --all: what is a message only, and is grave.

    Such are an end with a damaged checkpoint, and faults of the wiring.
    """
    kind = str(record.get("kind"))
    if kind != Notified.KIND:
        return kind not in HIDDEN
    message = (record.get("data") or {}).get("message") or {}
    rule = str((message.get("facts") or {}).get("rule") or "")
    is_page = record.get("severity") in run_records.GRAVE and record.get("incident") is None
    return is_page or rule.startswith(f"{WIRING}.")


def _is_newer(record: dict[str, Any], moment: datetime) -> bool:
    try:
        return datetime.fromisoformat(str(record.get("wall"))) >= moment
    except (ValueError, TypeError):
        return True


def _moment(since: str) -> datetime:
    """Return the time that is meant: so long ago, or an ISO-8601 time, UTC without a zone."""
    try:
        return datetime.now(UTC) - timedelta(seconds=parse_duration(since))
    except click.BadParameter:
        pass
    try:
        parsed = datetime.fromisoformat(since)
    except ValueError:
        hint = "write 10m, 2h, 1d, or a time such as 2026-01-05T10:11"
        raise UsageError(f"--since {since!r} is not a time", hint=hint) from None
    return parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)


@click.group(name="audit")
def audit_command() -> None:
    """Verify or print the audit log of a run.

    \b
    Examples:
      supervise audit verify runs/20260105-101112-7f3a9c
      supervise audit show --json 7f3a9c | jq 'select(.kind == "intent")'
    """


def _log(path: Path) -> tuple[Path, str | None]:
    """Return the audit log at `path`, and the id of the run that it must belong to."""
    try:
        if path.is_file():
            return path, None  # a copy kept elsewhere
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    run = RunDir.open(path)
    return run.audit_path, run.id


@audit_command.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--witness",
    nargs=2,
    type=(click.IntRange(min=1), str),
    metavar="SIZE ROOT",
    help="From any message of the run: detects a log that was cut or rewritten.",
)
@click.pass_context
def verify(ctx: click.Context, run: Path, as_json: bool, witness: tuple[int, str] | None) -> None:
    """Verify that the audit log and the files it refers to are unchanged.

    RUN is a run directory, or a copy of an audit.log. In a run directory the policies, the evidence
    and the journal are also compared with their digests in the log.

    \b
    Examples:
      supervise audit verify runs/20260105-101112-7f3a9c
      supervise audit verify runs/20260105-101112-7f3a9c --witness 412 9c1b...

    Exit codes: 0 good; 1 changed (the log, or a file it refers to); 2 only the last record is
    incomplete, after a killed supervisor or a power cut; `supervise adopt` repairs it.
    """
    path, run_id = _log(run)
    report = audit.verify_audit(path, run_id, witness)
    parts = [] if run_id is None else _parts(RunDir.open(run), report.status)
    if as_json:
        facts = {name: getattr(report, name) for name in report.__slots__}
        facts["parts"] = [{name: getattr(part, name) for name in part.__slots__} for part in parts]
        echo_json({**facts, "not_checked": run_records.NOT_CHECKED})
    else:
        echo(f"{report.status}: {report.message}")
        echo(f"head: {report.records} {report.head}")
        for part in parts:
            echo(f"{part.part}: {part.status}: {part.text}")
        if run_id is None:
            echo("checked: the log only; give the run directory to check the files it refers to")
        echo(f"not checked: {'; '.join(run_records.NOT_CHECKED)}")
    changed = any(part.status in (run_records.CHANGED, run_records.MISSING) for part in parts)
    ctx.exit(1 if changed else report.exit_code)


def _parts(run: RunDir, status: str) -> list[run_records.Part]:
    """Compare the files of a run with their digests in the valid records of its log."""
    digests = run_records.Digests()
    with suppress(TamperError):  # reported already; the records before it are good
        for record in audit.read_audit(run.audit_path):
            digests.add_record(record)
    digests.ended = digests.ended and status == "good"
    return list(run_records.check_files(run, digests))


@audit_command.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record a line, as stored.")
def show(run: Path, as_json: bool) -> None:
    """Print the audit log: each decision, its reason and its outcome.

    \b
    Examples:
      supervise audit show runs/20260105-101112-7f3a9c
      supervise audit show --json 7f3a9c | grep '"kind":"suppressed"'
    """
    path, _ = _log(run)
    for record in audit.read_audit(path):
        if as_json:
            echo_json(record, separators=(",", ":"))
        else:
            echo(_line(record))


def _line(record: dict[str, Any]) -> str:
    marks = [record.get(key) for key in ("severity", "incident", "rule")]
    head = [f"{record['seq']:>5}", str(record.get("wall", ""))[11:23], f"step {record.get('step')}"]
    text = [*head, str(record.get("kind")), *[str(mark) for mark in marks if mark]]
    return f"{'  '.join(text)}  {record.get('reason', '')}"


SAME, DIFFERENT, EDITED, INCOMPLETE = "same", "different", "edited", "incomplete"
# Exit codes; that of an incomplete journal is as `audit verify` has it for a truncated log.
EXIT_CODES = {SAME: 0, DIFFERENT: 1, EDITED: 1, INCOMPLETE: 2}


@click.command(name="replay")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def replay_command(ctx: click.Context, run: Path, as_json: bool) -> None:
    """Recompute all decisions of a run and compare them.

    The decisions are computed again from the journal (the recorded frames and events of the job)
    and compared with those in the audit log, under the policies that were in force.

    \b
    Examples:
      supervise replay runs/20260105-101112-7f3a9c
      supervise replay --json 7f3a9c | jq .status

    Exit codes: 0 the same; 1 a difference (the first is shown), or a policy file was edited since;
    2 the same, but the journal is incomplete (a write failed, or journal.max_gb was reached).
    """
    directory = RunDir.open(run)
    log = list(audit.read_audit(directory.audit_path))
    with reading_recorded_data(f"the records in {directory.audit_path}", INSPECT):
        result = _compare(directory, log)
    if as_json:
        echo_json(result)
    else:
        echo(*_lines(result))
    ctx.exit(EXIT_CODES[result.status])


class JournalGap(Struct, frozen=True):
    """Why the journal ends early, and the record that says so."""

    record: int
    text: str


class FirstDifference(Struct, frozen=True):
    """The first decision that is not as recorded; None: there is none on that side."""

    record: int
    event: int
    recorded: Payload | None
    replayed: Payload | None


class ReplayResult(Struct, frozen=True):
    """A replay beside the log; status: a key of EXIT_CODES."""

    status: str
    decisions: int
    edited_policies: Sequence[str]
    removed_events: Sequence[tuple[int, int]]
    ends_before_event: int | None
    reason: JournalGap | None
    difference: FirstDifference | None = None


def _compare(directory: RunDir, log: list[dict[str, Any]]) -> ReplayResult:
    """Return what a replay of a run shows."""
    # Here, not above: policies and detectors are not needed by the other commands.
    from ..catalog import load_policy
    from ..core import engine

    parts = run_records.policy_parts(directory, run_records.read_digests(log))
    edited = [part.text for part in parts if part.status == run_records.CHANGED]
    thinned = journal.first_events_of_thinned(directory.journal_path)
    count, differences = engine.compare_decisions(
        load_policy(directory.policy_path),
        show_events_read(
            journal.read_until(directory.journal_path, thinned[0][0])
            if thinned
            else journal.read_journal(directory.journal_path),
            directory.journal_path,
        ),
        log,
        policies.make_policy_finder(directory, load_policy),
    )
    gap = recorder.incomplete_record(log)
    cut = next((difference.event for difference in differences if difference.lacking), None)
    if cut is None and gap is not None and not differences:
        cut = int(gap["data"]["event"])
    reason = None if gap is None else JournalGap(gap["seq"], str(gap.get("reason")))
    result = ReplayResult(EDITED if edited else SAME, count, edited, thinned, cut, reason)
    if cut is not None or (thinned and not differences):
        return replace(result, status=INCOMPLETE)
    if not differences:
        return result
    first = differences[0]
    difference = FirstDifference(
        count if first.seq is None else first.seq,
        first.event,
        None if first.recorded is None else Payload(first.recorded),
        None if first.replayed is None else Payload(first.replayed),
    )
    return replace(result, status=DIFFERENT, difference=difference)


def _lines(result: ReplayResult) -> Iterator[str]:
    """Yield the result as people read it."""
    for text in result.edited_policies:
        yield f"edited policy: {text}"
    count, removed = result.decisions, result.removed_events
    if result.status == INCOMPLETE and removed:
        spans = ", ".join(f"{start} to {end - 1}" for start, end in removed)
        yield f"incomplete: the frames of events {spans} were removed (journal.max_gb)"
        yield f"  {count} decisions follow from what is before; all are in the log"
    elif result.status == INCOMPLETE:
        ends = f"incomplete: the journal ends before event {result.ends_before_event}"
        yield f"{ends}; {count} decisions follow from what is there"
        if result.reason is not None:
            yield f"  record {result.reason.record}: {result.reason.text}"
    elif (difference := result.difference) is not None:
        yield f"NONDETERMINISM at record {difference.record} (event {difference.event})"
        yield f"  recorded: {_decision_text(difference.recorded)}"
        yield f"  replayed: {_decision_text(difference.replayed)}"
    else:
        yield f"same: {count} decisions follow from the journal"


def _decision_text(decision: Payload | None) -> str:
    if decision is None:
        return "nothing"
    fields = {key: value for key, value in decision.items() if value is not None}
    return json_document(fields)
