"""One trouble, from its first breach to its verified recovery.

There is at most one open incident: whatever fires meanwhile joins it, so that a hundred detectors
tripping in one step are one page and one runbook.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..analysis.context_event import Happened
from ..analysis.loss_band import Band
from ..analysis.spike_classifier import Verdict
from ..model import format_readings
from ..model.action import Action
from ..model.decisions import SEVERITIES
from ..model.events import Told
from ..model.policy import Runbook

OPEN, ACTING, PROBATION, HELD, CLOSED = "open", "acting", "probation", "held", "closed"
# An incident that nobody acted on is over after so many steps without a firing rule. What begins
# behind as many in one that is still open would have been an incident of its own.
QUIET_STEPS = 20


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a runbook was started, as far as that can go away (see `withdrawal`).

    Attributes:
        rules: ids of the rules that asked for it.
        frames: for a standstill, rank -> frames that it had sent by then; None for other reasons.
    """

    rules: tuple[str, ...]
    frames: dict[int, int] | None = None


@dataclass(slots=True)
class Run:
    """A runbook in progress. `index` is the step that waits, is performed, or is verified."""

    number: int
    runbook: Runbook
    severity: str  # of the incident when it was started
    index: int = 0
    waiting_for: str | None = None  # id of the action being performed
    action: Action | None = None  # the action itself, and its verb
    verb: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)  # indices of steps that were committed
    undoing: list[Any] = field(default_factory=list)  # compensations still to do
    failed: str | None = None  # why the runbook failed, while it is being compensated
    useless: bool = False  # it did not help: what is undone, and then the next rung
    exhausted: bool = False  # nothing else may be tried: no budget, or an undo failed
    overdue_ns: int = 0  # when the outcome waited for is in doubt
    effects: list[tuple[int, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    climbed: bool = False  # it was not asked for: what is below it on the ladder was tried
    reduced: str = ""  # why only evidence is taken and people are told
    approved: list[dict[str, Any]] | None = None  # verbs and arguments that were allowed
    instead: bool = False  # it stands in for one that could not work here
    refused: bool = False  # the job refused its step, and nothing was touched
    operator: str = ""  # who asked for it, when no rule did
    held: bool = False  # the incident was held when an operator asked
    before: int | None = None  # an operator goes back to before this step
    verify_until: int | None = None  # pace at which the verification has failed
    verify_ns: int = 0  # when the newest frame to verify by came
    clear_steps: int = 0
    last_trouble: str = ""
    calm: set[tuple[str, int]] = field(default_factory=set)  # rules of SEV0 by rank, once clear
    unpaused: str = ""  # why the job is not paused any more, though this runbook relies on it
    denied: str = ""  # what the job says against it: it does not go on as it should
    reason: Reason | None = None  # None: a person's order, or nothing that can go away
    withdrawn: bool = False  # its reason was gone before it acted: nothing is tried instead
    entered: int = -1  # the incident's rung before it was started


@dataclass(slots=True)
class Onset:
    """The newest begin of a trouble that its shards were blamed for, and what came of it.

    Attributes:
        attempt, breach: where it began, -1 before any. advisory: only rules of SEV2 told of it.
        last: newest step of it whose batch is known to be part of the trouble.
        pace, step: of the newest frame in which a rule of the incident was in breach.
        lull: the last step in breach before `QUIET_STEPS` without, when there were as many since.
    """

    attempt: int = -1
    breach: int = -1
    advisory: bool = False
    last: int = -1
    pace: int = 0
    step: int = -1
    lull: int | None = None


@dataclass(slots=True)
class Incident:
    """An open incident.

    Attributes:
        rank: whose frames are asked about the loss; `attempt` of its newest one.
        begin: first step that counts as after the onset: of the new attempt after a rollback.
        since: pace from which the loss has time to come back; `opened_pace` never moves.
        norms: metric -> median before the onset. context: what else happened then.
        exhausted: it came back after the last rung of the ladder.
        standing: (number of the runbook, what takes an action of it back), oldest first.
        asks: a rule in mode `approve` began it, so that all that it leads to is asked for.
        wanted: words of operators that wait for the action under way.
        anew: what is asked for again when the run under way ends: runbook, rung, why, climbed.
        lacked: number of the newest run, when it was refused for want of a good checkpoint: its
            runbook, why it was to run, climbed.
        over: its training is, why: it is closed when what is under way has come to its end.
        back: the attempt that the job was last taken back to; what older frames tell is over.
        acked: who said that a person looks after it.
        tainted: attempt -> step from which checkpoints of it are suspect because of this.
        nonfinite: first step whose loss, gradient or update was not finite. kept: first and last
            one of those that were skipped, and so kept from the weights.
        crashed: the first breach, if that is the end of the process.
        beyond, settled: it went back: the first breach, a step that a recovery must have passed,
            and the step before which its probation does not end. A crash has neither: it may lie
            far ahead, and the count of crashes judges it.
        verdict: the class that it was given while it is open.
        asked_by: id of the rule that asked for the newest runbook. still: because the job stood
            still.
    """

    id: str
    opened_step: int
    breach_step: int
    severity: str
    rules: list[str]
    phase: str = OPEN
    rung: int = -1
    run: Run | None = None
    runs: int = 0
    band: Band | None = None
    probation_until: int = 0
    quiet_since: int | None = None
    rebaselined: bool = False  # a detector behind it took the new level for its baseline
    headline: str = ""
    waiting: list[str] = field(default_factory=list)  # rules to be answered after what is under way
    shadowed: list[str] = field(default_factory=list)  # runbooks that shadow mode only wrote down
    rank: int = 0
    attempt: int = 0
    begin: int = 0
    since: int = 0
    opened_pace: int = 0
    looked: int = -1
    norms: dict[str, float] = field(default_factory=dict)
    context: list[Happened] = field(default_factory=list)
    onset: Onset = field(default_factory=Onset)
    batches: tuple[int, ...] = ()  # fingerprints of the steps up to the newest onset, and in breach
    peak: float | None = None
    far: int = 0  # frames whose loss was far out of the band
    nonfinite: int | None = None
    kept: tuple[int, ...] = ()
    rolled_back: bool = False
    exhausted: bool = False
    verdict: Verdict | None = None
    standing: list[tuple[int, Action]] = field(default_factory=list)
    asks: bool = False
    wanted: list[Told] = field(default_factory=list)
    acked: str = ""
    tainted: dict[int, int] = field(default_factory=dict)
    beyond: int = -1
    settled: int = -1
    anew: tuple[str, int, str, bool] | None = None
    lacked: tuple[int, str, str, bool] | None = None
    back: int = 0
    crashed: int = -1
    over: str = ""
    asked_by: str = ""
    still: bool = False

    def join(self, rule: str, severity: str) -> bool:
        """Add a rule that fires; return True when it raised the incident's severity."""
        self.quiet_since = None
        if rule not in self.rules:
            self.rules.append(rule)
        if SEVERITIES.index(severity) < SEVERITIES.index(self.severity):
            self.severity = severity
            return True
        return False


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
