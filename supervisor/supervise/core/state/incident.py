"""One trouble, from its first breach to its verified recovery.

There is at most one open incident: whatever fires meanwhile joins it, so that a hundred detectors
tripping in one step are one page and one runbook.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..model import format_readings
from ..model.action import Action
from ..model.decisions import SEVERITIES
from ..model.events import OperatorCommand
from .loss_case import LossCase
from .onset import Onset
from .recovery import Recovery
from .runbook_execution import RunbookExecution


@dataclass(slots=True)
class Deferred:
    """What is done later.

    Attributes:
        rules: ids of rules to be answered then; see `handlers/rule_fired`.
        commands: those of operators; see `handlers/operator_commands`.
        retry: (runbook, level, why, escalated) to request again; see `runbooks/runner`.
        awaiting_checkpoint: (number of the newest run, runbook, why, escalated) of a runbook that
            was refused for want of a good checkpoint; see `runbooks/checkpoint_choice`.
        session_end: why the training session of the incident ended, so that it is closed; see
            `handlers/session_change`.
    """

    rules: list[str] = field(default_factory=list)
    commands: list[OperatorCommand] = field(default_factory=list)
    retry: tuple[str, int, str, bool] | None = None
    awaiting_checkpoint: tuple[int, str, str, bool] | None = None
    session_end: str = ""


@dataclass(slots=True)
class Ending:
    """How long an incident has been quiet, and must be.

    Attributes:
        probation_until: frame count at which its probation has passed.
        quiet_since: frame count since which no rule has fired, None while one does.
        rebaselined: a detector behind it took the new level for its baseline.
    """

    probation_until: int = 0
    quiet_since: int | None = None
    rebaselined: bool = False


@dataclass(slots=True)
class Escalation:
    """What was tried about an incident; kept by `runbooks/runner`.

    Attributes:
        level: of the ladder, -1 before any. runs: how many runbooks were started.
        shadowed: runbooks that shadow mode only wrote down.
    """

    level: int = -1
    runs: int = 0
    shadowed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Trigger:
    """What asked for the newest runbook; kept by `incidents/withdrawal`.

    Attributes:
        asked_by: id of the rule. still: because the job stood still.
        asks: a rule in mode `approve` began it, so that all that it leads to is asked for.
    """

    asked_by: str = ""
    still: bool = False
    asks: bool = False


OPEN, ACTING, PROBATION, HELD, CLOSED = "open", "acting", "probation", "held", "closed"
# An incident that nobody acted on is over after so many steps without a firing rule. What begins
# behind as many in one that is still open would have been an incident of its own.
QUIET_STEPS = 20


@dataclass(slots=True)
class Incident:
    """An open incident.

    Attributes:
        opened_step: newest step then. breach_step: the first that may be part of the trouble.
        rules: ids of those that joined it. headline: what it is about, one line.
        run: the runbook in progress.
        acknowledged_by: the operator who acknowledged it.
        trigger, escalation, case, onset, recovery, deferred, ending: see their classes.
    """

    id: str
    opened_step: int
    breach_step: int
    severity: str
    rules: list[str]
    headline: str = ""
    phase: str = OPEN
    run: RunbookExecution | None = None
    acknowledged_by: str = ""
    trigger: Trigger = field(default_factory=Trigger)
    escalation: Escalation = field(default_factory=Escalation)
    case: LossCase = field(default_factory=LossCase)
    onset: Onset = field(default_factory=Onset)
    recovery: Recovery = field(default_factory=Recovery)
    deferred: Deferred = field(default_factory=Deferred)
    ending: Ending = field(default_factory=Ending)

    def join(self, rule: str, severity: str) -> bool:
        """Add a rule that fires; return True when it raised the incident's severity."""
        self.ending.quiet_since = None
        if rule not in self.rules:
            self.rules.append(rule)
        if SEVERITIES.index(severity) < SEVERITIES.index(self.severity):
            self.severity = severity
            return True
        return False

    def reopen(self) -> None:
        """Nothing is under way: it is watched until it has been quiet for long enough."""
        self.phase, self.ending.quiet_since = OPEN, None


def first_breach(numbers: Mapping[str, Mapping[str, Any]], step: int) -> int:
    """Return the earliest step at which any detector behind a rule may have been in breach.

    A coupling tells the first step of its match; one that needs m of n samples in breach may have
    met the first of them n - 1 steps ago.
    """
    found = [step]
    for reading in numbers.values():
        if reading.get("code") != "BREACH":
            continue
        found.append(step - max(0, reading.get("of", 1) - 1))
        found.append((reading.get("match") or {}).get("first_step", step))
    return min(found)


# What is compared with the limit: the first of these that a reading holds (see wording.MEASURES).
HEADLINES = {
    "sum": "sum {:.3g}",
    "ratio": "{:.3g} times its past",
    "residual": "residual {:.3g}",
    "distance": "{:.3g} widths off",
    "bound": "at least {:.3g} per 1000 steps",
    "z": "z {:.1f}",
    "value": "",
}


def headline(numbers: Mapping[str, Mapping[str, Any]], otherwise: str) -> str:
    """Return the breaching metrics behind a rule in one line, each with its number and limit."""
    parts = []
    for reading in numbers.values():
        metric, limit = reading.get("metric"), reading.get("threshold")
        if reading.get("code") == "BREACH" and "signal" in reading:
            silent = f"no {reading['signal']} for {reading['value']:.0f} s"
            parts.append(f"{silent} (limit {limit:.0f} s)")
        if reading.get("code") != "BREACH" or metric is None:
            continue
        for key, form in HEADLINES.items():
            if isinstance(reading.get(key), float):
                text = f"{metric} {reading.get('last_block', reading['value']):.4g}"
                text += f", {form.format(reading[key])}" if form else ""
                bounded = isinstance(limit, (int, float))
                text += f" ({format_readings.limit(reading[key], reading)})" if bounded else ""
                parts.append(text)
                break
    nonfinite = [name for reading in numbers.values() for name in reading.get("nonfinite", ())]
    parts += [f"{name} is not finite" for name in nonfinite]
    return "; ".join(dict.fromkeys(parts)) or otherwise


def verb_of(action: Action) -> str:
    """Return the YAML name of an action."""
    return type(action).__module__.rpartition(".")[2]


def brief(args: Mapping[str, Any]) -> str:
    """Return arguments, or observed effects, in one line."""
    parts = [f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in args.items()]
    return ", ".join(parts)[:160]
