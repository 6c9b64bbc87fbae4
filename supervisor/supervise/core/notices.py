"""The messages to people, one class per kind: its fields are the facts, its templates the text.

A template is for `str.format`. Its clauses end with "; ", and one whose fields are empty is left
out; so is a part in brackets, and the incident in front of a title. In commands RUN stands for the
run directory.
"""

from __future__ import annotations

import re
from typing import ClassVar

from msgspec import Struct

from .model.decisions import Advice, Lead
from .model.interfaces import ACTION, APPROVAL, CLOSED, UPDATED, WATCHER
from .model.payload import Payload
from .model.verdicts import SpikeClass

FIELD, PART = re.compile(r"\{(\w+)"), re.compile(r"\[([^\[\]]*)\]")
UNKNOWN = ("", None, -1)  # of a fact; -1: of a step
IN_INCIDENT = "{incident}: "
COMMON = ("severity", "incident", "advice")
PAGES = ("SEV0", "SEV1")


class Notice(Struct, frozen=True, kw_only=True):
    """A message; `incident`: id of the one that it names, "" for none."""

    KIND: ClassVar[str] = ""  # of `interfaces.KINDS`; "": as an incident is open or not
    TITLE: ClassVar[str] = ""
    WHAT: ClassVar[str] = ""
    WHY: ClassVar[str] = ""
    NEXT: ClassVar[str] = ""
    LEAD: ClassVar[Lead | None] = None

    severity: str
    incident: str = ""

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
        return Advice(self.LEAD, self._fill(self.NEXT))

    @property
    def next(self) -> Advice:
        """What comes next; of one that pages and says nothing of that, where to look."""
        if self.then or self.severity not in PAGES:
            return self.then
        where = f"supervise why RUN {self.incident}" if self.incident else "supervise status RUN"
        return Advice(None, "", self.then.live or f"to look closer: {where}")

    def _fill(self, template: str) -> str:
        clauses = []
        template = template.removeprefix(IN_INCIDENT) if not self.incident else template
        for clause in PART.sub(self._part, template).split("; "):
            facts = FIELD.findall(clause)
            if not facts or any(getattr(self, fact) not in UNKNOWN for fact in facts):
                clauses.append(clause.format_map({fact: getattr(self, fact) for fact in facts}))
        return "; ".join(filter(None, clauses))

    def _part(self, match: re.Match[str]) -> str:
        facts = FIELD.findall(match[1])
        return match[1] if all(getattr(self, fact) not in UNKNOWN for fact in facts) else ""


class Advised(Notice, frozen=True, kw_only=True):
    """A message whose advice is made from the state of the run; see `advice`."""

    advice: Advice = Advice()

    @property
    def then(self) -> Advice:
        return self.advice


# ── rules ─────────────────────────────────────────────────────────────────────────────────────────


class OfRule(Advised, frozen=True, kw_only=True):
    """About a rule that fires; `numbers`: its readings in one line."""

    WHAT = "{numbers}"
    WHY = "rule {rule}[: {expression}]"
    rule: str
    expression: str = ""
    numbers: str = ""
    step: int = -1
    subject: str = ""

    @property
    def about(self) -> str:
        """Its subject, or the rule where that has none."""
        return self.subject or f"rule {self.rule}"


class RuleFires(OfRule, frozen=True, kw_only=True):
    TITLE = "{incident}: {about}[ at step {step}]"


class RuleFiresAlone(OfRule, frozen=True, kw_only=True):
    """It is a SEV0, and an action of the incident before is under way."""

    TITLE = "{about}[ at step {step}]"


class RuleFiresBeside(OfRule, frozen=True, kw_only=True):
    KIND = WATCHER
    TITLE = "{about}[ at step {step}]"


class RuleIsBlind(OfRule, frozen=True, kw_only=True):
    TITLE = "{incident}: rule {rule} is blind[ at step {step}]"
    WHY = ""


class RuleGrows(OfRule, frozen=True, kw_only=True):
    TITLE = "{incident}: worse than before[ at step {step}]"


class RuleGrowsAfterRollback(RuleGrows, frozen=True, kw_only=True):
    """What it was before is of weights that are gone."""

    TITLE = "{incident}: beyond its limits again[ at step {step}]"


class RuleFlapping(Notice, frozen=True, kw_only=True):
    TITLE = "{rule} is flapping"
    WHAT = "{changes} changes in {steps} steps"
    NEXT = "no further notification until it settles or grows"
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
    NEXT = "{mode} mode: nothing was changed; enforce would have run {runbook}"
    rule: str
    mode: str
    runbook: str


# ── an incident ───────────────────────────────────────────────────────────────────────────────────


class Diagnosed(Advised, frozen=True, kw_only=True):
    TITLE = "{incident}: diagnosis: {spike}"
    WHAT = "{summary}"
    spike: SpikeClass
    summary: str


class StillOpen(Notice, frozen=True, kw_only=True):
    TITLE = "{incident}: still open, and nobody has acknowledged it"
    WHAT = "{headline}"
    NEXT = "{answer}; to end these reminders: supervise ack RUN"
    headline: str
    answer: str = ""


class Held(Advised, frozen=True, kw_only=True):
    TITLE = "{incident}: automatic actions are off; a person is needed"
    WHAT = "{cause}; {summary}; {status}"
    cause: str
    summary: str = ""
    status: str = ""


class StillHeld(Advised, frozen=True, kw_only=True):
    TITLE = "automatic actions are still off; a person is needed"


class NothingPossible(Advised, frozen=True, kw_only=True):
    TITLE = "{incident}: no automatic action is possible"
    WHAT = "{headline}; {status}"
    WHY = "{runbook}: {refusal}"
    headline: str
    status: str
    runbook: str
    refusal: str


class Closed(Advised, frozen=True, kw_only=True):
    KIND = CLOSED
    TITLE = "{incident}: closed"
    WHAT = "{outcome}; {summary}"
    outcome: str
    summary: str = ""


class GivenUp(Notice, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: given up"
    WHAT = "{cause}"
    NEXT = "evidence is collected, and the job is ended"
    cause: str


class GivenUpIfIdle(GivenUp, frozen=True, kw_only=True):
    NEXT = "evidence is collected, and the job is ended if it is idle"


class StillUnhelped(Advised, frozen=True, kw_only=True):
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
        "to approve {runbook}: supervise approve RUN {request}; to deny it: supervise deny RUN "
        "{request}; without an answer within {timeout_s:.0f} s of this message, {consequence}; "
        "{status} meanwhile"
    )
    runbook: str
    cause: str
    plan: str
    request: str
    timeout_s: float
    consequence: str
    status: str


class ApprovalUnneeded(Advised, frozen=True, kw_only=True):
    KIND = APPROVAL
    TITLE = "{incident}: {runbook} is no longer needed; {request} still waits"
    WHAT = "{summary}"
    runbook: str
    request: str
    summary: str


# ── actions ───────────────────────────────────────────────────────────────────────────────────────


class ActionStarts(Advised, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: automatic action started: {runbook}"
    WHY = "{cause}"
    runbook: str
    cause: str


class EvidenceOf(Advised, frozen=True, kw_only=True):
    TITLE = "{incident}: {headline}"
    WHAT = "{standstill}"
    headline: str
    standstill: str = ""


class UndoFailed(Notice, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: undoing an action failed"
    WHAT = "{error}"
    NEXT = "{consequence}"
    error: str
    consequence: str = "it may still be in force: supervise status RUN"


class CommandFailed(Notice, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: command of {operator} failed"
    WHAT = "{error}"
    operator: str
    error: str


class ActionWithdrawn(Advised, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: {runbook} is called off"
    WHAT = "{cause}; decided at step {step}"
    WHY = "{headline}"
    runbook: str
    cause: str
    headline: str
    step: int | None = None


class RecoveredSoFar(Advised, frozen=True, kw_only=True):
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
    NEXT = (
        "checkpoints from before step {before_step} are verified at once, the newest first; the "
        "relaunch follows the first good one"
    )
    runbook: str
    before_step: int | None


class PausedForCheckpoint(Notice, frozen=True, kw_only=True):
    KIND = ACTION
    TITLE = "{incident}: the job is paused while a checkpoint is verified"
    WHAT = "{candidates} from before step {before_step} to verify, the newest first"
    LEAD = Lead.NOTHING
    NEXT = (
        "{runbook} follows the first good one; to let the job train on instead: supervise resume "
        "RUN"
    )
    candidates: int
    before_step: int
    runbook: str


class PauseOver(Notice, frozen=True, kw_only=True):
    TITLE = "the pause ended without a resume; the job trains on from step {step}"
    WHAT = "{cause}"
    NEXT = "to pause it again: supervise pause RUN"
    step: int
    cause: str


class RanksDiffer(Notice, frozen=True, kw_only=True):
    TITLE = "{incident}: the ranks differ"
    WHAT = "{headline}"
    NEXT = "no command can repair that: supervise stop RUN, and start it from a checkpoint"
    headline: str


class RanksUnfenceable(Notice, frozen=True, kw_only=True):
    KIND = WATCHER
    TITLE = "the ranks cannot be changed together: no rollback, rate or pause from here on"
    WHY = "{cause}"
    NEXT = "for a relaunch: job.relaunch, which supervise init shows, then supervise reload RUN"
    cause: str


class RanksUnfenceableRelaunch(RanksUnfenceable, frozen=True, kw_only=True):
    """As before, of a job that can be started again."""

    NEXT = "a relaunch is left; to see from where: supervise checkpoints RUN"
