"""`incident.json`: everything that is known of one incident, from the records of its audit log.

The audit log is the truth, the journal has the series: the same records and frames give the same
document, while the incident is open, when it closes, and years later. Non-finite numbers are the
text "NaN", "+Inf" and "-Inf", as in the audit log.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...core.model.decisions import plain
from ...core.model.failure import Failure
from ...core.model.policy import Policy, Rule
from ...store.audit import decode
from ...store.recorder import INCOMPLETE
from .. import failure_report
from ..records import Record, is_of, order_of, outcomes, records_of
from . import deeds, facts, sentences, standing
from .incident_schema import VERSION
from .series import Tapes, loss_of, moves
from .spark import spark

MOST_FAILURES = 8


@dataclass(frozen=True, slots=True)
class About:
    """What the documents of a run have in common.

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
    ) -> About:
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
    records: Sequence[Record], incident: str, about: About, tapes: Tapes | None = None
) -> dict[str, Any]:
    """Return the document of one incident.

    Args:
        records: of the run, oldest first; those before the incident name its cause.
        tapes: the frames around it; None where they cannot be read.
    """
    case = _Case(records, incident, about, tapes)
    return dict(plain({**_head(case), **_sentences(case), **_numbers(case)}))


class _Case:
    """What the sentences and the numbers of one document are made from."""

    def __init__(
        self, records: Sequence[Record], incident: str, about: About, tapes: Tapes | None
    ) -> None:
        self.incident, self.about = incident, about
        mine = self.mine = records_of(records, incident)
        opened = self.opened = opening_of(mine)
        self.mode, self.digest, self.rule_of = _policy_at(records, opened, about)
        self.breach = int(opened["data"].get("breach_step", opened["step"]))
        tape = None if tapes is None else tapes.chosen(_rank(mine))
        self.series = None if tape is None else tape.data(_metrics(mine))
        self.moved = moves(self.series, self.breach)
        self.conditions = facts.conditions(mine, self.series)
        self.actions = decode(facts.actions(mine))
        self.checks = facts.verification(mine)
        self.approval, self.suppressed = facts.approval(mine), facts.suppressed(mine)
        self.messages = facts.messages(records, mine)
        self.skipped = facts.skipped(records, self.breach, mine)
        self.failures = _failures(records, mine, opened)
        self.failure = self.failures[0] if self.failures else None
        self.state = standing.state_of(mine)
        spikes = (r["data"]["spike"] for r in reversed(mine) if r["data"].get("spike"))
        self.diagnosis = decode(next(spikes, None))
        self.closed = next((r for r in reversed(mine) if is_of(r, "incident", "closed")), None)
        self.end = "" if self.closed is None else self.closed["reason"].removeprefix("closed: ")
        self.held = next((r["reason"] for r in reversed(mine) if is_of(r, "incident", "held")), "")
        results = (action["result"] for action in self.actions)
        self.standstill = next((s for one in results if (s := one.get("standstill"))), "")
        self.cause = sentences.cause(
            opened,
            self.moved,
            drill=facts.drill(records, opened, self.breach),
            failure=self.failure,
            standstill=self.standstill,
            diagnosis=self.diagnosis,
            operator=": ".join(order_of(opened)),
            inputs=sentences.inputs(facts.fired(mine, self.rule_of), self.conditions),
        )
        self.acted = _acted(mine)
        self.unprotected = _unprotected(records, mine[-1]["seq"])
        self.run = shlex.quote(about.directory)


def _head(case: _Case) -> dict[str, Any]:
    about, mine, opened, closed = case.about, case.mine, case.opened, case.closed
    return {
        "schema": VERSION,
        "id": case.incident,
        "severity": _severity(mine),
        "title": standing.title_of(
            mine,
            case.rule_of,
            after=case.cause["after"],
            failure=case.failure,
            standstill=case.standstill,
            moved=[one["metric"] for one in case.moved],
        ),
        "state": case.state,
        "state_means": standing.MEANINGS[case.state],
        "final": closed is not None,
        "run": {
            "id": about.run or str(opened.get("run", "")),
            "directory": about.directory,
            "host": about.host,
            "command": list(about.command),
            "policy": about.policy,
            "policy_digest": case.digest,
            "mode": case.mode,
            "phase": about.phase,
        },
        "opened": facts.moment(opened),
        "breach_step": case.breach,
        "closed": None if closed is None else facts.moment(closed) | {"text": case.end},
        "updated": facts.moment(mine[-1]),
        "rules": facts.fired(mine, case.rule_of),
        "scope": _scope(case),
    }


def _sentences(case: _Case) -> dict[str, Any]:
    cost, intents = (
        deeds.cost(case.actions, len(case.skipped)),
        [r for r in case.mine if r["kind"] == "intent"],
    )
    used: Mapping[str, Any] = intents[-1]["data"]["budget"] if intents else {}
    did = sentences.did(
        case.actions,
        state=case.state,
        mode=case.mode,
        skipped=case.skipped,
        approval=case.approval,
        suppressed=case.suppressed,
        verification=case.checks,
        unprotected=case.unprotected,
    )
    ended = case.state in (standing.JOB_ENDED, standing.STOPPED) and not case.end.endswith("code 0")
    spent = sentences.cost(
        cost,
        deeds.budgets(used, case.actions),
        state=case.state,
        ended_at=case.mine[-1]["step"] if ended else None,
        acted=case.acted,
    )
    following = sentences.following(
        state=case.state,
        messages=case.messages,
        failure=case.failure,
        approval=case.approval,
        run=case.run,
    )
    return {
        "what": {
            "text": sentences.what(case.opened, case.moved, case.conditions, case.failure),
            "moves": case.moved,
            "band": case.opened["data"].get("band"),
        },
        "cause": {key: case.cause[key] for key in ("text", "kind", "known")},
        "did": {"text": did, "acted": case.acted},
        "cost": {"text": spent, **cost, "budgets": dict(used)},
        "proof": sentences.proof(
            state=case.state,
            end=case.end,
            held=case.held,
            verification=case.checks,
            diagnosis=case.diagnosis,
            actions=case.actions,
        ),
        "next": {"text": following},
    }


def _numbers(case: _Case) -> dict[str, Any]:
    loss, rule, run = loss_of(case.series), case.opened["rule"], case.run
    asked = f"supervise why-not {run} --rule {rule} --step {case.opened['step']}"
    return {
        "loss": {"metric": loss, "spark": _spark(case.series, loss)},
        "series": case.series,
        "conditions": case.conditions,
        "diagnosis": case.diagnosis,
        "actions": case.actions,
        "approval": case.approval,
        "verification": case.checks,
        "suppressed": case.suppressed,
        "failures": [asdict(one) | {"text": one.text} for one in case.failures[:MOST_FAILURES]],
        "messages": case.messages,
        "timeline": facts.timeline(case.mine, case.opened),
        "evidence": {
            "directory": f"{case.about.directory}/incidents/{case.incident}",
            "bundles": _bundles(case.actions),
        },
        "replay": {
            "decisions": f"supervise replay {run}",
            "why_not": asked if rule else "",
        },
    }


def opening_of(mine: Sequence[Record]) -> Record:
    """Return the record that opened an incident."""
    return next(r for r in mine if is_of(r, "incident", "opened"))


def overview(records: Sequence[Record], incident: str, about: About) -> dict[str, Any]:
    """Return id, severity, title, state and steps of an incident, for a list of several."""
    mine = records_of(records, incident)
    opened = opening_of(mine)
    _, _, rule_of = _policy_at(records, opened, about)
    found = _failures(records, mine, opened)
    return {
        "id": incident,
        "severity": _severity(mine),
        "title": standing.title_of(mine, rule_of, failure=found[0] if found else None),
        "state": standing.state_of(mine),
        "steps": [opened["step"], mine[-1]["step"]],
        "wall": opened.get("wall"),
    }


# ── its parts ─────────────────────────────────────────────────────────────────────────────────────


def _policy_at(
    records: Sequence[Record], opened: Record, about: About
) -> tuple[str, str, facts.RuleOf]:
    """Return the mode and the digest in force when an incident opened, and who knows its rules."""
    mode, digest = about.mode, ""
    for r in records:
        if r["seq"] > opened["seq"]:
            break
        data = r.get("data") or {}
        if r["kind"] == "run_start":
            mode, digest = str(data.get("mode", mode)), str(data.get("policy_digest", ""))
        elif is_of(r, "policy_load", "reloaded"):
            mode, digest = str(data.get("mode", mode)), str(data["after"])
    policy = about.policies.get(digest)
    rules: dict[str, Rule] = {} if policy is None else {rule.id: rule for rule in policy.rules}
    return mode, digest, rules.get


def _unprotected(records: Sequence[Record], until: int) -> bool:
    """Whether the record of the run had ended before its record `until`, and nobody took over."""
    ended = False
    for r in records:
        if r["seq"] > until:
            break
        ended |= is_of(r, "note", INCOMPLETE)
        ended &= not is_of(r, "note", "adopted")
    return ended


def _metrics(mine: Sequence[Record]) -> list[str]:
    """Return the metrics in breach when the rules fired."""
    found: dict[str, None] = {}
    for r in mine:
        readings = (r["data"].get("numbers") or {}) if is_of(r, "rule", "fired") else {}
        for numbers in readings.values():
            if numbers.get("code") == "BREACH":
                names = [numbers.get("metric"), *numbers.get("nonfinite", ())]
                found.update((str(name), None) for name in names if name)
    return list(found)


def _failures(records: Sequence[Record], mine: Sequence[Record], opened: Record) -> list[Failure]:
    """Return how processes ended, where that is what the incident is about, or what ended it."""
    closed = next((r for r in reversed(mine) if is_of(r, "incident", "closed")), None)
    by_end = closed is not None and "the job ended" in closed["reason"]
    crash = not opened["rule"] or any(r["data"].get("what") == "failure" for r in mine)
    if not (crash or by_end) or order_of(opened):
        return []
    until = mine[-1]["seq"] if closed is None else closed["seq"]
    if not opened["rule"]:  # another start may follow, and fail in its own way
        until = opened["seq"]
    return failure_report.failures([r for r in records if r["seq"] <= until])


def _acted(mine: Sequence[Record]) -> bool | None:
    """Return whether the job was changed, None where that is in doubt."""
    how = [outcome for _, outcome in outcomes(mine)]
    return True if "done" in how else None if "in doubt" in how else False


def _severity(mine: Sequence[Record]) -> str:
    return str(min(r["severity"] for r in mine if r["kind"] == "incident" and r["severity"]))


def _scope(case: _Case) -> dict[str, Any]:
    """Return the rank, the shards and the module that it is about, None where none is known."""
    mine, actions, failure = case.mine, case.actions, case.failure
    rank = _rank(mine) if failure is None else failure.rank
    if found := re.match(r"rank (\d+)\b", case.standstill):
        rank = int(found[1])
    shards = [str(one.get("name")) for a in actions for one in a["args"].get("add") or ()]
    suspects: Mapping[str, Any] = next(
        (r["data"] for r in mine if is_of(r, "note", "shard-suspects")), {}
    )
    shards += list(suspects.get("suspects") or ())
    module = next(
        (
            str(numbers["where"])
            for r in mine
            if is_of(r, "rule", "fired")
            for numbers in (r["data"].get("numbers") or {}).values()
            if numbers.get("where")
        ),
        None,
    )
    return {"rank": rank, "shards": list(dict.fromkeys(shards)), "place": module}


def _rank(mine: Sequence[Record]) -> int | None:
    """Return the rank on which the first rule fired."""
    return next((r["data"].get("rank") for r in mine if is_of(r, "rule", "fired")), None)


def _bundles(actions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the evidence bundles: where they are, relative to the run, and what they lack."""
    return [
        {
            "path": str(made["result"]["path"]),
            "sha256": str(made["result"].get("sha256", "")),
            "files": list(made["result"].get("files", ())),
            "missing": list(made["result"].get("missing", ())),
        }
        for made in actions
        if made["verb"] == "snapshot" and made["ok"] and "path" in made["result"]
    ]


def _spark(series: Mapping[str, Any] | None, loss: str) -> str:
    if series is None or not loss:
        return ""
    return spark(series["signals"][loss], series["attempts"])
