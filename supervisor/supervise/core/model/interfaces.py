"""Interfaces of detectors, and messages; the interface of actions is in `action`.

A detector or an action is a frozen dataclass: `yaml_name` of the class is its name in a policy, its
fields are its YAML keys, its docstring is its page in the catalog (with an `Example:` that
loads, `Blind to:` for detectors, `Undo:` for actions, and `Source:`).
"""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from .payload import NOTHING, Payload, Shared

# The numbers behind a code, by their names; each kind of detector has its own. `match` of a
# coupling holds names and steps, `values` the value of each metric.
Numbers: TypeAlias = Mapping[str, int | float | Mapping[str, int] | None]
ReadingValue: TypeAlias = bool | int | float | str | Sequence[int | str] | Numbers | None
Reading: TypeAlias = Mapping[str, ReadingValue]

# Or-ed onto the code that `feed` returns: this watch has a note to take; see `Watch.note`.
HAS_NOTE = 4


@cache
def yaml_name(part: type) -> str:
    """Return the name of a detector or an action in a policy: that of its class, in snake_case."""
    return snake_case(part.__name__)


def snake_case(name: str) -> str:
    """Return `robust_z` for `RobustZ`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Note(NamedTuple):
    """A remark of a watch: `kind` is REBASELINE or NEAR_MISS, `details` are its numbers."""

    kind: str = ""
    text: str = ""
    details: Payload = NOTHING


REBASELINE, NEAR_MISS = "rebaseline", "near_miss"


class Watch(ABC):
    """The memory of one detector on one rank: mutable, private to the engine, which may copy it.

    Attributes:
        raw: the code of the last sample before `for`, `m_of_n` and hysteresis. Couplings read it.
        series: what was learnt of the metric, None for nothing that others could use. Watches of
            one metric whose series have the same `key` share one.
    """

    __slots__ = ("raw",)
    raw: int
    series: Any = None

    @abstractmethod
    def feed(self, sample: Any, step: int) -> int:
        """Take the sample of `step` and return OK, UNKNOWN or BREACH (perhaps | NOTE).

        What `sample` is depends on the detector's `reads`:
        `metric`: float or None (absent) · `metrics`: a sequence of these, in field order ·
        `detectors`: a sequence of raw codes · `metric+detector`: (float or None, raw code).
        """

    @abstractmethod
    def numbers(self) -> Reading:
        """Return the numbers behind the last reading: value, threshold, baseline, z, ... (JSON)."""

    def rewind(self, step: int) -> None:
        """The run went back: forget every sample after `step`. The default forgets everything."""
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Forget everything, as at the start of a run."""

    def hold_level(self, *, held: bool) -> None:  # noqa: B027 most have no level, or keep theirs
        """While it is held, what is in breach does not become the level."""

    def lacks(self, spacing: int) -> str:
        """Return why nothing could be judged so far, "" when it could.

        spacing: the usual number of steps between two frames.
        """
        return ""

    def note(self) -> Note:
        """Take the pending note."""
        return Note()


class Clockwork(Watch):
    """A watch that also hears of time: the engine calls `beat` per frame and `tick` per tick."""

    __slots__ = ()

    @abstractmethod
    def beat(self, at_ns: int, step: int) -> None:
        """A frame of this rank arrived."""

    @abstractmethod
    def tick(self, at_ns: int, heard_ns: int | None, phase: str) -> int:
        """Time is `at_ns`; the probe was last heard at `heard_ns`. Return the code."""


@dataclass(frozen=True)
class Detector(Shared, ABC):
    """A detector as written in YAML; `start` makes the watch that runs it.

    `reads` says what `feed` gets, `inputs` names the metrics or detectors it gets them from. A
    subclass with `reads = "clock"` returns a `Clockwork`.
    """

    reads: ClassVar[str] = "metric"  # metric | metrics | detectors | metric+detector | clock
    measures_descent: ClassVar[bool] = False  # in breach while its metric is an objective that fell
    measures_mean: ClassVar[bool] = False  # in breach while its metric is no sum over an amount

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """Ids of the metrics it reads, in the order in which `feed` gets them."""

    @property
    def subjects(self) -> tuple[str, ...]:
        """Ids of the metrics that a rule with it is about; of what only qualifies it, none."""
        return self.metrics

    @property
    def detectors(self) -> tuple[str, ...]:
        """Names of the detectors whose raw codes it reads, in order."""
        return ()

    @property
    def needs_all(self) -> bool:
        """Whether it must have all of its inputs, or can do with any of them."""
        return True

    @abstractmethod
    def start(self) -> Watch:
        """Return a fresh watch."""

    def find_errors(self) -> list[tuple[str, str]]:
        """Return `(field, message)` for every value that cannot work together with the others."""
        return []


Severity = Literal["SEV0", "SEV1", "SEV2", "INFO"]  # of a message
Kind = Literal["opened", "updated", "action", "approval", "closed", "finished", "watcher"]
OPENED: Final = "opened"
UPDATED: Final = "updated"
ACTION: Final = "action"
APPROVAL: Final = "approval"
CLOSED: Final = "closed"
FINISHED: Final = "finished"
WATCHER: Final = "watcher"
KINDS = (OPENED, UPDATED, ACTION, APPROVAL, CLOSED, FINISHED, WATCHER)  # of messages


# ── advice, and messages ──────────────────────────────────────────────────────────────────────────


class Lead(StrEnum):
    """The first clause of an advice: whether people are asked for anything now."""

    NOTHING = "nothing to do"
    LATER = "nothing to do now; for tomorrow:"
    BEFORE_NEXT = "before the next run:"
    FOLLOWS = "nothing to do now: an automatic action follows if it does harm"
    UNDER_WAY = "nothing to do: an automatic action is under way, and its result follows"
    NO_ACTION = "the policy has no automatic action for this"
    ONLY_WATCHED = "no automatic action follows: the mode of the policy lets none run"
    SKIPPED = (
        "nothing to do now: the update was skipped, so that no weight changed; it is told if it "
        "goes on"
    )
    OFF = "automatic actions are off"


# These introduce the step behind them.
OPEN_LEADS = (Lead.LATER, Lead.BEFORE_NEXT)
# In a command: the run directory; in a sentence: a file of it.
_RUN, _RUN_PATH = re.compile(r"(?<![^ ])RUN(?![^ /])"), re.compile(r"(?<![^ ])RUN(?=/)")


class Step(Struct, frozen=True, omit_defaults=True):
    """A step of an advice.

    Attributes:
        text: a short sentence, or what the command is for; "" where that says it all
        command: to paste into a shell; "" for none
    """

    text: str = ""
    command: str = ""

    def filled(self, directory: str, job: str) -> Step:
        """Return it with the run directory and the job's command line for RUN and COMMAND."""
        quoted = shlex.quote(directory)
        command = _RUN.sub(lambda _: quoted, self.command)
        return Step(fill_paths(self.text, directory), command.replace("-- COMMAND", f"-- {job}"))


AdviceSteps: TypeAlias = tuple[Step, ...]


def sentences(*texts: str) -> AdviceSteps:
    """Return steps without a command; "" is none."""
    return tuple(Step(text) for text in texts if text)


def fill_paths(text: str, directory: str) -> str:
    """Return a sentence with the run directory in the place of RUN in its paths."""
    quoted = shlex.quote(directory)
    return _RUN_PATH.sub(lambda _: quoted, text)


def introduce(intro: str, steps: AdviceSteps, joint: str = ": ") -> AdviceSteps:
    """Return steps whose first one begins with a text; () for none."""
    first, others = steps[:1], steps[1:]
    return (*(Step(joint.join(filter(None, (intro, s.text))), s.command) for s in first), *others)


def render_steps(steps: Iterable[Step]) -> str:
    """Return steps in one line: the only text that is made of them."""
    return "; ".join(": ".join(filter(None, (step.text, step.command))) for step in steps)


class Advice(Struct, frozen=True):
    """The next steps, and whether people are asked for anything.

    In its commands RUN is the run directory, and `-- COMMAND` the job's command line.

    Attributes:
        live: steps for readers of a message alone: a command to the run as it is then, or to the
            card.
    """

    lead: Lead | None = None
    steps: AdviceSteps = ()
    live: AdviceSteps = ()

    def __bool__(self) -> bool:
        return bool(self.lead or self.steps)

    @property
    def text(self) -> str:
        """The advice in one line."""
        return render_steps(self.whole)

    @property
    def whole(self) -> AdviceSteps:
        """Its first clause and all its steps, as steps."""
        lead, steps = self.lead or "", (*self.steps, *self.live)
        if steps and lead in OPEN_LEADS:
            return introduce(lead, steps, " ")
        return (*sentences(lead), *steps)

    def filled(self, directory: str, job: str) -> Advice:
        """Return it with the run directory and the job's command line for RUN and COMMAND."""
        return self.mapped(lambda step: step.filled(directory, job))

    def mapped(self, change: Callable[[Step], Step]) -> Advice:
        """Return it with each step changed."""
        return Advice(self.lead, tuple(map(change, self.steps)), tuple(map(change, self.live)))


@dataclass(frozen=True, slots=True)
class Message:
    """A message for people. Its fields are plain text; notifiers escape it for their medium.

    Attributes:
        incident: pairs the messages from `opened` to `closed`. None: about none.
        severity: SEV0, SEV1, SEV2 or INFO.
        title: one line. news: the same without the incident and what that is.
        verdict: what is wrong, with the numbers.
        why: the rule and its threshold.
        next: what happens now, or what a person should do; its commands can be pasted.
        audit_head: "size head" of the audit log: every receiver becomes a witness.
        directory: of the run, as commands in the texts name it.
        kind: one of KINDS.
        host, job, policy, mode: where it runs, its command line, the policy in force and its mode.
        card: `(Cause | Did | Cost | Proof | Loss, text)` once something was done.
        rules: ids of those that fired in the incident.
        request: id of the approval that is asked for, "" for none.
        acknowledged_by: the operator who has just acknowledged the incident, "" for nobody.
        incident_severity: of the incident, "" where it is `severity`, or for none.
        at: when it was decided, UTC ISO-8601.
        form, rule, subject: the class of its notice, the rule in it, and what that is about; see
            `notices`.
        to_all: it goes to every channel, whatever its least severity.
    """

    run: str
    incident: str | None
    severity: Severity
    title: str
    verdict: str
    why: str
    next: Advice
    step: int
    audit_head: str = ""
    facts: Sequence[tuple[str, str]] = ()
    directory: str = "RUN"
    kind: Kind = WATCHER
    host: str = ""
    job: str = ""
    policy: str = ""
    mode: str = ""
    card: Sequence[tuple[str, str]] = ()
    rules: Sequence[str] = ()
    request: str = ""
    acknowledged_by: str = ""
    incident_severity: str = ""
    at: str = ""
    form: str = ""
    rule: str = ""
    subject: str = ""
    news: str = ""
    to_all: bool = False


class NotifyError(Exception):
    """A message was not delivered.

    Attributes:
        retry_after_s: seconds to wait before the next try, None when a retry cannot help.
    """

    def __init__(self, message: str, *, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
