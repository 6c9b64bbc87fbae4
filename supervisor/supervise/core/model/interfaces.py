"""Interfaces of detectors, and messages; the interface of actions is in `action`.

A detector or an action is a frozen dataclass: `yaml_name` of the class is its name in a policy, its
fields are its YAML keys, its docstring is its page in the catalog (with an `Example:` that
loads, `Blind to:` for detectors, `Undo:` for actions, and `Source:`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

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

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """Ids of the metrics it reads, in the order in which `feed` gets them."""

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

    def check(self) -> list[tuple[str, str]]:
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


@dataclass(frozen=True, slots=True)
class Message:
    """A message for people. Its fields are plain text; notifiers escape it for their medium.

    Attributes:
        incident: pairs the messages from `opened` to `closed`. None: about none.
        severity: SEV0, SEV1, SEV2 or INFO.
        title: one line.
        verdict: what is wrong, with the numbers.
        why: the rule and its threshold.
        next: what happens now, or what a person should do.
        audit_head: "size head" of the audit log: every receiver becomes a witness.
        directory: of the run, as commands in the texts name it.
        kind: one of KINDS.
        host, job, policy, mode: where it runs, its command line, the policy in force and its mode.
        card: `(Cause | Did | Cost | Proof | Loss, text)` once something was done.
        rules: ids of those that fired in the incident.
        request: id of the approval that is asked for, "" for none.
        acknowledged_by: the operator who has just acknowledged the incident, "" for nobody.
        at: when it was decided, UTC ISO-8601.
        form, subject: the class of its notice, and what a rule in it is about; see `notices`.
    """

    run: str
    incident: str | None
    severity: Severity
    title: str
    verdict: str
    why: str
    next: str
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
    at: str = ""
    form: str = ""
    subject: str = ""


class NotifyError(Exception):
    """A message was not delivered.

    Attributes:
        retry_after_s: seconds to wait before the next try, None when a retry cannot help.
    """

    def __init__(self, message: str, *, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
