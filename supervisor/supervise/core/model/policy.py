"""A policy, resolved: packs merged, names bound, durations in steps or seconds. Nothing to look up.

The catalog builds it from YAML; tests build small ones by hand. Everything is frozen, except the
ledger: how often a class of action was started, counted when it is intended. A crash cannot refund
an intent and a reload cannot reset one, since the ledger is rebuilt by folding the journal.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from .action import Action, Verification
from .decisions import MODES
from .failure import FailureClass
from .payload import Shared
from .preemption import GRACE_S, MARGIN_S
from .state_machine import STATES
from .values import (
    Count,
    RunbookName,
    Seconds,
    Section,
    Severity,
    Share,
    SomeSteps,
    Steps,
    Window,
    describe_key,
    pattern_mark,
)

if TYPE_CHECKING:
    from .interfaces import Detector

HOLD = "hold"  # the reserved runbook name: stop acting, wait for a person
EARLY, STEADY, LATE = RUN_PHASES = ("early", "steady", "late")  # see `run_phase`
OFF = "off"  # instead of a severity
PAGE, STOP, STOP_SEV0 = "page", "stop", "stop_sev0"  # what giving up is
LONGEST_MATMUL_S = 60.0  # the relaunch has ten minutes in all; project default
ChannelKey = str | int | float | bool | tuple[str, ...]  # a key under a channel of `notify`
PLACEHOLDERS = ("checkpoint", "directory", "step")  # of `job.relaunch`
WORD = "[A-Za-z_][A-Za-z0-9_]{0,63}"  # also a file name, and those have an end
Local = Annotated[str, pattern_mark(WORD, "a name of letters, digits and _")]
Name = Annotated[str, pattern_mark(rf"{WORD}(\.{WORD})?", "a name of letters, digits and _")]
if TYPE_CHECKING:
    StateName = str
else:
    StateName = Literal[STATES]


@dataclass(frozen=True, slots=True)
class Rule:
    """Detectors joined by and/or/not, with a severity and a runbook.

    Attributes:
        when: takes the codes of all detectors, in the order of `Policy.detectors`, and returns a
            code. Kleene logic: and = min, or = max, not = 2 - x.
        text: `when` as it was written.
        uses: names of the detectors in `when`.
        for_steps: consecutive TRUE frames before it fires; UNKNOWN neither advances nor resets.
        keep_steps: least number of frames it stays firing; with `ignore`, behind a breach too.
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
    location: str = ""  # file:line:col
    see: str = ""
    title: str = ""
    phases: Mapping[str, str] = field(default_factory=dict)
    phase: str = ""
    off: bool = False

    def in_phase(self, phase: str) -> Rule:
        """Return the rule as it is in a phase of the run."""
        severity = self.phases.get(phase)
        if severity is None or severity == self.severity:
            return self
        if severity == OFF:
            return replace(self, phase=phase, off=True)
        return replace(self, phase=phase, severity=severity)


class Inhibit(Section, frozen=True):
    """While a rule fires, or in certain states of the run, other rules do not act."""

    mute: Annotated[
        tuple[Name, ...],
        describe_key(
            "rules that do not act; never SEV0, or what is worse, or acts where `by_rule` does not"
        ),
    ]
    by_rule: Annotated[Name | None, describe_key("while this rule fires")] = None
    by_state: Annotated[
        tuple[StateName, ...], describe_key("while the run is in one of these states")
    ] = ()


MOST_STARTS = 1000  # the newest intents of a class, which are all that is remembered


class Budget(Section, frozen=True):
    """How often actions of a class may start; an action counts when it is planned."""

    max: Annotated[
        int,
        Meta(ge=0, le=MOST_STARTS),
        describe_key(f"maximum number of starts, up to {MOST_STARTS}"),
    ]
    per: Annotated[
        Window | None, describe_key("window: steps, or a time; default: the whole run")
    ] = None

    @property
    def per_steps(self) -> int | None:
        return self.per if isinstance(self.per, int) else None

    @property
    def per_s(self) -> float | None:
        return self.per if isinstance(self.per, float) else None


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

    @property
    def verification(self) -> Verification:
        """The step that watches for recovery; the default where it has none."""
        return next((step for step in self.steps if isinstance(step, Verification)), Verification())


class Ladder(Section, frozen=True):
    """Escalation levels; a relapse or a failed verification goes one level up."""

    levels: Annotated[
        tuple[RunbookName, ...], describe_key("runbooks from mild to strong, or hold")
    ] = msgspec.field(name="ladder", default=())
    reset_after_steps: Annotated[
        Steps, describe_key("clean steps after which it starts at the first level again")
    ] = msgspec.field(name="reset_after", default=5000)


class Planned(Section, frozen=True):
    """An announced change: its effect on the loss opens no incident. SEV0 still fires."""

    from_step: Annotated[Steps, describe_key("first step of it")] = msgspec.field(name="from")
    to_step: Annotated[Steps, describe_key("last step of it")] = msgspec.field(name="to")
    what: Annotated[str, describe_key("what changes, in words or a metric")]
    expect: Annotated[
        Literal["up", "down", "either"],
        describe_key("direction of the loss; the other one is still a breach"),
    ] = "either"

    def find_errors(self) -> list[tuple[str, str]]:
        is_reversed = self.to_step < self.from_step
        return [("to", f"comes before from: {self.from_step}")] if is_reversed else []


class Approval(Section, frozen=True):
    """Approval by a person before the job is touched."""

    timeout_s: Annotated[Seconds, describe_key("how long the request is valid")] = msgspec.field(
        name="timeout", default=900.0
    )
    on_timeout: Annotated[
        Literal["deny", "allow"], describe_key("the answer after the timeout; deny holds the run")
    ] = "deny"
    unless: Annotated[
        Severity | None,
        describe_key("in mode enforce no approval for incidents of this severity or above"),
    ] = None


class Savepoints(Section, frozen=True):
    """Model state kept inside the job's process, for rollbacks."""

    every: Annotated[
        SomeSteps,
        describe_key("steps between two savepoints, at least: they take 0.5 % of the time at most"),
    ]
    keep: Annotated[Count, describe_key("how many are kept")] = 4
    max_bytes: Annotated[
        Count | None,
        describe_key(
            "most host memory for all; default: an eighth of the machine's or container's"
        ),
    ] = None
    spill: Annotated[
        Literal["disk", "none"],
        describe_key("where savepoints go that do not fit in memory; none: they are dropped"),
    ] = "disk"
    max_disk_bytes: Annotated[
        Count | None,
        describe_key(
            "maximum disk space for them; default: a quarter of what is free at the start"
        ),
    ] = None


class Sampling(Section, frozen=True, omit_defaults=True):
    """Steps between two samples of metrics that are not taken at each step; 0 is never."""

    attention: Annotated[Steps | None, describe_key("logits and entropy of attention")] = None
    activations: Annotated[Steps | None, describe_key("outputs of blocks, and output logits")] = (
        None
    )
    routing: Annotated[Steps | None, describe_key("routers of experts")] = None
    routers: Annotated[Steps | None, describe_key("copies of the routers' weights")] = None
    weights: Annotated[Steps | None, describe_key("spread of a few matrices")] = None
    gradients: Annotated[
        Steps | None, describe_key("metrics that need a pass over the gradients")
    ] = None
    checksums: Annotated[Steps | None, describe_key("weights of ranks that must be alike")] = None


class ProbeSettings(Section, frozen=True):
    """Measurements inside the job's process."""

    share: Annotated[
        Share,
        describe_key(
            "of a step's time, for all of them; where steps are short, costly ones are rarer"
        ),
    ] = 0.01


class Mechanisms(Section, frozen=True):
    """Spectra of a few weights and of their changes, by a process beside the job."""

    every: Annotated[SomeSteps, describe_key("steps between two pairs of copies, at least")] = 100
    distance: Annotated[SomeSteps, describe_key("steps between the copies of a pair")] = 25
    share: Annotated[
        Share,
        describe_key("of one CPU, copies included; below 100% at the lowest priority"),
    ] = 0.01
    reference: Annotated[
        str | None,
        describe_key("directory of a healthy run with the same settings, to compare with"),
    ] = None


class SkipNonfinite(Section, frozen=True):
    """Skip an update whose gradients are not finite, before the weights change."""

    max: Annotated[Count, describe_key("maximum skips before the rules take over")]
    per: Annotated[SomeSteps, describe_key("steps in which they are counted")]


class ZeroNonfinite(Section, frozen=True):
    """Set non-finite gradient entries to zero, and apply the step with the rest."""

    max: Annotated[Count, describe_key("maximum steps repaired before the rules take over")] = 3
    per: Annotated[SomeSteps, describe_key("steps in which they are counted")] = 128


class SkipOutliers(Section, frozen=True):
    """Skip the update of a batch far out of its band; asks `job.probe_batch` before the third."""

    max: Annotated[Count, describe_key("maximum skips before updates are made as they come")] = 32
    per: Annotated[SomeSteps, describe_key("steps in which they are counted")] = 2000
    spreads: Annotated[
        float,
        Meta(ge=1),
        describe_key("how far the loss is above its level, in spreads of its past"),
    ] = 6.0
    rise: Annotated[float, Meta(ge=0), describe_key("and as a share of the level")] = 0.15


class UpdateClip(Section, frozen=True):
    """Scale down updates above mean + sigma deviations of recent ones; copies all weights."""

    window: Annotated[
        int,
        Meta(ge=2, extra_json_schema={"x-unit": "steps"}),
        describe_key("steps whose update norms are the reference"),
    ] = 128
    sigma: Annotated[float, Meta(ge=0), describe_key("standard deviations above their mean")] = 2.0
    max_gb: Annotated[float, Meta(ge=0), describe_key("maximum memory for the copies, in GB")] = 4.0


class Safeguards(Section, frozen=True, omit_defaults=True):
    """Reactions inside the probe: an outside process would be one step too late."""

    skip_nonfinite: Annotated[
        SkipNonfinite | None, describe_key("skip updates that are not finite")
    ] = None
    zero_nonfinite: Annotated[
        ZeroNonfinite | None,
        describe_key("set non-finite gradient entries to zero; also on devices"),
    ] = None
    skip_outliers: Annotated[
        SkipOutliers | None, describe_key("skip updates of batches that are far out of their band")
    ] = None
    update_clip: Annotated[
        UpdateClip | None, describe_key("scale down updates that are much larger than usual")
    ] = None


class Checkpoints(Section, frozen=True):
    """The job's own checkpoints, and how they are protected."""

    glob: Annotated[
        tuple[str, ...],
        describe_key(
            "paths, relative to the job's working directory; default: those that it announces. "
            "Files of another job do not count: name one directory, without wildcards"
        ),
    ] = ()
    verify: Annotated[
        tuple[Literal["load", "finite", "optimizer"], ...],
        describe_key("checks besides size and hash"),
    ] = ("load", "finite")
    keep_good: Annotated[Count, describe_key("newest verified ones that are pinned")] = 2
    pin: Annotated[
        Literal["copy", "link"],
        describe_key("a link costs no space, and is lost if the job overwrites the file in place"),
    ] = "copy"
    settle: Annotated[Seconds, describe_key("how long an unannounced one must be unchanged")] = 5.0
    restore_test: Annotated[
        Seconds | None, describe_key("how often the newest pinned one is verified again")
    ] = 3600.0


class Tasks(Section, frozen=True):
    """Benchmarks of lm-evaluation-harness, of local files."""

    include: Annotated[
        str,
        describe_key("folder of their YAML; paths in it are relative to it; micro: those shipped"),
    ]
    names: Annotated[tuple[str, ...], Meta(min_length=1), describe_key("of the tasks")]
    limit: Annotated[Count, describe_key("questions of each, at most")] = 200
    python: Annotated[
        str | None,
        describe_key("interpreter that has the harness and this package; default: our own"),
    ] = None


class Toxicity(Section, frozen=True):
    """Continuations of prompts, which a scorer takes for toxic from 0.5 on."""

    prompts: Annotated[str, describe_key("file of JSON lines with a `prompt` each")]
    scorer: Annotated[
        str, describe_key("MODULE:FUNCTION that returns a score of 0 to 1 for each of some texts")
    ]
    k: Annotated[Count, describe_key("continuations of each prompt, of 20 tokens")] = 25


class Evaluate(Section, frozen=True):
    """The model of a checkpoint, rebuilt, proved and measured beside the job."""

    every: Annotated[
        Literal["checkpoint"] | None,
        describe_key("each that was verified; default: by `supervise checkpoint eval` alone"),
    ] = None
    val: Annotated[
        Mapping[Local, str],
        describe_key("name: file of held-out token ids (.bin, uint16 or uint32)"),
    ] = msgspec.field(default_factory=dict)
    tokens: Annotated[Count, describe_key("of each file, at most")] = 200_000
    tokenizer: Annotated[
        str | None,
        describe_key("file of the tokenizer of `val`: with another one nothing is compared"),
    ] = None
    index: Annotated[
        str | None,
        describe_key(
            "of `supervise data check --index`: the model's texts are searched for copies"
        ),
    ] = None
    tasks: Annotated[Tasks | None, describe_key("benchmarks; need the extra `eval`")] = None
    toxicity: Annotated[Toxicity | None, describe_key("of what the model makes of prompts")] = None
    limit_s: Annotated[Seconds, describe_key("how long it may take; half of it for `val`")] = (
        msgspec.field(name="limit", default=600.0)
    )
    memory_gb: Annotated[
        Annotated[float, Meta(gt=0.0)] | None,
        describe_key("memory that it may take; default: half of what is free when it begins"),
    ] = None
    reimport: Annotated[
        bool, describe_key("a script without a `__main__` guard may be imported for its classes")
    ] = False


class Orphans(Section, frozen=True):
    """Processes that go on training after the job's first process has ended."""

    watch: Annotated[
        Seconds, describe_key("maximum time they are watched; 0: the run ends at once")
    ] = 600.0


class HostHealth(Section, frozen=True):
    """What this host must have before the job is started on it again."""

    matmul: Annotated[
        Seconds | None,
        describe_key(
            "how long each device multiplies matrices whose product is known; 0s: not at all; "
            "default: 5s on devices, and the CPU not at all"
        ),
    ] = None
    memory_gb: Annotated[
        Annotated[float, Meta(ge=0.0)] | None,
        describe_key("available memory; default: half of the most that the job had"),
    ] = None
    disk_gb: Annotated[
        Annotated[float, Meta(ge=0.0)] | None,
        describe_key("free space beside its checkpoints; default: as much as one takes"),
    ] = None

    def find_errors(self) -> list[tuple[str, str]]:
        if self.matmul is None or 0.0 <= self.matmul <= LONGEST_MATMUL_S:
            return []
        return [("matmul", f"must be between 0 and {LONGEST_MATMUL_S:g}s, not {self.matmul:g}s")]


class RelaunchSettings(Section, frozen=True):
    """How the job is started again from a checkpoint.

    In `args` and `env`, {checkpoint} is the checkpoint's path, {directory} the one it is in, and
    {step} the count of steps in it: the PLACEHOLDERS. Another {word} is a mistake; `${word}`,
    `{{word}}` and all other braces stay as they are.
    """

    resume: Annotated[
        Literal["args", "library"],
        describe_key("args: by `args` and `env`; library: through Trainer or Lightning"),
    ] = "args"
    args: Annotated[tuple[str, ...], describe_key("added to the command")] = ()
    env: Annotated[Mapping[str, str], describe_key("added to its environment")] = msgspec.field(
        default_factory=dict
    )
    wait: Annotated[
        Literal["pause", "train"],
        describe_key(
            "what a job of one rank does while the checkpoint that it is to go back to is verified"
        ),
    ] = "pause"


class Preempt(Section, frozen=True):
    """The job's own checkpoint before it is ended from outside."""

    grace_s: Annotated[
        Seconds, describe_key("the longest that TERM, USR1 or USR2 waits for the checkpoint")
    ] = msgspec.field(name="grace", default=GRACE_S)
    margin_s: Annotated[
        Seconds,
        describe_key(
            "how long before SLURM_JOB_END_TIME, and after a drain file, it is written at most"
        ),
    ] = msgspec.field(name="margin", default=MARGIN_S)
    drain: Annotated[
        str | None,
        describe_key("file that asks for it when it is written; default: drain in the run"),
    ] = None

    def find_errors(self) -> list[tuple[str, str]]:
        limits = (("grace", self.grace_s, 300.0), ("margin", self.margin_s, 3600.0))
        return [
            (name, f"must be between 1s and {limit:g}s, not {value:g}s")
            for name, value, limit in limits
            if not 1.0 <= value <= limit
        ]


class ScalingLaw(Section, frozen=True):
    """The loss by tokens, fitted to other runs: floor + scale / tokens ** exponent."""

    floor: Annotated[float, describe_key("the loss that no number of tokens goes below")]
    scale: Annotated[float, Meta(gt=0), describe_key("the loss above it, of one token")]
    exponent: Annotated[
        float, Meta(gt=0, le=1), describe_key("by which power of the tokens that falls")
    ]

    def at(self, tokens: float) -> float:
        """Return the loss behind so many tokens."""
        return self.floor + self.scale * math.exp(-self.exponent * math.log(tokens))


class JobSettings(Section, frozen=True):
    """Properties of the job that the policy relies on."""

    rollback: Annotated[
        Literal["in_process"], describe_key("savepoints inside the job's own process")
    ] = "in_process"
    peak_flops: Annotated[
        Annotated[float, Meta(ge=1.0)] | None,
        describe_key("FLOP/s of its device, for mfu; default: by the device's name"),
    ] = None
    checkpoints: Annotated[Checkpoints, describe_key("the job's own checkpoints")] = Checkpoints()
    on_crash: Annotated[
        RunbookName | None,
        describe_key("runbook when it ends by itself, such as restart; default: the run ends"),
    ] = None
    failures: Annotated[
        tuple[FailureClass, ...],
        describe_key(
            "classes of failures that are tried before the shipped ones (policies/failures)"
        ),
    ] = ()
    logs: Annotated[
        tuple[str, ...],
        describe_key(
            "globs of log files, relative to its working directory: searched for known failures"
        ),
    ] = ()
    relaunch: Annotated[
        RelaunchSettings | None, describe_key("how it is started again; default: it never is")
    ] = None
    health: Annotated[
        Literal["none"] | HostHealth | None,
        describe_key(
            "what is looked at before it is started again; none: nothing; default: all of it"
        ),
    ] = None
    preempt: Annotated[
        Literal["checkpoint"] | Preempt | None,
        describe_key(
            "checkpoint: a signal that the job does not handle, walltime, or a drain file makes "
            "it write a checkpoint before it ends; default: signals are passed on at once"
        ),
    ] = None
    steps: Annotated[
        SomeSteps | None,
        describe_key(
            "optimizer steps of a whole run: an end with code 0 before them is SEV1; default: as "
            "Trainer or Lightning plan them"
        ),
    ] = None
    orphans: Annotated[
        Orphans, describe_key("processes that go on training after the first one has ended")
    ] = Orphans()
    scaling_law: Annotated[
        ScalingLaw | None,
        describe_key("what other runs of this model say of its loss; the residual is judged"),
    ] = None
    probe_batch: Annotated[
        bool,
        describe_key(
            "run two rows of the first batch again at each savepoint and save, for comparison"
        ),
    ] = False
    evaluate: Annotated[
        Evaluate | None,
        describe_key("measure the model of each checkpoint; a probe batch proves it; default: no"),
    ] = None
    manifest: Annotated[
        tuple[str, ...],
        describe_key(
            "files whose hashes are recorded, per launch and checkpoint: tokenizer, list of data"
        ),
    ] = ()

    @property
    def preemption(self) -> Preempt | None:
        """The terms on which signals wait for a checkpoint; None where none does."""
        return Preempt() if self.preempt == "checkpoint" else self.preempt


@dataclass(frozen=True, slots=True)
class Policy(Shared):
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
    ladder: Ladder = field(default_factory=Ladder)
    probation_steps: int = 100
    warmup_steps: int = 64  # frames of rank 0 before `nominal`
    blind_after_steps: int = 256  # a rule UNKNOWN for longer is an incident of its own
    blind_after_s: float = 300.0
    hold_reminder_s: float = 4 * 3600.0  # people are reminded of a hold so often
    repeat_s: float = 4 * 3600.0  # an incident that nobody acknowledged is told again so often
    give_up: str = PAGE  # or STOP, or STOP_SEV0: where nothing can help any more
    journal_bytes: float | None = None  # frames of an older piece are removed above it
    machine: Mapping[str, Mapping[str, str]] | None = None  # None: the default table
    savepoints: Savepoints | None = None  # None: the job keeps none
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    sampling: Sampling = field(default_factory=Sampling)
    sparsest: Mapping[str, int] = field(default_factory=dict)  # costly metric -> steps, at most
    mechanisms: Mechanisms | None = None  # None: no spectra
    safeguards: Safeguards = field(default_factory=Safeguards)
    notify: Mapping[str, Mapping[str, ChannelKey]] = field(default_factory=dict)
    job: JobSettings = field(default_factory=JobSettings)
    cites: tuple[str, ...] = ()  # files with the results of trials of this policy
    verbs: Mapping[str, Callable[..., Action]] = field(default_factory=dict)  # for operators
    resolved: str = ""  # the resolved policy as YAML text, kept in the run directory

    def in_phase(self, phase: str) -> Policy:
        """Return the policy as it is in a phase of the run; itself where that changes no rule."""
        rules = tuple(rule.in_phase(phase) for rule in self.rules)
        unchanged = all(a is b for a, b in zip(rules, self.rules, strict=True))
        return self if unchanged else replace(self, rules=rules)

    def mode_of(self, rule: Rule) -> str:
        """Return the weaker one of the policy's mode and the rule's own."""
        return min(self.mode, rule.mode or self.mode, key=MODES.index)

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Verbs that this policy does not say enough for -> what it does not say."""
        if self.job.relaunch is not None:
            return {}
        return {"relaunch": "the policy does not say how the job is started again (job.relaunch)"}

    def digest_of(self, rule: Rule) -> str:
        """Return 16 hex digits over all that decides when a rule fires: its text and thresholds.

        Two policies in which a rule fires alike have the same; a changed number gives another.
        """
        behind = [(name, repr(self.detectors[name])) for name in sorted(self.detectors_of(rule))]
        parts = (rule.text, rule.for_steps, rule.keep_steps, rule.unit, rule.unknown, behind)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def detectors_of(self, rule: Rule) -> tuple[str, ...]:
        """Return the names of a rule's detectors, those that its couplings read included."""
        return detectors_behind(self.detectors, rule.uses)


def detectors_behind(detectors: Mapping[str, Detector], uses: Iterable[str]) -> tuple[str, ...]:
    """Return the names of detectors, each followed by those that it reads."""
    reached: dict[str, None] = {}
    todo = list(uses)
    while todo:
        name = todo.pop(0)
        if name not in reached:
            reached[name] = None
            todo += detectors[name].detectors
    return tuple(reached)


ALL = "all"


@dataclass(slots=True)
class Ledger:
    """What was spent, per class: `(frame count, at_ns)` of every intent still inside its window."""

    spent: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)

    def exhausted(
        self, budgets: Mapping[str, Budget], kind: str, frame_count: int, at_ns: int
    ) -> tuple[str, Budget, int] | None:
        """Return `(class, budget, spent)` of the first class that has no intent left, or None."""
        for name in (kind, ALL):
            budget = budgets.get(name)
            if budget is None:
                continue
            used = self._used(name, budget, frame_count, at_ns)
            if used >= budget.max:
                return name, budget, used
        return None

    def spend(self, kind: str, frame_count: int, at_ns: int) -> None:
        """Count one intent in its class and in `all`."""
        for name in (kind, ALL):
            self.spent.setdefault(name, deque(maxlen=MOST_STARTS)).append((frame_count, at_ns))

    def usage(self, budgets: Mapping[str, Budget], frame_count: int, at_ns: int) -> dict[str, str]:
        """Return `{"rollback": "1/2", ...}` for people."""
        return {
            name: f"{count}/{budgets[name].max}"
            for name, count in self.used(budgets, frame_count, at_ns).items()
        }

    def used(self, budgets: Mapping[str, Budget], frame_count: int, at_ns: int) -> dict[str, int]:
        """Return how many intents each budget counts now."""
        return {
            name: self._used(name, budget, frame_count, at_ns) for name, budget in budgets.items()
        }

    def _used(self, name: str, budget: Budget, frame_count: int, at_ns: int) -> int:
        entries = self.spent.get(name, ())
        return sum(not _expired(budget, entry, frame_count, at_ns) for entry in entries)


def read_usage(share: str) -> tuple[int, int]:
    """Return how many intents a budget counts, and its maximum, of a share in `Ledger.usage`."""
    used, maximum = map(int, share.split("/"))
    return used, maximum


def _expired(budget: Budget, entry: tuple[int, int], frame_count: int, at_ns: int) -> bool:
    if budget.per_steps is not None:
        return frame_count - entry[0] >= budget.per_steps
    if budget.per_s is not None:
        return at_ns - entry[1] >= budget.per_s * 1e9
    return False


def entry_level(ladder: Ladder, runbook: str, minimum: int) -> tuple[str, int]:
    """Return `(runbook, level)` for a rule that wants `runbook`, never below level `minimum`.

    A runbook outside the ladder (level -1) is returned as it is: what was tried before is no reason
    to answer a hang with a rollback.
    """
    if runbook not in ladder.levels:
        return runbook, -1
    level = ladder.levels.index(runbook)
    return (runbook, level) if level >= minimum else level_at(ladder, minimum)


def minimum_level(ladder: Ladder, last_level: tuple[int, int] | None, frame_count: int) -> int:
    """Return the level that the last incident came to, unless that was long enough ago.

    Args:
        last_level: (level, frame_count) of it, None when none acted.
    """
    return (
        last_level[0]
        if last_level is not None and frame_count - last_level[1] < ladder.reset_after_steps
        else -1
    )


def next_level(ladder: Ladder, level: int) -> tuple[str, int]:
    """Return the level above `level`; past the last one there is only `hold`.

    A runbook from outside the ladder (level -1) failed: there is no next level for it, hold.
    """
    return (HOLD, len(ladder.levels)) if level < 0 else level_at(ladder, level + 1)


def level_at(ladder: Ladder, level: int) -> tuple[str, int]:
    """Return `(runbook, level)`, `hold` past the end."""
    return (
        (ladder.levels[level], level) if level < len(ladder.levels) else (HOLD, len(ladder.levels))
    )


def level_of(ladder: Ladder, name: str, otherwise: int) -> int:
    """Return the level of a runbook, `otherwise` when it is on none."""
    return ladder.levels.index(name) if name in ladder.levels else otherwise


def first_relaunch(policy: Policy) -> tuple[str, int]:
    """Return `(runbook, level)` of the first one that relaunches the job, `hold` without one."""
    relaunching_names = [name for name, book in policy.runbooks.items() if "relaunch" in book.verbs]
    names = [
        name for name in (*policy.ladder.levels, *relaunching_names) if name in relaunching_names
    ]
    return (names[0], level_of(policy.ladder, names[0], -1)) if names else (HOLD, -1)
