"""A policy, resolved: packs merged, names bound, durations in steps or seconds. Nothing to look up.

The catalog builds it from YAML; tests build small ones by hand. Everything is frozen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .decisions import MODES

if TYPE_CHECKING:  # the launch of a job needs neither
    from .action import Action
    from .interfaces import Detector

HOLD = "hold"  # the reserved runbook name: stop acting, wait for a person
EARLY, STEADY, LATE = RUN_PHASES = ("early", "steady", "late")  # see `detection.run_phase`
OFF = "off"  # instead of a severity
PAGE, STOP, STOP_SEV0 = "page", "stop", "stop_sev0"  # what giving up is


@dataclass(frozen=True, slots=True)
class Rule:
    """Detectors joined by and/or/not, with a severity and a runbook.

    Attributes:
        when: takes the codes of all detectors, in the order of `Policy.detectors`, and returns a
            code. Kleene logic: and = min, or = max, not = 2 - x.
        text: `when` as it was written.
        uses: names of the detectors in `when`.
        for_steps: consecutive TRUE frames before it fires; UNKNOWN neither advances nor resets.
        keep_steps: least number of frames it stays firing.
        unit: `rows`; with `steps` a frame counts for the steps since the one before that was known.
        cooldown_steps: steps after a runbook in which this rule starts no new one (a new breach is
            a `refire` and climbs the ladder).
        unknown: what UNKNOWN counts as: `hold` (keeps the last), `breach`, `ok`, `ignore`.
        runbook: name, `hold`, or None (the rule only notifies).
        see: name of the runbook that people read about it, whether it is run or not.
        title: what it finds in a few words, "" where the policy has none.
        phases: phase of the run -> severity in it, or `off`.
        phase: the phase that has given it this severity, or mutes it; "" for none.
        off: it is muted in this phase.
    """

    id: str
    when: Callable[[Sequence[int]], int]
    text: str
    uses: tuple[str, ...]
    severity: str
    runbook: str | None = None
    for_steps: int = 1
    keep_steps: int = 0
    unit: str = "rows"
    cooldown_steps: int = 0
    unknown: str = "hold"
    mode: str | None = None
    where: str = ""  # file:line:col
    see: str = ""
    title: str = ""
    phases: Mapping[str, str] = field(default_factory=dict)
    phase: str = ""
    off: bool = False

    def in_phase(self, phase: str) -> Rule:
        """Return the rule as it is in a phase of the run."""
        given = self.phases.get(phase)
        if given is None or given == self.severity:
            return self
        if given == OFF:
            return replace(self, phase=phase, off=True)
        return replace(self, phase=phase, severity=given)


@dataclass(frozen=True, slots=True)
class Inhibit:
    """While `by_rule` fires, or the run is in one of `by_state`, the rules in `mute` do not act.

    A rule mutes no worse one, and a notice none that acts: the catalog builds no such inhibition.
    """

    mute: tuple[str, ...]
    by_rule: str | None = None
    by_state: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Budget:
    """At most `max` intents of a class per `per_steps` steps or `per_s` seconds, then hold."""

    max: int
    per_steps: int | None = None
    per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Runbook:
    """An ordered list of actions, ending in verify."""

    name: str
    steps: tuple[Action, ...]
    verbs: tuple[str, ...]  # the YAML name of each step
    meaning: str = ""
    impact: str = ""
    if_it_fails: str = HOLD
    if_refused: str = ""  # runbook that is tried when a step of this one cannot work here
    diagnose: tuple[str, ...] = ()
    handles: tuple[str, ...] = ()  # ids of metrics
    evidence: tuple[str, ...] = ()
    containment: tuple[str, ...] = ()
    probe_replay: tuple[str, ...] = ()
    over_when: tuple[str, ...] = ()
    localize: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by place


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rungs of rising force; a refire or a failed verification climbs one."""

    levels: tuple[str, ...] = ()
    reset_after_steps: int = 5000


@dataclass(frozen=True, slots=True)
class Planned:
    """A change that was announced: what it does to the loss between two steps is no trouble.

    Attributes:
        from_step, to_step: both included.
        expect: where the loss goes: `up`, `down`, or `either`.
    """

    from_step: int
    to_step: int
    what: str
    expect: str = "either"


@dataclass(frozen=True, slots=True)
class Approval:
    """How long a request to a person stands, and what silence means.

    Attributes:
        on_timeout: `deny` (the run is held) or `allow`.
        unless: incidents of this severity and worse are not asked for; "" asks for all.
    """

    timeout_s: float = 900.0  # for a person to answer a page, as the lease of `pause`
    on_timeout: str = "deny"
    unless: str = ""


@dataclass(frozen=True, slots=True)
class Policy:
    """All that the engine needs to know, and what its edges need to be set up."""

    name: str
    digest: str  # "sha256:..." over the resolved text
    mode: str
    detectors: Mapping[str, Detector]  # inputs before the detectors that read them
    rules: tuple[Rule, ...]
    runbooks: Mapping[str, Runbook] = field(default_factory=dict)
    inhibit: tuple[Inhibit, ...] = ()
    planned: tuple[Planned, ...] = ()
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    approvals: Mapping[str, Approval] = field(default_factory=dict)  # verb, runbook, or `all`
    ladder: Ladder = Ladder()
    probation_steps: int = 100
    warmup_steps: int = 64  # frames of rank 0 before `nominal`
    blind_after_steps: int = 256  # a rule UNKNOWN for longer is an incident of its own
    blind_after_s: float = 300.0
    hold_reminder_s: float = 4 * 3600.0  # people are reminded of a hold so often
    repeat_s: float = 4 * 3600.0  # an incident that nobody acknowledged is told again so often
    give_up: str = PAGE  # or STOP, or STOP_SEV0: where nothing can help any more
    journal_bytes: float | None = None  # frames of an older piece are removed above it
    machine: Mapping[str, Mapping[str, str]] | None = None  # None: the default table
    savepoints: Mapping[str, Any] = field(default_factory=dict)  # {"every": steps, "keep": n}
    sampling: Mapping[str, int] = field(default_factory=dict)  # set -> steps, as far as given
    sparsest: Mapping[str, int] = field(default_factory=dict)  # costly metric -> steps, at most
    safeguards: Mapping[str, Any] = field(default_factory=dict)
    notify: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    cites: tuple[str, ...] = ()  # files with the results of trials of this policy
    verbs: Mapping[str, Callable[..., Action]] = field(default_factory=dict)  # for operators
    resolved: str = ""  # the resolved policy as YAML text, kept in the run directory

    def in_phase(self, phase: str) -> Policy:
        """Return the policy as it is in a phase of the run; itself where that changes no rule."""
        rules = tuple(rule.in_phase(phase) for rule in self.rules)
        same = all(a is b for a, b in zip(rules, self.rules, strict=True))
        return self if same else replace(self, rules=rules)

    def mode_of(self, rule: Rule) -> str:
        """Return the weaker one of the policy's mode and the rule's own."""
        return min(self.mode, rule.mode or self.mode, key=MODES.index)

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Verbs that this policy does not say enough for -> what it does not say."""
        if self.job.get("relaunch"):
            return {}
        return {"relaunch": "the policy does not say how the job is started again (job.relaunch)"}

    def digest_of(self, rule: Rule) -> str:
        """Return 16 hex digits over all that decides when a rule fires: its text and thresholds.

        Two policies in which a rule fires alike have the same; a changed number gives another.
        """
        behind = [(name, repr(self.detectors[name])) for name in sorted(self.detectors_of(rule))]
        whole = (rule.text, rule.for_steps, rule.keep_steps, rule.unit, rule.unknown, behind)
        return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]

    def detectors_of(self, rule: Rule) -> tuple[str, ...]:
        """Return the names of a rule's detectors, those that its couplings read included."""
        return detectors_behind(self.detectors, rule.uses)


def detectors_behind(detectors: Mapping[str, Detector], uses: Iterable[str]) -> tuple[str, ...]:
    """Return the names of detectors, each followed by those that it reads."""
    found: dict[str, None] = {}
    todo = list(uses)
    while todo:
        name = todo.pop(0)
        if name not in found:
            found[name] = None
            todo += detectors[name].detectors
    return tuple(found)
