"""What the engine remembers between events, and the desk it writes on during one.

`State` is a cache: folding the journal gives it back. `Turn` lives for one event only.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..analysis.shard_attribution import Blame
from ..detection.rank_monitor import Bank
from ..model import state_machine
from ..model.approval_request import Pending
from ..model.budgets import Ledger
from ..model.checkpoint_registry import Checkpoints
from ..model.decisions import SEVERITIES, Decision
from ..model.events import Event
from ..model.policy import Policy
from .incident import Incident

# Kinds of decisions, and of notes, that may explain a loss, and what question 4 calls them.
EXPLAINS = {
    **dict.fromkeys(("gap", "collector-off", "probe-off", "segment-fault"), "logging"),
    "commit": "action",
    "operator": "operator",
    "drill": "drill",
    "standing-order": "reflex",
    "suspended": "suspended",
    "note": "note",
}
CALLED_OFF = "the end of the job was asked for"  # why it is not started again


@dataclass(slots=True)
class State:
    """Everything that can change a decision.

    Attributes:
        pace: frames of the leading rank since launch; unlike `step` it never goes back.
        began: the pace at which the newest training began.
        cooldown: rule id -> (pace, rung) of its last runbook.
        floor: (rung, pace) of the last incident that acted; the next one enters no lower.
        flips: (rule id, rank) -> paces of its last changes, to tell flapping.
        noted: (detector, kind) -> pace from which on a note of it is written again.
        unable: verb -> why the probe says that this job does not allow it.
        muted: rule id -> what muted it; such a rule is offered again when that is gone.
        happened: (step, attempt, kind, text) of what may explain an excursion of the loss.
        onsets: paces at which the newest excursions were noticed.
        checkpoints: those of the job that the guard told of.
        pending, asked, settled: the request to people that waits; how many there were; what became
            of the newest ones, by id.
        silenced: rule id -> (pace until which it is silent, operator).
        launched: first attempt of the newest launch; frames of older ones are of the past.
        returncode: how the job ended, None while it runs. ended: nobody has answered that yet.
        crashes: the steps at which it ended by itself since it last went beyond all of them.
        hangs: the steps at which it was started again because it stood still, likewise.
        stays: why it is not started again.
        called_off: a signal asked for its end. interrupted: somebody typed that at its terminal.
        over: nothing will run any more.
        blame: which shards troubles began in.
        tried: runbook -> whether it was verified, or nothing asks for that, the last time it ran.
        paused: it was asked to pause, and not seen to go on by our word since.
    """

    machine: str = state_machine.LAUNCHING
    at_ns: int = 0
    step: int = -1
    attempt: int = 0
    pace: int = 0
    began: int = 0
    world_size: int = 1
    banks: dict[int, Bank] = field(default_factory=dict)
    incident: Incident | None = None
    incidents: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    cooldown: dict[str, tuple[int, int]] = field(default_factory=dict)
    floor: tuple[int, int] | None = None
    flips: dict[tuple[str, int], deque[int]] = field(default_factory=dict)
    flapping: set[str] = field(default_factory=set)
    noted: dict[tuple[str, str], int] = field(default_factory=dict)
    muted: dict[str, str] = field(default_factory=dict)
    unable: dict[str, str] = field(default_factory=dict)
    happened: deque[tuple[int, int, str, str]] = field(default_factory=lambda: deque(maxlen=64))
    onsets: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    blame: Blame = field(default_factory=Blame)
    held_ns: int | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    pending: Pending | None = None
    asked: int = 0
    settled: dict[str, str] = field(default_factory=dict)
    silenced: dict[str, tuple[int, str]] = field(default_factory=dict)
    stopping: bool = False
    stopped_by: str = "policy"
    launched: int = 0
    returncode: int | None = None
    ended: bool = False
    crashes: list[int] = field(default_factory=list)
    hangs: list[int] = field(default_factory=list)
    stays: str = ""
    called_off: bool = False
    interrupted: bool = False
    over: bool = False
    tried: dict[str, bool] = field(default_factory=dict)
    paused: bool = False

    def copy(self) -> State:
        """Return an independent copy; a run may be cut here and resumed."""
        twin = copy.copy(self)
        twin.banks = {rank: bank.copy() for rank, bank in self.banks.items()}
        twin.incident = copy.deepcopy(self.incident)
        twin.ledger = copy.deepcopy(self.ledger)
        twin.cooldown, twin.muted = dict(self.cooldown), dict(self.muted)
        twin.flapping, twin.unable = set(self.flapping), dict(self.unable)
        twin.noted = dict(self.noted)
        twin.happened, twin.onsets = self.happened.copy(), self.onsets.copy()
        twin.blame = self.blame.copy()
        twin.checkpoints, twin.pending = self.checkpoints.copy(), copy.deepcopy(self.pending)
        twin.settled, twin.silenced = dict(self.settled), dict(self.silenced)
        twin.crashes, twin.hangs = list(self.crashes), list(self.hangs)
        twin.tried = dict(self.tried)
        twin.flips = {key: deque(paces, maxlen=paces.maxlen) for key, paces in self.flips.items()}
        return twin

    def firing(self, policy: Policy) -> list[str]:
        """Return the ids of all rules that fire, or are blind, on any rank, in policy order."""
        return [
            rule.id
            for r, rule in enumerate(policy.rules)
            if any(b.rules[r].firing or b.rules[r].blind for b in self.banks.values())
        ]

    def silence(self, rule: str) -> str | None:
        """Return the name of who silenced a rule that is still to be silent, else None."""
        until, operator = self.silenced.get(rule, (0, ""))
        return operator if self.pace < until else None

    def leader(self) -> int | None:
        """Return the lowest rank that has sent a frame: its frames are the run's pace."""
        return next((rank for rank, bank in self.banks.items() if bank.frames), None)


class Turn:
    """One event being judged: collects the decisions and, at most once, what to tell people."""

    __slots__ = ("_message", "decisions", "event", "policy", "state")

    def __init__(self, policy: Policy, state: State, event: Event) -> None:
        self.policy = policy
        self.state = state
        self.event = event
        self.decisions: list[Decision] = []
        self._message: dict[str, Any] | None = None

    def say(
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
            self.state.happened.append((where, self.state.attempt, sort, reason))

    def move(self, event: str, why: str) -> None:
        """Let the machine take `event`; a pair without a move is audited and changes nothing."""
        state = self.state
        target = state_machine.move(
            self.policy.machine or state_machine.DEFAULT, state.machine, event
        )
        if target is None:
            self.say("state", f"{event} has no move in {state.machine}", event=event)
        elif target != state.machine:
            before, state.machine = state.machine, target
            state.held_ns = state.at_ns if target == state_machine.HOLDING else None
            self.say("state", why, event=event, before=before, after=target)

    def tell(
        self,
        severity: str,
        title: str,
        *,
        verdict: str = "",
        why: str = "",
        then: str = "",
        news: bool = False,
    ) -> None:
        """Tell people once per event: the first title stands unless a later one is the `news`."""
        ranks = (*SEVERITIES, "INFO")
        if self._message is None:
            self._message = {"severity": severity, "title": title}
        elif ranks.index(severity) < ranks.index(self._message["severity"]):
            self._message["severity"] = severity
        if news:
            self._message["title"] = title
        for key, text in (("verdict", verdict), ("why", why)):
            if text and (news or key not in self._message):
                self._message[key] = text
        if then:
            self._message["next"] = then

    def close(self) -> list[Decision]:
        """Return the decisions, the message to people last."""
        if self._message is not None:
            blank = {"verdict": "", "why": "", "next": "", "step": self.state.step}
            message: dict[str, Any] = blank | self._message
            self.say(
                "notify_intent", message["title"], severity=message["severity"], message=message
            )
        return self.decisions
