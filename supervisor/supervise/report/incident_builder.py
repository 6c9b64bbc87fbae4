"""The report of an incident, from the records of its audit log.

The audit log is the truth, the journal has the series: the same records and frames give the same
report, while the incident is open, when it closes, and years later.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.model.failure import EXIT, Failure
from ..core.model.policy import Policy, Rule
from ..store.audit import decode
from ..store.recorder import INCOMPLETE
from . import incident_facts as facts
from . import incident_sentences as sentences
from .incident_report import (
    MEANINGS,
    VERSION,
    Cause,
    Closing,
    Cost,
    Evidence,
    IncidentReport,
    IncidentSummary,
    Loss,
    NextStep,
    Observation,
    Proof,
    Replay,
    Response,
    RunOrigin,
    Scope,
    Series,
    Status,
)
from .incident_series import LOSSES, Tapes, loss_of, moves, spark
from .records import Record, failures, headline, is_of, order_of, outcomes, records_of

MAX_FAILURES = 8
MAX_TITLE = 90  # characters


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts that the reports of a run have in common.

    Attributes:
        run: its id. directory: as commands name it. host, command, mode, policy: of `run.json`.
        phase: whether it is in progress, has ended, or lost its supervisor, as a sentence.
        policies: those of the run that can be read, by digest.
    """

    run: str
    directory: str
    host: str = ""
    command: Sequence[str] = ()
    policy: str = ""
    mode: str = ""
    phase: str = ""
    policies: Mapping[str, Policy] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        described: Mapping[str, Any],
        directory: str,
        phase: str,
        policies: Mapping[str, Policy],
    ) -> RunFacts:
        """Return what `run.json` says."""
        return cls(
            str(described.get("run", "")),
            directory,
            str(described.get("host", "")),
            tuple(map(str, described.get("argv", ()))),
            str(described.get("policy", "")),
            str(described.get("mode", "")),
            phase,
            policies,
        )


def build(
    records: Sequence[Record], incident: str, run: RunFacts, tapes: Tapes | None = None
) -> IncidentReport:
    """Return the report of one incident.

    Args:
        records: of the run, oldest first; those before the incident name its cause.
        tapes: the frames around it; None where they cannot be read.
    """
    case = _Case(records, incident, run, tapes)
    incident_records, opened, status, actions = case.own, case.opened, case.status, case.actions
    cause, trigger = case.cause()
    moved, loss = [move.metric for move in case.moves], loss_of(case.series)
    directory = shlex.quote(run.directory)
    why_not = f"supervise why-not {directory} --rule {opened['rule']} --step {opened['step']}"
    return IncidentReport(
        schema=VERSION,
        id=incident,
        severity=_severity(incident_records),
        title=_title(incident_records, case.rule_of, trigger, case.failure, case.standstill, moved),
        status=status,
        status_meaning=MEANINGS[status],
        final=case.closed is not None,
        run=case.origin(),
        opened=facts.moment(opened),
        breach_step=case.breach,
        closed=case.closing(),
        updated=facts.moment(incident_records[-1]),
        rules=case.rules,
        scope=case.scope(),
        observation=Observation(
            text=sentences.observation(opened, case.moves, case.conditions, case.failure),
            moves=case.moves,
            band=opened["data"].get("band"),
        ),
        cause=cause,
        response=Response(text=case.response(), acted=case.acted),
        cost=case.cost(),
        proof=case.proof(),
        next=NextStep(
            text=sentences.next_step(status, case.messages, case.failure, case.approval, directory)
        ),
        loss=Loss(metric=loss, spark=_spark(case.series, loss)),
        series=case.series,
        conditions=case.conditions,
        diagnosis=case.diagnosis,
        actions=actions,
        approval=case.approval,
        verification=case.verification,
        suppressed=case.suppressed,
        failures=case.failures[:MAX_FAILURES],
        messages=case.messages,
        timeline=facts.timeline(incident_records, opened),
        evidence=Evidence(
            directory=f"{run.directory}/incidents/{incident}", bundles=facts.bundles(actions)
        ),
        replay=Replay(
            decisions=f"supervise replay {directory}", why_not=why_not if opened["rule"] else ""
        ),
    )


class _Case:
    """All facts of an incident that its sentences are made from."""

    def __init__(
        self, records: Sequence[Record], incident: str, run: RunFacts, tapes: Tapes | None
    ) -> None:
        self.records, self.run = records, run
        incident_records = self.own = records_of(records, incident)
        self.opened = _opening(incident_records)
        self.closed = next(
            (r for r in reversed(incident_records) if is_of(r, "incident", "closed")), None
        )
        self.end = "" if self.closed is None else self.closed["reason"].removeprefix("closed: ")
        self.mode, self.digest, self.rule_of = _policy_at(records, self.opened, run)
        self.status = facts.status_of(incident_records)
        self.breach = int(self.opened["data"].get("breach_step", self.opened["step"]))
        tape = None if tapes is None else tapes.select(_rank(incident_records))
        self.series = (
            None if tape is None else tape.series(facts.metrics_in_breach(incident_records))
        )
        self.moves = moves(self.series, self.breach)
        self.rules = facts.fired_rules(incident_records, self.rule_of)
        self.conditions = facts.conditions(incident_records, self.series)
        self.actions = facts.actions(incident_records)
        self.verification = facts.verification(incident_records)
        self.approval, self.suppressed = (
            facts.approval(incident_records),
            facts.suppressed(incident_records),
        )
        self.messages = facts.messages(records, incident_records)
        self.skipped = facts.skipped_steps(records, self.breach, incident_records)
        self.failures = _failures(records, incident_records, self.opened)
        self.failure = self.failures[0] if self.failures else None
        spikes = (r["data"]["spike"] for r in reversed(incident_records) if r["data"].get("spike"))
        self.diagnosis = decode(next(spikes, None))
        self.standstill = next((s for a in self.actions if (s := a.result.get("standstill"))), "")
        self.acted = _acted(incident_records)

    def origin(self) -> RunOrigin:
        run = self.run
        return RunOrigin(
            id=run.run or str(self.opened.get("run", "")),
            directory=run.directory,
            host=run.host,
            command=list(run.command),
            policy=run.policy,
            policy_digest=self.digest,
            mode=self.mode,
            phase=run.phase,
        )

    def closing(self) -> Closing | None:
        if self.closed is None:
            return None
        return Closing(**facts.moment_fields(self.closed), text=self.end)

    def scope(self) -> Scope:
        """Return the rank, the shards and the module that it is about."""
        incident_records = self.own
        rank = _rank(incident_records) if self.failure is None else self.failure.rank
        if match := re.match(r"rank (\d+)\b", self.standstill):
            rank = int(match[1])
        shards = [str(shard.get("name")) for a in self.actions for shard in a.args.get("add") or ()]
        suspects = (r["data"] for r in incident_records if is_of(r, "note", "shard-suspects"))
        shards += next((data.get("suspects") or () for data in suspects), ())
        modules = (
            name
            for _, _, numbers in facts.readings(incident_records)
            if (name := numbers.get("where"))
        )
        return Scope(rank=rank, shards=list(dict.fromkeys(shards)), module=next(modules, None))

    def cause(self) -> tuple[Cause, str]:
        return sentences.cause(
            self.opened,
            self.moves,
            drill=facts.drill(self.records, self.opened, self.breach),
            failure=self.failure,
            standstill=self.standstill,
            diagnosis=self.diagnosis,
            operator=" ordered ".join(order_of(self.opened)),
            inputs=sentences.inputs(self.rules, self.conditions),
        )

    def response(self) -> str:
        return sentences.response(
            self.actions,
            status=self.status,
            mode=self.mode,
            skipped=self.skipped,
            approval=self.approval,
            suppressed=self.suppressed,
            verification=self.verification,
            unprotected=_is_unprotected(self.records, self.own[-1]["seq"]),
        )

    def cost(self) -> Cost:
        by_it = self.status in (Status.JOB_ENDED, Status.STOPPED)
        intents = [r for r in self.own if r["kind"] == "intent"]
        return sentences.cost(
            self.actions,
            status=self.status,
            skipped=len(self.skipped),
            budgets=dict(intents[-1]["data"]["budget"]) if intents else {},
            ended_at=self.own[-1]["step"] if by_it and not self.end.endswith("code 0") else None,
            acted=self.acted,
        )

    def proof(self) -> Proof:
        holds = (r["reason"] for r in reversed(self.own) if is_of(r, "incident", "held"))
        return sentences.proof(
            status=self.status,
            end=self.end,
            hold=next(holds, ""),
            verification=self.verification,
            diagnosis=self.diagnosis,
            actions=self.actions,
        )


def summarize(records: Sequence[Record], incident: str, run: RunFacts) -> IncidentSummary:
    """Return the summary of an incident for a list of several."""
    incident_records = records_of(records, incident)
    opened = _opening(incident_records)
    _, _, rule_of = _policy_at(records, opened, run)
    reported = _failures(records, incident_records, opened)
    return IncidentSummary(
        id=incident,
        severity=_severity(incident_records),
        title=_title(incident_records, rule_of, failure=reported[0] if reported else None),
        status=facts.status_of(incident_records),
        steps=(opened["step"], incident_records[-1]["step"]),
        wall=opened.get("wall"),
    )


# ── its parts ─────────────────────────────────────────────────────────────────────────────────────


def _opening(incident: Sequence[Record]) -> Record:
    return next(r for r in incident if is_of(r, "incident", "opened"))


def _policy_at(
    records: Sequence[Record], opened: Record, run: RunFacts
) -> tuple[str, str, facts.RuleOf]:
    """Return the mode and the digest in force when an incident opened, and who knows its rules."""
    mode, digest = run.mode, ""
    for record in records:
        if record["seq"] > opened["seq"]:
            break
        data = record.get("data") or {}
        if record["kind"] == "run_start":
            mode, digest = str(data.get("mode", mode)), str(data.get("policy_digest", ""))
        elif is_of(record, "policy_load", "reloaded"):
            mode, digest = str(data.get("mode", mode)), str(data["after"])
    policy = run.policies.get(digest)
    rules: dict[str, Rule] = {} if policy is None else {rule.id: rule for rule in policy.rules}
    return mode, digest, rules.get


def _is_unprotected(records: Sequence[Record], until: int) -> bool:
    """Whether the record of the run had ended before its record `until`, and nobody took over."""
    ended = False
    for record in records:
        if record["seq"] > until:
            break
        ended |= is_of(record, "note", INCOMPLETE)
        ended &= not is_of(record, "note", "adopted")
    return ended


def _failures(
    records: Sequence[Record], incident: Sequence[Record], opened: Record
) -> list[Failure]:
    """Return how processes ended, where that is what the incident is about, or what ended it."""
    closed = next((r for r in reversed(incident) if is_of(r, "incident", "closed")), None)
    by_end = closed is not None and "the job ended" in closed["reason"]
    crash = not opened["rule"] or any(r["data"].get("what") == "failure" for r in incident)
    if not (crash or by_end) or order_of(opened):
        return []
    until = incident[-1]["seq"] if closed is None else closed["seq"]
    if not opened["rule"]:  # another start may follow, and fail in its own way
        until = opened["seq"]
    return failures([r for r in records if r["seq"] <= until])


def _acted(incident: Sequence[Record]) -> bool | None:
    """Return whether the job was changed, None where that is in doubt."""
    endings = [outcome for _, outcome in outcomes(incident)]
    return True if "done" in endings else None if "in doubt" in endings else False


def _severity(incident: Sequence[Record]) -> Any:
    return min(r["severity"] for r in incident if r["kind"] == "incident" and r["severity"])


def _rank(incident: Sequence[Record]) -> int | None:
    """Return the rank on which the first rule fired."""
    return next((r["data"].get("rank") for r in incident if is_of(r, "rule", "fired")), None)


def _spark(series: Series | None, loss: str) -> str:
    return "" if series is None or not loss else spark(series.signals[loss], series.attempts)


# ── its title ─────────────────────────────────────────────────────────────────────────────────────


def _title(
    incident: Sequence[Record],
    rule_of: facts.RuleOf,
    trigger: str = "",
    failure: Failure | None = None,
    standstill: str = "",
    moved: Sequence[str] = (),
) -> str:
    """Return what an incident is, in words.

    The words are those of the rule that opened or raised it, else of the class of the failure.

    Args:
        trigger: what came first, if another thing than the rule is about.
        standstill: which rank holds the job up, and where.
        moved: metrics that left their level: a loss that did is what people care for first.
    """
    chief = next(
        r
        for r in reversed(incident)
        if is_of(r, "incident", "opened") or is_of(r, "incident", "raised")
    )
    if not chief["rule"]:
        return _clip(_title_without_rule(chief, failure))
    if any(r["kind"] == "blind" and r["rule"] == chief["rule"] for r in incident):
        return _clip(f"Rule {chief['rule']} cannot be evaluated")
    rule = rule_of(chief["rule"])
    title = (rule.title if rule else "") or _title_of_readings(incident, chief["rule"])
    if match := re.match(r"ranks? \d+(, \d+)*", standstill):
        return _clip(f"{title}: {match[0]}")
    if {*moved} & {*LOSSES}:
        title = _title_of_loss(incident, rule_of, chief) or title
    with_trigger = trigger and "rate" not in title.lower()
    return _clip(f"{title} after {trigger}" if with_trigger else title)


def _title_of_loss(incident: Sequence[Record], rule_of: facts.RuleOf, chief: Record) -> str:
    """Return the title of the first rule about the loss that is as severe as the chief one."""
    for record in incident:
        if is_of(record, "rule", "fired") and record["severity"] <= chief["severity"]:
            rule = rule_of(record["rule"])
            if rule is not None and rule.title.startswith("Loss"):
                return rule.title
    return ""


def _title_without_rule(chief: Record, failure: Failure | None) -> str:
    if order := order_of(chief):
        return f"Order of {order[0]}: {order[1]}"
    if failure is None:
        return f"Crash: {headline(chief)}"
    if not failure.title:
        return f"Crash: {failure.text}"
    name = "" if failure.kind == EXIT else failure.type
    rank = f" on rank {failure.rank}" if failure.rank is not None and failure.world_size > 1 else ""
    return f"Crash: {failure.title}{f' ({name})' if name else ''}{rank}"


def _title_of_readings(incident: Sequence[Record], rule: str) -> str:
    """Return the breaches behind a rule without a title: "Loss out of its limit"."""
    for record, _, numbers in facts.readings(incident):
        if record["rule"] != rule:
            continue
        for name in numbers.get("nonfinite", ()):
            return f"{_capitalized(name)} is NaN or Inf"
        if numbers.get("code") == "BREACH" and numbers.get("metric"):
            return f"{_capitalized(numbers['metric'])} out of its limit"
        if numbers.get("code") == "BREACH" and numbers.get("signal"):
            return f"No {numbers['signal']}"
    return f"Rule {rule} fired"


def _capitalized(metric: str) -> str:
    name = sentences.metric_name(metric)
    return name[:1].upper() + name[1:]


def _clip(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_TITLE else f"{text[: MAX_TITLE - 1]}…"
