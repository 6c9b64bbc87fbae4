"""The messages to people, one class per kind: its fields are the facts, its templates the text.

A template is for `str.format`. Its clauses end with "; ", and one whose fields are empty is left
out; so is a step whose fields are, a part in brackets, and the incident in front of a title. In
commands RUN stands for the run directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import ClassVar, Self

from msgspec import Struct

from .model.decisions import RuleBlind, RuleFired
from .model.interfaces import (
    ACTION,
    APPROVAL,
    CLOSED,
    UPDATED,
    WATCHER,
    Advice,
    Lead,
    Step,
    Steps,
    sentences,
)
from .model.payload import Payload
from .model.policy import Rule
from .model.verdicts import SpikeClass

FIELD, PART = re.compile(r"\{(\w+)"), re.compile(r"\[([^\[\]]*)\]")
UNKNOWN = ("", None, -1)  # of a fact; -1: of a step
IN_INCIDENT = "{incident}: "
NO_ADVICE = Advice()
COMMON = ("severity", "incident", "advice")
PAGES = ("SEV0", "SEV1")
WITHOUT_ANSWER = {"deny": "it is denied, and automatic actions are off", "allow": "it runs"}


class Notice(Struct, frozen=True, kw_only=True):
    """A message.

    Attributes:
        incident: id of the one that it names, "" for none.
        advice: what comes next, as far as the state of the run tells it; NEXT follows.
    """

    KIND: ClassVar[str] = ""  # of `interfaces.KINDS`; "": as an incident is open or not
    TITLE: ClassVar[str] = ""
    WHAT: ClassVar[str] = ""
    WHY: ClassVar[str] = ""
    NEXT: ClassVar[Steps] = ()
    LIVE: ClassVar[Steps] = ()
    LEAD: ClassVar[Lead | None] = None

    severity: str
    incident: str = ""
    advice: Advice = NO_ADVICE

    @property
    def facts(self) -> Payload:
        """Its fields, but for those that each message has."""
        names = (name for name in self.__struct_fields__ if name not in COMMON)
        fields = {name: getattr(self, name) for name in names}
        return Payload({name: value for name, value in fields.items() if value not in ("", None)})

    @property
    def title(self) -> str:
        return self._fill(self.TITLE)

    @property
    def verdict(self) -> str:
        return self._fill(self.WHAT)

    @property
    def reason(self) -> str:
        return self._fill(self.WHY)

    @property
    def then(self) -> Advice:
        steps, live = (tuple(self._steps(templates)) for templates in (self.NEXT, self.LIVE))
        advice = self.advice
        return Advice(advice.lead or self.LEAD, advice.steps + steps, advice.live + live)

    @property
    def next(self) -> Advice:
        """What comes next; of one that pages and says nothing of that, where to look."""
        if self.then or self.severity not in PAGES:
            return self.then
        where = f"supervise why RUN {self.incident}" if self.incident else "supervise status RUN"
        return Advice(None, (), self.then.live or (Step("to look closer", where),))

    def _fill(self, template: str) -> str:
        template = template.removeprefix(IN_INCIDENT) if not self.incident else template
        clauses = PART.sub(self._part, template).split("; ")
        return "; ".join(text for clause in clauses for text in self._clause(clause) if text)

    def _steps(self, templates: Steps) -> Iterator[Step]:
        for step in templates:
            if clause := self._clause(PART.sub(self._part, step.text), step.command):
                yield Step(*clause)

    def _clause(self, *templates: str) -> tuple[str, ...]:
        """Return the filled templates of one clause, () where all its fields are empty."""
        facts = {fact: getattr(self, fact) for text in templates for fact in FIELD.findall(text)}
        if facts and all(value in UNKNOWN for value in facts.values()):
            return ()
        return tuple(text.format_map(facts) for text in templates)

    def _part(self, match: re.Match[str]) -> str:
        facts = FIELD.findall(match[1])
        return match[1] if all(getattr(self, fact) not in UNKNOWN for fact in facts) else ""


# ── rules ─────────────────────────────────────────────────────────────────────────────────────────


class OfRule(Notice, frozen=True, kw_only=True):
    """About a rule that fires; `numbers`: its readings in one line."""

    WHAT = "{numbers}"
    WHY = "rule {rule}[: {expression}]"
    rule: str
    expression: str = ""
    numbers: str = ""
    step: int = -1
    subject: str = ""

    @classmethod
    def from_alarm(
        cls,
        rule: Rule,
        alarm: RuleFired | RuleBlind,
        newest_step: int,
        *,
        numbers: str,
        subject: str,
        incident: str = "",
        advice: Advice = NO_ADVICE,
    ) -> Self:
        """Return the notice of an alarm: of the newest step, but for what is measured late."""
        late = alarm.measured_step if isinstance(alarm, RuleFired) else None
        return cls(
            severity=rule.severity,
            incident=incident,
            advice=advice,
            rule=rule.id,
            expression=rule.text,
            numbers=numbers,
            step=newest_step if late is None else late,
            subject=subject,
        )

    @property
    def about(self) -> str:
        """Its subject, or the rule where that has none."""
        return self.subject or f"rule {self.rule}"


class RuleFires(OfRule, frozen=True, kw_only=True):
    TITLE = "{incident}: {about}[ at step {step}]"


class RuleFiresAlone(OfRule, frozen=True, kw_only=True):
    """It is a SEV0, and an action of the incident before is under way."""

    TITLE = "{about}[ at step {step}]"
    NEXT = sentences("it is answered when the action under way is over")


class RuleFiresBeside(OfRule, frozen=True, kw_only=True):
    KIND = WATCHER
    TITLE = "{about}[ at step {step}]"


class RuleIsBlind(OfRule, frozen=True, kw_only=True):
    TITLE = "{incident}: rule {rule} is blind[ at step {step}]"
    WHY = ""
    NEXT = (Step("state of the probe", "supervise status RUN"),)


class RuleGrows(OfRule, frozen=True, kw_only=True):
    TITLE = "{incident}: worse than before[ at step {step}]"


class RuleGrowsAfterRollback(RuleGrows, frozen=True, kw_only=True):
    """What it was before is of weights that are gone."""

    TITLE = "{incident}: beyond its limits again[ at step {step}]"


class RuleFlapping(Notice, frozen=True, kw_only=True):
    TITLE = "{rule} is flapping"
    WHAT = "{changes} changes in {steps} steps"
    NEXT = sentences("no further notification until it settles or grows")
    rule: str
    changes: int
    steps: int


class RuleFlappingBeside(RuleFlapping, frozen=True, kw_only=True):
    KIND = WATCHER


class RuleSettles(OfRule, frozen=True, kw_only=True):
    TITLE = "{rule} no longer flaps: it has been firing for {steps} steps"
    steps: int


class RuleWouldRun(Notice, frozen=True, kw_only=True):
    TITLE = "{incident}: {rule}"
    NEXT = sentences("{mode} mode: nothing was changed", "enforce would have run {runbook}")
    rule: str
    mode: str
    runbook: str


# ── an incident ───────────────────────────────────────────────────────────────────────────────────


class Diagnosed(Notice, frozen=True, kw_only=True):
    TITLE = "{incident}: diagnosis: {spike}"
    WHAT = "{summary}"
    spike: SpikeClass
    summary: str


class StillOpen(Notice, frozen=True, kw_only=True):
    TITLE = "{incident}: still open, and nobody has acknowledged it"
    WHAT = "{headline}"
    NEXT = (Step("to end these reminders", "supervise ack RUN"),)
    headline: str


class Limit(StrEnum):
    """Why nothing more is tried."""

    NOTHING_LEFT = "no other action of the policy is left to try"
    SAME_DATA = "a further rollback would not help while the data are the same"


class Held(Notice, frozen=True, kw_only=True):
    TITLE = "{incident}: automatic actions are off; a person is needed"
    WHAT = "{cause}; {limit}; {summary}; {status}"
    cause: str
    limit: Limit | None = None
    summary: str = ""
    status: str = ""


class StillHeld(Notice, frozen=True, kw_only=True):
    TITLE = "automatic actions are still off; a person is needed"


class NothingPossible(Notice, frozen=True, kw_only=True):
    TITLE = "{incident}: no automatic action is possible"
    WHAT = "{headline}; {status}"
    WHY = "{runbook}: {refusal}"
    LIVE = (Step("all reasons", "supervise why RUN {incident}"),)
    headline: str
    status: str
    runbook: str
    refusal: str


class Closed(Notice, frozen=True, kw_only=True):
    KIND = CLOSED
    TITLE = "{incident}: closed"
    WHAT = "{outcome}; {summary}"
    outcome: str
    summary: str = ""


class GivenUp(Notice, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: given up"
    WHAT = "{cause}"
    NEXT = sentences("evidence is collected, and the job is ended")
    cause: str


class GivenUpIfIdle(GivenUp, frozen=True, kw_only=True):
    NEXT = sentences("evidence is collected, and the job is ended if it is idle")


class StillUnhelped(Notice, frozen=True, kw_only=True):
    TITLE = "{incident}: still no automatic action can help; a person is needed"
    WHAT = "for {steps} steps; {status}"
    WHY = "{headline}"
    steps: int
    status: str
    headline: str


class StillOff(StillUnhelped, frozen=True, kw_only=True):
    TITLE = "{incident}: automatic actions are still off; a person is needed"


class Acknowledged(Notice, frozen=True, kw_only=True):
    KIND = UPDATED
    TITLE = "{incident}: acknowledged by {operator}"
    WHAT = "reminders stopped"
    operator: str


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


class ApprovalAsked(Notice, frozen=True, kw_only=True):
    KIND = APPROVAL
    TITLE = "{incident}: approve {runbook}?"
    WHAT = "{cause}"
    WHY = "plan: {plan}"
    NEXT = (
        Step("to approve {runbook}", "supervise approve RUN {request}"),
        Step("to deny it", "supervise deny RUN {request}"),
        Step("without an answer within {timeout_s:.0f} s of this message, {consequence}"),
        Step("{status} meanwhile"),
    )
    runbook: str
    cause: str
    plan: str
    request: str
    timeout_s: float
    on_timeout: str
    status: str

    @property
    def consequence(self) -> str:
        return WITHOUT_ANSWER[self.on_timeout]


class ApprovalUnneeded(Notice, frozen=True, kw_only=True):
    KIND = APPROVAL
    TITLE = "{incident}: {runbook} is no longer needed; {request} still waits"
    WHAT = "{summary}"
    runbook: str
    request: str
    summary: str


# ── actions ───────────────────────────────────────────────────────────────────────────────────────


class ActionStarts(Notice, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: automatic action started: {runbook}"
    WHY = "{cause}"
    runbook: str
    cause: str


class EvidenceOf(Notice, frozen=True, kw_only=True):
    TITLE = "{incident}: {headline}"
    WHAT = "{standstill}"
    LIVE = (Step("evidence", "supervise why RUN {incident}"),)
    headline: str
    standstill: str = ""


class UndoFailed(Notice, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: undoing an action failed"
    WHAT = "{error}"
    NEXT: ClassVar[Steps] = (Step("it may still be in force", "supervise status RUN"),)
    error: str


class UndoFailedAtEnd(UndoFailed, frozen=True, kw_only=True):
    """The training that it was of has ended."""

    NEXT = sentences("it may affect the next training session")


class CommandFailed(Notice, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: command of {operator} failed"
    WHAT = "{error}"
    operator: str
    error: str


class ActionWithdrawn(Notice, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: {runbook} is called off"
    WHAT = "{cause}; decided at step {step}"
    WHY = "{headline}"
    runbook: str
    cause: str
    headline: str
    step: int | None = None


class RecoveredSoFar(Notice, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: recovered so far; watched for {steps} more steps"
    WHAT = "{proof}"
    steps: int
    proof: str


class RunsDifferently(RecoveredSoFar, frozen=True, kw_only=True):
    """The restart has left something wrong."""

    TITLE = "{incident}: running again, NOT as before; watched for {steps} more steps"


class CheckpointAwaited(Notice, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: {runbook} waits for a good checkpoint"
    NEXT = sentences(
        "checkpoints from before step {before_step} are verified at once, the newest first",
        "the relaunch follows the first good one",
    )
    runbook: str
    before_step: int | None


class PausedForCheckpoint(Notice, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: the job is paused while a checkpoint is verified"
    WHAT = "{candidates} from before step {before_step} to verify, the newest first"
    LEAD = Lead.NOTHING
    NEXT = (
        Step("{runbook} follows the first good one"),
        Step("to let the job train on instead", "supervise resume RUN"),
    )
    candidates: int
    before_step: int
    runbook: str


class PauseOver(Notice, frozen=True, kw_only=True):
    TITLE = "the pause ended without a resume; the job trains on from step {step}"
    WHAT = "{cause}"
    NEXT = (Step("to pause it again", "supervise pause RUN"),)
    step: int
    cause: str


class RanksDiffer(Notice, frozen=True, kw_only=True):
    TITLE = "{incident}: the ranks differ"
    WHAT = "{headline}"
    NEXT = (
        Step("no command can repair that"),
        Step("stop the job", "supervise stop RUN"),
        Step("then start it from a checkpoint"),
    )
    headline: str


class RanksUnfenceable(Notice, frozen=True, kw_only=True):
    KIND = WATCHER
    TITLE = "the ranks cannot be changed together: no rollback, rate or pause from here on"
    WHY = "{cause}"
    cause: str
