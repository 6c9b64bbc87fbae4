"""What the engine remembers between events, and the desk it writes on during one.

`State` is a cache: folding the journal gives it back. `StepContext` lives for one event only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..detection.rank_monitor import RankMonitor
from ..model import state_machine
from ..model.budgets import Ledger
from ..model.checkpoint_registry import Checkpoints
from ..model.decisions import SEVERITIES, Decision
from ..model.events import Event
from ..model.policy import Policy
from .approval_log import ApprovalLog
from .incident import Incident
from .incident_history import IncidentHistory
from .job_life import JobLife
from .loss_context import LossContext
from .rule_memory import RuleMemory
from .runbook_execution import RunbookExecution

# Kinds of decisions, and of notes, that may explain a loss, and what question 4 calls them.
EXPLAINS = {
    **dict.fromkeys(("gap", "collector-off", "probe-off", "segment-fault"), "logging"),
    "commit": "action",
    "operator": "operator",
    "drill": "drill",
    "safeguard": "reflex",
    "suspended": "suspended",
    "note": "note",
}


@dataclass(slots=True)
class State:
    """Everything that can change a decision.

    Attributes:
        frame_count: frames of the leading rank since launch; unlike `step` it never goes back.
        held_ns: since when the run is held, or people were last reminded of it; None: it is not.
        monitors: what is known of each rank, in order of the ranks.
        incident: the open one. ledger: what was spent of the budgets.
        checkpoints: those of the job that the guard told of.
        rules, history, job, approvals, context: see their classes.
    """

    machine: str = state_machine.LAUNCHING
    held_ns: int | None = None
    at_ns: int = 0
    step: int = -1
    attempt: int = 0
    frame_count: int = 0
    monitors: dict[int, RankMonitor] = field(default_factory=dict)
    incident: Incident | None = None
    ledger: Ledger = field(default_factory=Ledger)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    rules: RuleMemory = field(default_factory=RuleMemory)
    history: IncidentHistory = field(default_factory=IncidentHistory)
    job: JobLife = field(default_factory=JobLife)
    approvals: ApprovalLog = field(default_factory=ApprovalLog)
    context: LossContext = field(default_factory=LossContext)

    def copy(self) -> State:
        """Return an independent copy; a run may be cut here and resumed."""
        twin = copy.copy(self)
        twin.monitors = {rank: monitor.copy() for rank, monitor in self.monitors.items()}
        twin.incident = copy.deepcopy(self.incident)
        twin.ledger = copy.deepcopy(self.ledger)
        twin.checkpoints = self.checkpoints.copy()
        twin.rules, twin.history = self.rules.copy(), self.history.copy()
        twin.job, twin.approvals = self.job.copy(), self.approvals.copy()
        twin.context = self.context.copy()
        return twin

    def run(self) -> RunbookExecution | None:
        """Return the runbook in progress."""
        incident = self.incident
        return incident.run if incident is not None else None

    def firing(self, policy: Policy) -> list[str]:
        """Return the ids of all rules that fire, or are blind, on any rank, in policy order."""
        return [
            rule.id
            for r, rule in enumerate(policy.rules)
            if any(b.rules[r].firing or b.rules[r].blind for b in self.monitors.values())
        ]

    def silence(self, rule: str) -> str | None:
        """Return the name of who silenced a rule that is still to be silent, else None."""
        return self.rules.silence(rule, self.frame_count)

    def leader(self) -> int | None:
        """Return the lowest rank that has sent a frame: its frames are counted."""
        return next((rank for rank, monitor in self.monitors.items() if monitor.frames), None)


class StepContext:
    """One event being judged: collects the decisions and, at most once, what to tell people."""

    __slots__ = ("_message", "decisions", "event", "policy", "state")

    def __init__(self, policy: Policy, state: State, event: Event) -> None:
        self.policy = policy
        self.state = state
        self.event = event
        self.decisions: list[Decision] = []
        self._message: dict[str, Any] | None = None

    def record(
        self,
        kind: str,
        reason: str,
        *,
        incident: Incident | None = None,
        rule: str | None = None,
        severity: str | None = None,
        **data: Any,
    ) -> None:
        """Append a decision."""
        self._remember(kind, reason, data)
        subject = incident if incident is not None else self.state.incident
        self.decisions.append(
            Decision(
                kind=kind,
                step=self.state.step,
                attempt=self.state.attempt,
                reason=reason,
                incident=subject.id if subject is not None else None,
                rule=rule,
                severity=severity,
                data=data,
            )
        )

    def _remember(self, kind: str, reason: str, data: Mapping[str, Any]) -> None:
        """Keep what may explain a loss: question 4 asks for what happened near an onset."""
        sort = EXPLAINS.get(str(data.get("what", "note")) if kind == "note" else kind)
        if sort is not None:
            step = data.get("at_step")
            where = self.state.step if step is None else int(step)
            self.state.context.happened.append((where, self.state.attempt, sort, reason))

    def move(self, event: str, why: str) -> None:
        """Let the machine take `event`; a pair without a move is audited and changes nothing."""
        state = self.state
        target = state_machine.move(
            self.policy.machine or state_machine.DEFAULT, state.machine, event
        )
        if target is None:
            self.record("state", f"{event} has no move in {state.machine}", event=event)
        elif target != state.machine:
            before, state.machine = state.machine, target
            state.held_ns = state.at_ns if target == state_machine.HOLDING else None
            self.record("state", why, event=event, before=before, after=target)

    def notify(
        self,
        severity: str,
        title: str,
        *,
        verdict: str = "",
        why: str = "",
        then: str = "",
        replace: bool = False,
    ) -> None:
        """Notify people at most once per event.

        The first title stands, unless a later call has `replace`.
        """
        ranks = (*SEVERITIES, "INFO")
        if self._message is None:
            self._message = {"severity": severity, "title": title}
        elif ranks.index(severity) < ranks.index(self._message["severity"]):
            self._message["severity"] = severity
        if replace:
            self._message["title"] = title
        for key, text in (("verdict", verdict), ("why", why)):
            if text and (replace or key not in self._message):
                self._message[key] = text
        if then:
            self._message["next"] = then

    def close(self) -> list[Decision]:
        """Return the decisions, the message to people last."""
        if self._message is not None:
            blank = {"verdict": "", "why": "", "next": "", "step": self.state.step}
            message: dict[str, Any] = blank | self._message
            self.record(
                "notify_intent", message["title"], severity=message["severity"], message=message
            )
        return self.decisions
