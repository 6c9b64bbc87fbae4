"""Keeps `incidents/<id>/incident.json` and its views as the incident proceeds, and puts its card
in messages.

The audit log is the truth: these files can be made again from it (`supervise why --write`). Written
when an incident opens, at most once a second after that, when it closes, and once more when its
last messages were delivered. An error here costs only the files.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..core.model.decisions import IncidentOpened
from ..core.model.events import Frame
from ..core.model.interfaces import APPROVAL, CLOSED, FINISHED, OPENED, Advice, Message, Step
from ..core.model.policy import Policy
from ..errors import StoreError, Views
from ..store import files, run_records
from ..store.run_directory import RunDescription, RunDir
from .incident_builder import build_incident_report
from .incident_facts import BEFORE, MAX_RANKS, Tapes
from .incident_report import IncidentReport, RunOrigin, Status
from .incident_sentences import describe_probation
from .incident_views import render_files
from .records import Record, incident_ids, is_closing, read_records

EVERY_NS = 1_000_000_000
SETTLED_NS = 15_000_000_000  # after its end: messages were delivered, or wait for a channel
CONTEXT, MOST = 500, 5000  # records kept before an incident, and with it; project defaults
PHASE = "the run is in progress"
VIEW = "files of an incident"
NEAR = 100_000  # events before an incident that hold the frames it shows, also of many ranks

Window = Iterable[tuple[Sequence[str], Frame]]


class IncidentFiles:
    """The files of the newest incident of a run.

    Args:
        policy: returns the one in force. window: returns the newest frames with their names.
    """

    def __init__(
        self,
        run: RunDir,
        policy: Callable[[], Policy],
        window: Callable[[], Window],
        views: Views | None = None,
    ) -> None:
        self._run = run
        self._views = views or Views()
        self._policy = policy
        self._window = window
        self._policies: dict[str, Policy] = {}
        self._in_force: list[Record] = []
        self._records: list[Record] = []
        self._incident = ""
        self._tapes = Tapes()
        self._dirty = self._ended = False
        self._written_ns = self._ended_ns = 0

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Take a record that was written to the audit log."""
        self._views.make(VIEW, self._take, record)

    def _take(self, data: Mapping[str, Any]) -> None:
        record = Record.decode(data)
        if names_policy(record):
            self._in_force.append(record)
        else:
            self._records.append(record)
        if isinstance(record.decision, IncidentOpened):
            self._write_last()
            self._incident, self._ended = str(record.incident), False
            self._tapes = Tapes()
            for names, frame in self._window():
                self._tapes.add(frame, names, opened=False)
            del self._records[:-CONTEXT]
        elif not self._incident and len(self._records) > 2 * CONTEXT:
            del self._records[:-CONTEXT]
        elif len(self._records) > MOST:  # the beginning and the end say most
            del self._records[MOST // 2 : MOST // 2 + CONTEXT]
        if self._incident and record.incident == self._incident:
            self._dirty = True
            self._ended |= is_closing(record)

    def on_frame(self, frame: Frame, names: Sequence[str]) -> None:
        """Take a frame before it is judged."""
        if self._incident and not self._ended:
            self._views.make(VIEW, self._tapes.add, frame, names, opened=True)

    def flush(self, now_ns: int) -> None:
        """Write what has changed; called after each event and each round."""
        if not self._incident:
            return
        if self._ended and not self._ended_ns:
            self._ended_ns = now_ns
            self._write(now_ns)
        elif self._ended and now_ns - self._ended_ns > SETTLED_NS:
            self._write_last()
        elif self._dirty and not self._ended and now_ns - self._written_ns >= EVERY_NS:
            self._write(now_ns)

    def close(self) -> None:
        """Write the last state of the newest incident."""
        self._write_last()

    def views(self, incident: str) -> dict[str, str]:
        """Return the files of the newest incident so far, name -> content; empty for another."""
        report = self.report(incident)
        return {} if report is None else render_files(report)

    def report(self, incident: str) -> IncidentReport | None:
        """Return the report of the incident, None if it is not the newest one."""
        if not incident or incident != self._incident:
            return None
        return self._views.make(VIEW, self._report, incident)

    def _report(self, incident: str) -> IncidentReport:
        policy = self._policy()
        self._policies[policy.digest] = policy
        directory = str(self._run.path)
        run = RunOrigin.from_description(describe_run(self._run), directory, PHASE)
        records = [*self._in_force, *self._records]
        return build_incident_report(records, incident, run, self._policies, self._tapes)

    def add_card(self, message: Message) -> Message:
        """Return a message with the card of its incident; as it is where there is no report."""
        report = self.report(message.incident or "")
        if report is None:
            return message
        card = self._views.make("card in messages", add_report_to_message, message, report)
        return card or message

    def resume(self) -> None:
        """Go on with the incident that the records of the run leave open."""
        self._views.make(VIEW, self._resume)

    def _resume(self) -> None:
        records = read_records(self._run)
        incidents = incident_ids(records)
        self._in_force = [record for record in records if names_policy(record)]
        self._records = [record for record in records if not names_policy(record)]
        newest = [r for r in self._records if incidents and r.incident == incidents[-1]]
        if not incidents or any(map(is_closing, newest)):
            del self._records[:-CONTEXT]
            return
        opened = self._records.index(newest[0])
        del self._records[: max(0, opened - CONTEXT)]
        self._incident, self._dirty = incidents[-1], True
        self._tapes = read_tapes(self._run, records, incidents[-1]) or Tapes()

    def _write_last(self) -> None:
        if self._incident:
            self._write(0)
        self._incident, self._ended_ns, self._dirty = "", 0, False

    def _write(self, now_ns: int) -> None:
        self._dirty, self._written_ns = False, now_ns
        if (report := self.report(self._incident)) is not None:
            self._views.make(VIEW, write_incident, self._run.incidents_path, report)


def add_report_to_message(message: Message, report: IncidentReport) -> Message:
    """Return a message with the incident's title in words, its card, and where the evidence is."""
    over = message.kind in (CLOSED, FINISHED)
    observation = report.observation.text
    is_first = message.kind == OPENED and report.is_of_rule  # in the words of the card
    is_own = is_first or message.kind == CLOSED
    verdict = observation if is_own else message.verdict or observation
    lines = _message_card(message, report, f"{verdict} {message.why}")
    if report.loss.spark:
        lines.append(("Loss", f"{report.loss.spark}{report.loss.legend}"))
    advice = message.next
    if over and report.evidence.bundles:
        evidence = Step(f"evidence: {message.directory}/incidents/{message.incident}/")
        advice = Advice(advice.lead, advice.steps, (*advice.live, evidence))
    return replace(
        message,
        title=_message_title(message, report),
        verdict=verdict,
        # What the rule is made of is for the page.
        why=f"rule {message.rule}" if message.why and message.rule else message.why,
        next=advice,
        card=tuple(lines),
    )


def _message_card(message: Message, report: IncidentReport, read: str) -> list[tuple[str, str]]:
    """Return Cause, Did, Cost and Proof, as far as there is anything to say.

    Before the end an unknown cause is left out, what an action under way will cost and come to, and
    what people have just read.
    """
    if message.kind in (CLOSED, FINISHED):
        names: tuple[str, ...] = ("Cause", "Did", "Cost", "Proof")
    else:
        names = ("Cause",) if report.cause.is_known else ()
        if message.kind != APPROVAL:
            skipped = ("Did",) if report.cost.skipped else ()
            names += {True: ("Did", "Cost", "Proof"), None: ("Did",), False: skipped}[
                report.response.acted
            ]
    if report.status == Status.WATCHING and describe_probation(report.verification) in read:
        names = tuple(name for name in names if name != "Proof")
    return [(name, text) for name, text in report.sentences if name in names and text not in read]


def _message_title(message: Message, report: IncidentReport) -> str:
    """Return "inc-1: Loss spike: what is new", or how it ended."""
    title = f"{message.incident}: {report.title}"
    if report.cause.kind == "drill":
        title += " (drill)"
    if message.kind == CLOSED:
        return f"{title} · {report.status}"
    if message.kind == OPENED and report.is_of_rule:
        return f"{title} at step {message.step}"
    if message.subject and message.subject in report.title:
        return f"{title} at step {message.step}"  # its newest rule names it
    return title if message.news in title else f"{title}: {message.news}"


def write_incident(incidents: Path, report: IncidentReport) -> None:
    """Replace the files of an incident. Raises OSError."""
    home = incidents / re.sub(r"[^A-Za-z0-9_.-]", "_", report.id).lstrip(".")
    files.make_directory(home)
    for name, content in render_files(report).items():
        files.replace_file(home / name, content.encode(), durable=False)


def describe_run(run: RunDir) -> RunDescription:
    """Return the content of run.json, or the id alone where it cannot be read."""
    try:
        return run.describe()
    except StoreError:
        return RunDescription(run=run.id)


def names_policy(record: Record) -> bool:
    """Return whether a record says which policy is in force."""
    return record.kind in ("run_start", "policy_load")


def read_tapes(run: RunDir, records: Sequence[Record], incident: str) -> Tapes | None:
    """Return the frames around an incident from the journal, None where it cannot be read."""
    own = [record for record in records if record.incident == incident]
    return next((tapes for _, tapes in read_all_tapes(run, own)), None)


def read_all_tapes(run: RunDir, records: Iterable[Record]) -> Iterator[tuple[str, Tapes | None]]:
    """Yield the frames around each incident of some records, by one pass over the journal.

    An incident comes when its frames are complete: only those that are open take memory.
    """
    opened: dict[str, int] = {}  # incident -> its first event
    closed: dict[str, int] = {}
    for record in (r for r in records if r.kind == "incident" and r.incident):
        if isinstance(record.decision, IncidentOpened):
            opened.setdefault(str(record.incident), record.event)
        elif is_closing(record):
            closed.setdefault(str(record.incident), record.event)
    waiting = sorted(opened, key=lambda name: opened[name], reverse=True)
    until = max(closed.values()) if closed.keys() >= opened.keys() and closed else None
    current: dict[str, Tapes] = {}
    before: dict[int, deque[tuple[int, Frame, Sequence[str]]]] = {}  # the newest of each rank
    try:
        for number, frame, names in run_records.numbered_frames(run, until):
            while waiting and opened[waiting[-1]] < number:
                name = waiting.pop()
                current[name] = _tapes_before(before, opened[name])
            for name in [name for name in current if closed.get(name, number) < number]:
                yield name, current.pop(name)
            for tapes in current.values():
                tapes.add(frame, names, opened=True)
            if frame.rank in before or len(before) < MAX_RANKS:
                newest = before.setdefault(frame.rank, deque(maxlen=BEFORE))
                newest.append((number, frame, names))
    except StoreError:
        yield from dict.fromkeys([*current, *reversed(waiting)]).items()
        return
    yield from current.items()
    yield from ((name, _tapes_before(before, opened[name])) for name in reversed(waiting))


def _tapes_before(
    before: Mapping[int, Iterable[tuple[int, Frame, Sequence[str]]]], opened: int
) -> Tapes:
    tapes = Tapes()
    for number, frame, names in sorted(chain(*before.values()), key=itemgetter(0)):
        if number > opened - NEAR:
            tapes.add(frame, names, opened=False)
    return tapes
