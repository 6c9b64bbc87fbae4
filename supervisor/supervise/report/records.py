"""Records of an audit log with their decisions, and the questions that they answer: incidents and
their records, actions and their outcomes, failures of the job.

They work on the log of a run in progress, and of one whose supervisor was killed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct

from ..core.model import decisions, formats
from ..core.model.failure import FAILURE_NOTICE, Failure, sort_by_cause
from ..core.model.payload import NOTHING, Payload
from ..errors import reading_recorded_data
from ..store import audit
from ..store.run_directory import RunDir

HINT = "supervise audit show RUN prints them; another version may have written them"
MAX_FAILURES = 8  # in full; the rest follows from one of them as a rule
DONE, FAILED, DOUBT = "done", "failed", "in doubt"
# Decisions without an incident that belong to one if they come from its first or last event.
ATTACHED = (
    *(
        decisions.RuleFired,
        decisions.RuleBlind,
        decisions.RuleCleared,
        decisions.Suppressed,
        decisions.StateChanged,
        decisions.Notified,
        decisions.Rebaselined,
        decisions.NearMiss,
    ),
)
JOINING = (decisions.IncidentOpened, decisions.RuleJoined, decisions.IncidentRaised)
HISTORY = (decisions.PolicyReloaded, decisions.JobLaunched)


class RunStart(Struct, frozen=True):
    """`run_start`: how the job was started; cites: what is cited of trials."""

    policy: str | None = None
    policy_digest: str = ""
    mode: str | None = None
    previous: str | None = None
    cites: Sequence[Payload] = ()


class Undelivered(Struct, frozen=True):
    """A message that did not reach a channel."""

    channel: str
    severity: str
    title: str


class RunEnd(Struct, frozen=True):
    """`run_end`: exit code, the probe's share of a step, messages that wait."""

    exit_code: int
    probe_share: float | None = None
    undelivered: Sequence[Undelivered] = ()


class LaunchIdentity(Struct, frozen=True):
    """`identity`: what a launch consists of, and what differs from the launch before."""

    identity: Payload
    attempt: int = 0
    since: str = ""
    differs: Sequence[Payload] = ()


class SendResult(Struct, frozen=True):
    """`notify_result`: what became of messages on one channel."""

    keys: Sequence[str] = ()
    ok: bool = False
    tries: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """An audit record.

    Attributes:
        event: number of the event in the journal that it comes from, -1 for none.
        decision: of the engine, None in a record of the supervisor.
        data: of a record of the supervisor; empty in one of the engine.
    """

    seq: int
    kind: str
    step: int
    attempt: int
    wall: str | None
    mono_ns: int
    event: int
    reason: str
    decision: decisions.Decision | None
    data: Payload

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> Record:
        """Return a record of a log. Raises ValueError: it is of another version."""
        is_decision = record["actor"] == "engine"
        return cls(
            seq=record["seq"],
            kind=record["kind"],
            step=record["step"],
            attempt=record.get("attempt", 0),
            wall=record.get("wall"),
            mono_ns=record["mono_ns"],
            event=record.get("event", -1),
            reason=record.get("reason", ""),
            decision=decisions.decision_from_record(record) if is_decision else None,
            data=NOTHING if is_decision else Payload(record.get("data")),
        )

    @property
    def incident(self) -> str | None:
        """The incident that it is about."""
        return None if self.decision is None else self.decision.incident


def read_records(run: RunDir) -> list[Record]:
    """Return the records of a run.

    Raises:
        StoreError: the log cannot be read, or is of another version; TamperError: it was changed.
    """
    return decode_log(run, audit.read_audit(run.audit_path))


def decode_log(run: RunDir, log: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Return the records of a log as it is stored. Raises StoreError: it is of another version."""
    with reading_recorded_data(f"the records in {run.audit_path}", HINT):
        return [Record.decode(record) for record in log]


def incident_ids(records: Iterable[Record]) -> list[str]:
    """Return the ids of all incidents, oldest first."""
    opened = (r for r in records if isinstance(r.decision, decisions.IncidentOpened))
    return list(dict.fromkeys(str(record.incident) for record in opened))


def list_troubles(records: Iterable[Record]) -> list[str]:
    """Return the ids of all incidents but those that are an operator's order and no more."""
    incidents: dict[str, None] = {}
    for record in records:
        decision = record.decision
        is_order = isinstance(decision, decisions.IncidentOpened) and decision.requested_by
        if isinstance(decision, JOINING) and not is_order:
            incidents.setdefault(str(record.incident))
    return list(incidents)


def decision_detail(decision: decisions.Decision | None) -> str:
    """Return what tells a decision from others of its kind, "" for nothing."""
    return "" if decision is None else decision.WHAT or str(getattr(decision, "what", ""))


def find_action_outcome(decision: decisions.Decision | None) -> tuple[str, str, Payload] | None:
    """Return `(action, DONE | FAILED | DOUBT, result)` of what ends an action, else None."""
    match decision:
        case decisions.ActionFinished():
            return decision.action.id, DONE, decision.result
        case decisions.ActionFailed():
            return decision.action.id, FAILED, decision.result or NOTHING
        case decisions.ActionInDoubt():
            return decision.action.id, DOUBT, NOTHING
        case decisions.LateOutcome() if decision.action is not None:
            return decision.action.id, DONE if decision.ok else FAILED, decision.result
        case decisions.RunbookWithdrawn() if decision.action is not None:
            return decision.action.id, FAILED, decision.result or NOTHING
    return None


def action_outcomes(records: Iterable[Record]) -> list[str]:
    """Return the outcome of each intended action on the job, oldest first.

    An action without an outcome is in doubt: it is in progress, or its effect is unknown.
    """
    by_action: dict[str, str] = {}
    for record in records:
        decision = record.decision
        if isinstance(decision, decisions.ActionPlanned) and decision.action.touches_job:
            by_action[decision.action.id] = DOUBT
        elif (ending := find_action_outcome(decision)) is not None and ending[0] in by_action:
            by_action[ending[0]] = ending[1]
    return list(by_action.values())


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return "2 actions on the job, 1 failed"."""
    number = counts.get(DONE, 0)
    text = f"{number or 'no'} action{'s' if number > 1 else ''} on the job"
    return text + "".join(f", {counts[end]} {end}" for end in (FAILED, DOUBT) if counts.get(end))


def count_outcomes(records: Iterable[Record]) -> Counter[str]:
    """Return how many actions on the job were done, failed, and are in doubt."""
    return Counter(action_outcomes(records))


class IncidentIndex:
    """The records of each incident, by one pass over a log, which may go on.

    A decision without an incident belongs to one if it comes from its first or last event. A rule
    that was muted when it fired joins later: where it fired is part of the incident.

    Attributes:
        history: starts of the run and of its job, reloads, and failures of processes.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.history: list[Record] = []
        self._own: dict[str, list[Record]] = {}
        self._attached: dict[int, list[Record]] = {}  # by event
        self._muted: dict[str, list[Record]] = {}
        self._firings: dict[str | None, Record] = {}  # the newest of each rule
        for record in records:
            self.add_record(record)

    def add_record(self, record: Record) -> None:
        """Take the next record."""
        made = record.decision
        if record.incident:
            self._own.setdefault(record.incident, []).append(record)
        elif isinstance(made, ATTACHED) and not getattr(made, "alongside", ""):
            self._attached.setdefault(record.event, []).append(record)
        if isinstance(made, decisions.RuleFired):
            self._firings[made.rule] = record
        elif record.incident and isinstance(made, JOINING):
            fired = self._firings.get(made.rule)
            if fired is not None and not fired.incident:
                self._muted.setdefault(record.incident, []).append(fired)
        is_failure = isinstance(made, decisions.NoticeTaken) and made.what == FAILURE_NOTICE
        if is_failure or record.kind == "run_start" or isinstance(made, HISTORY):
            self.history.append(record)

    def records_of_incident(self, incident: str) -> list[Record]:
        """Return the records that name an incident, oldest first."""
        return self._own[incident]

    def records_of(self, incident: str) -> list[Record]:
        """Return the records of an incident with those that belong to it, oldest first."""
        own = self._own.get(incident, [])
        events = {record.event for record in own if record.kind == "incident"} - {-1}
        closed_at = next((record.seq for record in own if is_closing(record)), math.inf)
        attached = [
            record
            for event in events
            for record in self._attached.get(event, ())
            if record.kind != "rule" or record.seq <= closed_at  # else it begins the next one
        ]
        by_number = {r.seq: r for r in (*own, *attached, *self._muted.get(incident, ()))}
        return [by_number[number] for number in sorted(by_number)]


def records_of(records: Iterable[Record], incident: str) -> list[Record]:
    """Return the records of an incident with those that belong to it, see `IncidentIndex`."""
    return IncidentIndex(records).records_of(incident)


def is_closing(record: Record) -> bool:
    """Return whether an incident ends with a record."""
    return isinstance(record.decision, decisions.IncidentClosed)


def notices_of_kind(
    records: Iterable[Record], kind: str
) -> Iterator[tuple[Record, decisions.NoticeTaken]]:
    """Yield the notices of a kind, each with its record."""
    for record in records:
        if isinstance(record.decision, decisions.NoticeTaken) and record.decision.what == kind:
            yield record, record.decision


def launch_failures(records: Iterable[Record]) -> list[Failure]:
    """Return how the processes of the newest launch ended, the one that explains the rest first."""
    ended: list[Failure] = []
    for record in records:
        if isinstance(record.decision, decisions.JobLaunched):
            ended.clear()
        elif (
            isinstance(record.decision, decisions.NoticeTaken)
            and record.decision.what == FAILURE_NOTICE
        ):
            ended.append(record.decision.details.read(Failure))
    return sort_by_cause(ended)


def failure_lines(failures: Sequence[Failure]) -> Iterator[str]:
    """Yield a heading, and per failure its text, its class and its traceback; nothing for none."""
    if failures:
        yield ""
        yield "errors and signals that ended processes of the job"
    for failure in failures[:MAX_FAILURES]:
        yield f"  {failure.text}"
        if failure.cls:
            yield f"    {failure.cls}: {failure.title}; relaunch: {failure.relaunch}"
        yield from (f"    | {line}" for line in failure.traceback.rstrip().splitlines())
    if len(failures) > MAX_FAILURES:
        yield f"  and {len(failures) - MAX_FAILURES} more"


def time_of_day(wall: Any) -> str:
    """Return the time of day of an ISO-8601 time, to the millisecond; "" for what is none."""
    try:
        return datetime.fromisoformat(str(wall)).strftime("%H:%M:%S.%f")[:-3]
    except ValueError:
        return ""


def describe_timeout(timeout_s: float, wall: str | None) -> str:
    """Return how long a request waits, and until when, with the date where it is on another day.

    Args:
        wall: when its time began, ISO-8601; None where nobody knows.
    """
    length = formats.format_timeout(timeout_s)
    if wall is None:
        return length
    begin = datetime.fromisoformat(wall)
    end = begin + timedelta(seconds=timeout_s)
    day = "" if end.date() == begin.date() else f"{end:%Y-%m-%d} "
    return f"{length} (by {day}{end:%H:%M:%S} UTC)"
