"""The cards and messages of a run that was recorded, as the code of today writes them.

The journal of the run is judged again, and what follows is told: no training is repeated. That
holds as long as the decisions are the same where they touch the job; where they are not, the run
has to be made again (`Told.differs`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

from supervise.catalog import load_policy
from supervise.core import initial_state, step
from supervise.core.model import (
    ActionPlanned,
    Announced,
    Frame,
    Message,
    Notified,
    Policy,
    Reloaded,
    decision_record,
)
from supervise.notifiers import message_of, render_console
from supervise.report import (
    Record,
    RunOrigin,
    Tapes,
    add_report_to_message,
    build_incident_report,
    is_closing,
    render_card,
)
from supervise.store import RunDir, make_policy_finder, read_audit, read_journal

WINDOW = 2000  # frames before an incident: as many as its report can show


@dataclass(frozen=True)
class Sent:
    """A message: the event that it follows, the step then, the text as the console prints it."""

    event: int
    step: int
    attempt: int
    incident: str
    message: Message
    text: str

    @property
    def kind(self) -> str:
        return self.message.kind


@dataclass
class Told:
    """All that a run tells people.

    Attributes:
        cards: incident -> its `incident.json` and its card.
        differs: the first action that is not as it was, "" for none.
    """

    cards: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    messages: list[Sent] = field(default_factory=list)
    differs: str = ""


def told(path: Path, policy: str) -> Told:
    """Return what the code of today tells of a run under a policy of today."""
    run = RunDir.open(path)
    log = list(read_audit(run.audit_path))
    events = list(read_journal(run.journal_path))
    result, replay = Told(), _Replay(run, log, policy)
    for number, event in events:
        replay.take(number, event)
        for decision in replay.decisions:
            if isinstance(decision, Notified):
                result.messages.append(replay.message(decision, number))
    replay.end()
    for incident in dict.fromkeys(replay.incidents):
        report = replay.report(incident)
        result.cards[incident] = json.loads(report.encode()), "\n".join(render_card(report))
    was = [r["data"]["action"]["verb"] for r in log if r["kind"] == "intent"]
    pairs = zip_longest(was, replay.verbs, fillvalue="nothing")
    for n, (then, now) in enumerate(pairs, 1):
        if then != now:
            result.differs = f"action {n} is {now}, was {then}"
            break
    return result


class _Replay:
    def __init__(self, run: RunDir, log: list[dict[str, Any]], policy: str) -> None:
        self.run = run
        self.policy: Policy = load_policy(policy)
        self.find = make_policy_finder(run, load_policy)
        self.state = initial_state(self.policy)
        self.decisions: list[Any] = []
        self.records: list[Record] = []
        self.incidents: list[str] = []
        self.verbs: list[str] = []
        self.frames: list[tuple[int, Frame, tuple[str, ...]]] = []
        self.names: dict[int, tuple[str, ...]] = {}
        self.policies = {self.policy.digest: self.policy}
        self._rest = list(_beside(log))
        for _, record in self._rest:
            if record["kind"] == "run_start":
                record["data"]["policy_digest"] = self.policy.digest
        first = next(r for r in log if r.get("wall"))
        self._clock = datetime.fromisoformat(first["wall"]), int(first["mono_ns"])

    def take(self, number: int, event: Any) -> None:
        """Judge the next event, and put what follows on record."""
        self._put_beside(number)
        if isinstance(event, Announced):
            self.names[event.rank] = event.names
        elif isinstance(event, Frame):
            self.frames.append((number, event, self.names.get(event.rank, ())))
        elif isinstance(event, Reloaded) and event.refused is None:
            self.policy = self.find(event.digest)
            self.policies[self.policy.digest] = self.policy
        self.state, self.decisions = step(self.policy, self.state, event)
        for decision in self.decisions:
            about = {"actor": "engine", "event": number} | decision_record(decision)
            self._put(about, event.at_ns)
            if isinstance(decision, ActionPlanned):
                self.verbs.append(decision.action.verb)
            if self.records[-1].kind == "incident":
                self.incidents.append(str(self.records[-1].incident))

    def end(self) -> None:
        self._put_beside(None)

    def message(self, decision: Notified, number: int) -> Sent:
        """Return what people read of it, as of now."""
        job = shlex.join(self.run.describe().argv)
        message = message_of(decision, self.run.id, "", str(self.run.path), job)
        if message.incident and message.incident in self.incidents[-1:]:
            message = add_report_to_message(message, self.report(message.incident))
        text = render_console(message, colour=False).replace("supervise: ", "").rstrip()
        incident = message.incident or ""
        return Sent(number, decision.step, decision.attempt, incident, message, text)

    def report(self, incident: str) -> Any:
        own = [r for r in self.records if r.incident == incident and r.kind == "incident"]
        opened = own[0].event
        closed = next((r.event for r in own if is_closing(r)), None)
        tapes = Tapes()
        before = [f for f in self.frames if f[0] <= opened][-WINDOW:]
        since = [f for f in self.frames if f[0] > opened and (closed is None or f[0] <= closed)]
        for kept, is_open in ((before, False), (since, True)):
            for _, frame, names in kept:
                tapes.add(frame, names, opened=is_open)
        end = next((r for r in reversed(self.records) if r.kind == "run_end"), None)
        phase = "the run is in progress"
        if end is not None:
            phase = f"the run ended at step {end.step}, {end.reason}"
        described = self.run.describe()
        origin = RunOrigin.from_description(described, str(self.run.path), phase)
        return build_incident_report(self.records, incident, origin, self.policies, tapes)

    def _put(self, about: dict[str, Any], at_ns: int) -> None:
        wall, mono = self._clock
        time = (wall + timedelta(microseconds=(at_ns - mono) / 1000)).isoformat("T", "milliseconds")
        stored = {"seq": len(self.records), "mono_ns": at_ns, "wall": time.replace("+00:00", "Z")}
        self.records.append(Record.decode(about | stored))

    def _put_beside(self, before: int | None) -> None:
        while self._rest and (before is None or self._rest[0][0] < before):
            record = self._rest.pop(0)[1]
            self._put(record, record["mono_ns"])


def _beside(log: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield `(event before it, record)` of what the supervisor itself put on record."""
    number = -1
    for record in log:
        if record["actor"] == "engine":
            number = record["event"]
        elif record["kind"] != "notify_result":  # it names records by their number
            yield number, record
