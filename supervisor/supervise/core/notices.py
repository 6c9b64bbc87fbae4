"""The messages to people, one class per kind: its fields are the facts, its templates the text.

A template is for `str.format`. Its clauses end with "; ", and one whose fields are empty is left
out; so is a step whose fields are, a part in brackets, and the incident in front of a title. In
commands RUN stands for the run directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import ClassVar, Self, TypeAlias

from msgspec import Struct, structs

from .model import decisions, formats
from .model.decisions import IncidentClosed, RuleBlind, RuleFired
from .model.events import PartChanges, PolicyChanges
from .model.failure import exit_text
from .model.interfaces import (
    ACTION,
    APPROVAL,
    CLOSED,
    UPDATED,
    WATCHER,
    Advice,
    AdviceSteps,
    Lead,
    Reading,
    Step,
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


class Template(Struct, frozen=True, kw_only=True):
    """Facts, of which templates make texts."""

    def _fill(self, template: str) -> str:
        clauses = PART.sub(self._part, template).split("; ")
        return "; ".join(text for clause in clauses for text in self._clause(clause) if text)

    def _steps(self, templates: AdviceSteps) -> Iterator[Step]:
        for step in templates:
            if clause := self._clause(PART.sub(self._part, step.text), step.command):
                yield Step(*clause)

    def _clause(self, *templates: str) -> tuple[str, ...]:
        """Return the filled templates of one clause, () where it says nothing.

        That is where all its fields are empty, or one is None, which has no text.
        """
        facts = {fact: getattr(self, fact) for text in templates for fact in FIELD.findall(text)}
        if facts and (all(v in UNKNOWN for v in facts.values()) or None in facts.values()):
            return ()
        return tuple(text.format_map(facts) for text in templates)

    def _part(self, match: re.Match[str]) -> str:
        facts = FIELD.findall(match[1])
        return match[1] if all(getattr(self, fact) not in UNKNOWN for fact in facts) else ""


class Clause(Template, frozen=True, kw_only=True):
    """A part of a sentence."""

    TEXT: ClassVar[str] = ""

    @property
    def text(self) -> str:
        return self._fill(self.TEXT)

    def __str__(self) -> str:
        return self.text


Cause: TypeAlias = Clause | StrEnum


class Notice(Template, frozen=True, kw_only=True):
    """A message.

    Attributes:
        incident: id of the one that it names, "" for none.
        advice: what comes next, as far as the state of the run tells it; NEXT follows.
    """

    KIND: ClassVar[str] = ""  # of `interfaces.KINDS`; "": as an incident is open or not
    TITLE: ClassVar[str] = ""
    WHAT: ClassVar[str] = ""
    WHY: ClassVar[str] = ""
    NEXT: ClassVar[AdviceSteps] = ()
    LIVE: ClassVar[AdviceSteps] = ()
    LEAD: ClassVar[Lead | None] = None

    severity: str
    incident: str = ""
    advice: Advice = NO_ADVICE

    @property
    def facts(self) -> Payload:
        """Its fields, but for those that each message has and those that say nothing."""
        fields = {}
        for field in structs.fields(self):
            value = getattr(self, field.name)
            if field.name not in COMMON and (field.required or value not in ("", None)):
                fields[field.name] = value
        return Payload(fields)

    @property
    def title(self) -> str:
        is_named = self.incident and self.TITLE.startswith(IN_INCIDENT)
        return f"{self.incident}: {self.news}" if is_named else self.news

    @property
    def news(self) -> str:
        """Its title without the incident in front."""
        return self._fill(self.TITLE.removeprefix(IN_INCIDENT))

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


# ── the readings of a rule ────────────────────────────────────────────────────────────────────────

# What is compared with the limit: the first of these that a reading holds (see formats.MEASURES),
# in words where the limit is no value of the metric.
HEADLINES = {
    "sum": "{direction} for too long",
    "ratio": "{:.3g} times its baseline",
    "residual": "{:.3g} off its course",
    "distance": "{:.3g} times as far off its course as usual",
    "bound": "rising by at least {:.3g} in 1000 steps",
    "z": "{:.3g} times as far off as usual",
    "value": "",
}


def _step_count(reading: Reading) -> str:
    """Return in how many of the newest steps it was so, "" where steps are not counted."""
    if event := formats.reading_text(reading, "event"):
        came, window = (formats.reading_integer(reading, key, 0) for key in ("value", "window"))
        return f"{formats.readable_metric(event)} in {came} of the newest {window} steps"
    counted = formats.reading_integer(reading, "breaching", 0)
    steps = f"in {counted} of the newest {formats.reading_integer(reading, 'of', 1)} steps"
    if counted and reading.get("nonfinite") == []:  # the newest one is finite
        names = map(formats.readable_metric, formats.reading_table(reading, "values"))
        return f"{', '.join(names)} was NaN or Inf {steps}"
    has_text = reading.get("metric") or reading.get("nonfinite")
    return "" if has_text or not counted else steps


def breach_headline(
    numbers: Mapping[str, Reading],
    otherwise: str,
    level_before: Callable[[str], float | None] = lambda metric: None,
) -> str:
    """Return the breaching metrics behind a rule in one line: "loss 9 (before 3, limit 4.5)".

    Where none has numbers: the detectors in breach, or else `otherwise`.

    Args:
        level_before: the healthy value of a metric just before, None where it is not known.
    """
    parts: list[str] = []
    limits: dict[str, list[float]] = {}  # a metric with its value -> limits, and comments
    comments: dict[str, list[str]] = {}
    levels: dict[str, tuple[float, float]] = {}  # value, and that before
    bounds: dict[str, str] = {}  # whose limit is written, "" for one of none at all
    for reading in numbers.values():
        metric = formats.reading_text(reading, "metric")
        if reading.get("code") != "BREACH":
            continue
        if "signal" in reading:
            parts.append(formats.format_silence(reading))
        parts += filter(None, [_step_count(reading)])
        if not metric or "signal" in reading:  # its value is a time
            continue
        if meaning := formats.coded_value_text(metric, reading.get("value")):
            parts.append(meaning)
            continue
        key = next((key for key in HEADLINES if isinstance(reading.get(key), float)), "")
        value = formats.finite_number(formats.judged_value(key, reading))
        if not key or value is None:
            continue
        text = f"{formats.readable_metric(metric)} {formats.quantity(metric, value)}"
        text += f" on {reading['where']}" if "where" in reading else ""
        limit, before = formats.limit_value(key, reading), level_before(metric)
        limits.setdefault(text, []).extend([] if limit is None else [limit])
        if value == limit == 0.0:  # a count, or a norm: none is below its limit
            bounds[text] = ""
        bounds.setdefault(text, metric)
        details = comments.setdefault(text, [])
        if before is not None and not details:
            details.append(f"before {formats.quantity(metric, before)}")
            levels[text] = value, before
        if limit is None:
            side = formats.reading_text(reading, "direction") or "high"
            details.append(HEADLINES[key].format(reading[key], direction=side))
        limits[text].sort(key=lambda limit: abs(limit - value))
    for text, details in comments.items():
        parts.append(text + _comments(details, limits[text][:1], levels.get(text), bounds[text]))
    for reading in numbers.values():
        names = formats.reading_names(reading, "nonfinite")
        parts += [f"{formats.readable_metric(str(name))} is NaN or Inf" for name in names]
    breaching = [name for name, reading in numbers.items() if reading.get("code") == "BREACH"]
    return "; ".join(dict.fromkeys(parts)) or ", ".join(breaching) or otherwise


def _comments(
    details: list[str], limits: list[float], level: tuple[float, float] | None, metric: str
) -> str:
    """Return what stands in brackets behind a value; `level`: the value, and that before."""
    if level is not None and any((level[0] - limit) * (level[1] - limit) > 0 for limit in limits):
        details = details[1:]  # it was beyond that limit before, too: none that is healthy
    nearest = ["must be above 0"] if limits and not metric else []
    nearest = nearest or [f"limit {formats.quantity(metric, limit)}" for limit in limits]
    details = list(dict.fromkeys([*details[:1], *nearest, *details[1:]]))
    return f" ({', '.join(details)})" if details else ""


def breach_symptom(numbers: Mapping[str, Reading]) -> str:
    """Return the first thing that is wrong, short and in words, for a title; "" for nothing."""
    for reading in numbers.values():
        for name in formats.reading_names(reading, "nonfinite"):
            return f"{formats.readable_metric(str(name))} is NaN or Inf"
        if reading.get("code") != "BREACH":
            continue
        if "signal" in reading:
            return formats.format_silence(reading, limited=False)
        value = reading.get("last_block", reading.get("value"))
        metric = formats.reading_text(reading, "metric")
        if meaning := formats.coded_value_text(metric, value):
            return meaning
        if metric and isinstance(value, (int, float)):
            return f"{formats.readable_metric(metric)} {formats.quantity(metric, float(value))}"
    return ""


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


class RuleIsBlindAlongside(RuleFiresBeside, frozen=True, kw_only=True):
    TITLE = "rule {rule} is blind[ at step {step}]"


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
    """`nonfinite_since`: the step since which a NaN or Inf lasts, None where none does."""

    TITLE = "{incident}: {finding}"
    WHAT = "{summary}"
    spike: SpikeClass
    summary: str
    nonfinite_since: int | None = None

    @property
    def finding(self) -> str:
        if self.nonfinite_since is None:
            return f"diagnosis: {self.spike}"
        return f"NaN or Inf since step {self.nonfinite_since}"


class StillOpen(Notice, frozen=True, kw_only=True):
    TITLE = "{incident}: still open, and nobody has acknowledged it"
    WHAT = "{headline}"
    NEXT = (Step("to end these reminders", "supervise ack RUN"),)
    headline: str


class Limit(StrEnum):
    """Why nothing more is tried."""

    NOTHING_LEFT = "the policy has no action left for this incident"
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
    """`substituted`: the runbook that this one stands in for, and why that cannot work."""

    TITLE = "{incident}: no automatic action is possible"
    WHAT = "{headline}; {status}"
    WHY = "{substituted}; {runbook}: {refusal}"
    LIVE = (Step("all reasons", "supervise why RUN {incident}"),)
    headline: str
    status: str
    runbook: str
    refusal: str
    substituted: str = ""


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


class JobStatus(StrEnum):
    """How it is with the job while nothing is done about it."""

    ENDED = "the job has ended"
    PAUSED = "the job is paused"
    TRAINING = "the job keeps training"


class JobStalled(Clause, frozen=True, kw_only=True):
    TEXT = "the job is stalled at step {step}"
    step: int


class LostReason(StrEnum):
    """Why an action is not to be carried out any more."""

    TRAINING_OVER = "the training session that it was meant for has ended"
    STEPS_AGAIN = "the job makes progress again"
    CLEARED = "every rule that requested it has cleared"
    UNPAUSED = "the pause that it depends on has ended"


class RuleRequest(Clause, frozen=True, kw_only=True):
    """Why a rule asks for a runbook."""

    TEXT = "{rule}: {numbers}"
    rule: str
    numbers: str


class Explanation(Clause, frozen=True, kw_only=True):
    """A rule whose readings explain those of another."""

    TEXT = "{subject}: {numbers}"
    subject: str
    numbers: str


class RuleNumbers(Clause, frozen=True, kw_only=True):
    """What an incident is about: readings, how they grew, and what explains them."""

    TEXT = "{numbers}; {growth}; {rate_growth}; {mechanisms}"
    numbers: str
    growth: str = ""
    rate_growth: str = ""
    mechanisms: str = ""


class RateGrew(Clause, frozen=True, kw_only=True):
    TEXT = "the learning rate grew {times:.2g} times since step {since}, to {value:.3g}"
    times: float
    since: int
    value: float


class SavedLate(Clause, frozen=True, kw_only=True):
    """Why a checkpoint is suspect."""

    TEXT = "saved after {incident} began"
    incident: str


class HeldByRunbook(Clause, frozen=True, kw_only=True):
    TEXT = "{runbook}: {headline}; {failure}"
    runbook: str
    headline: str
    failure: str = ""


class RunbookImpossible(Clause, frozen=True, kw_only=True):
    TEXT = "{runbook}: {refusal}"
    runbook: str
    refusal: str


class RanksApart(Clause, frozen=True, kw_only=True):
    TEXT = "the ranks cannot act at one step: {cause}"
    cause: str


class PartlyDone(Clause, frozen=True, kw_only=True):
    TEXT = "{verb} was not carried out by all ranks: {error}"
    verb: str
    error: str


def describe_end(closed: IncidentClosed) -> str:
    """Return how an incident ended, as a clause."""
    match closed.outcome:
        case decisions.RECOVERED:
            over = "done" if closed.ordered else "recovered"
            return ": ".join(filter(None, (over, describe_finding(closed))))
        case decisions.JOB_ENDED:
            end = describe_job_end(closed.returncode, closed.restarted_with)
            reason = describe_no_restart(closed.not_restarted)
            return "; ".join(filter(None, (end, reason)))
        case decisions.SESSION_ENDED:
            return f"over: {describe_session_end(closed.session_end)}"
        case decisions.RELEASED:
            return f"released by {closed.released_by}"
        case decisions.SUPERSEDED:
            return f"superseded by {closed.superseded_by}"
    return ENDS[closed.outcome]


ENDS = {
    decisions.CLEARED: "over: its rules cleared",
    decisions.REBASELINED: "over: not recovered: its rules took the new level as their baseline",
}


def describe_finding(closed: IncidentClosed) -> str:
    """Return what shows a recovery, or that an order did no harm; "" where nothing does."""
    if closed.clear_steps is None:
        return ""
    return f"no {'rule fired' if closed.ordered else 'relapse'} in {closed.clear_steps} steps"


def describe_session_end(step: int | None) -> str:
    """Return that another training begins in the launch; `step`: the last one of that before."""
    after = "" if step is None else f" after step {step}"
    return f"its training session ended{after}; another one starts"


def describe_job_end(returncode: int | None, restarted_with: str = "") -> str:
    """Return how the job ended; `restarted_with`: what a start was given that made no step."""
    end = f"the job {exit_text(returncode)}"
    return (
        f"restarted with {restarted_with}, {end} before its first step" if restarted_with else end
    )


def describe_crash(end: str, failure: str) -> str:
    """Return how the job ended, with the error that explains it; "" for none."""
    return ": ".join(filter(None, (end, failure)))


def describe_no_restart(reason: str) -> str:
    """Return that the job is not started again, and why; "" for no reason."""
    return f"not started again: {reason}" if reason else ""


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


class ApprovalAsked(Notice, frozen=True, kw_only=True):
    KIND = APPROVAL
    TITLE = "{incident}: approve {runbook}?"
    WHAT = "{cause}"
    WHY = "plan: {plan}"
    NEXT = (
        Step("to approve {runbook}", "supervise approve RUN {request}"),
        Step("to deny it", "supervise deny RUN {request}"),
        Step("without an answer within {time_left} of this message, {consequence}"),
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

    @property
    def time_left(self) -> str:
        return formats.format_timeout(self.timeout_s)


class ApprovalUnneeded(Notice, frozen=True, kw_only=True):
    KIND = APPROVAL
    TITLE = "{incident}: {runbook} is no longer needed; {request} still waits"
    WHAT = "{summary}"
    runbook: str
    request: str
    summary: str


class ApprovalAnswer(Clause, frozen=True, kw_only=True):
    TEXT = "{request} approved: {runbook} starts"
    request: str
    runbook: str


class DenialAnswer(ApprovalAnswer, frozen=True, kw_only=True):
    TEXT = "{request} denied: {runbook} does not run; automatic actions are off"


class ApprovalAgain(Clause, frozen=True, kw_only=True):
    TEXT = "{request} was already approved by {operator}"
    request: str
    operator: str


class DenialLate(ApprovalAgain, frozen=True, kw_only=True):
    TEXT = "too late: {request} was approved by {operator}"


class RequestStale(Clause, frozen=True, kw_only=True):
    TEXT = "{request} expired: {cause}; a new request is created"
    request: str
    cause: Cause


class RequestDiffers(Clause, frozen=True, kw_only=True):
    TEXT = "{request} has other arguments: {sha}"
    request: str
    sha: str


class RequestUnknown(Clause, frozen=True, kw_only=True):
    """`waiting`: the request that waits, for `runbook`; "" for none."""

    TEXT = (
        "no request {request!r} is waiting"
        "[; {waiting} for {runbook} is; supervise {verb} RUN {waiting}]"
    )
    request: str
    verb: str
    waiting: str = ""
    runbook: str = ""


class RequestOver(RequestUnknown, frozen=True, kw_only=True):
    """`end`: how it was settled. `is_same`: as it is asked for now."""

    TEXT = (
        "{news}: {request} was {end}"
        "[; {waiting} for {runbook} waits instead; supervise {verb} RUN {waiting}]"
    )
    end: str
    is_same: bool

    @property
    def news(self) -> str:
        return "no change" if self.is_same else "too late"


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
    NEXT: ClassVar[AdviceSteps] = (Step("it may still be in force", "supervise status RUN"),)
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
        Step("then start it from one saved before they differed", "supervise checkpoints RUN"),
    )
    headline: str


class RanksUnfenceable(Notice, frozen=True, kw_only=True):
    KIND = WATCHER
    TITLE = "the ranks cannot be changed together: no rollback, rate or pause from here on"
    WHY = "{cause}"
    cause: str


# ── another policy ────────────────────────────────────────────────────────────────────────────────


class PartDifference(Clause, frozen=True, kw_only=True):
    """`part`: of a policy, as its rules."""

    TEXT = "{part} {names}[ and {more} more]"
    LIMIT: ClassVar[int] = 6
    part: str
    moves: PartChanges

    @property
    def signs(self) -> list[str]:
        moves = {"+": self.moves.added, "-": self.moves.removed, "~": self.moves.changed}
        return [f"{sign}{name}" for sign, names in moves.items() for name in names]

    @property
    def names(self) -> str:
        return " ".join(self.signs[: self.LIMIT])

    @property
    def more(self) -> int | None:
        return max(0, len(self.signs) - self.LIMIT) or None


class PolicyDifference(Clause, frozen=True, kw_only=True):
    TEXT = "{parts}; mode {mode}; other keys: {keys}; {same}"
    difference: PolicyChanges

    @property
    def parts(self) -> str:
        parts = ("detectors", "rules", "runbooks", "budgets")
        moves = {part: getattr(self.difference, part) for part in parts}
        texts = (str(PartDifference(part=part, moves=moves[part])) for part in parts if moves[part])
        return "; ".join(texts)

    @property
    def mode(self) -> str:
        return " -> ".join(self.difference.mode)

    @property
    def keys(self) -> str:
        return ", ".join(self.difference.settings)

    @property
    def same(self) -> str:
        return "" if self.parts or self.mode or self.keys else "nothing is different"


class PolicyReload(Clause, frozen=True, kw_only=True):
    TEXT = (
        "{operator} reloaded the policy: {news}; {at_start}: unchanged until the job is restarted"
    )
    operator: str
    difference: PolicyChanges

    @property
    def news(self) -> str:
        return str(PolicyDifference(difference=self.difference))

    @property
    def at_start(self) -> str:
        return ", ".join(self.difference.restart)
