"""Events: all that enters the engine.

Every event carries `at_ns`, nanoseconds of the machine's CLOCK_MONOTONIC, read by an edge. Steps
are 0-based attempted optimizer steps. `None` is a value that is absent, NaN is a value that is not
a number; they are never the same thing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from .payload import NOTHING, Payload, Shared


class PartChanges(Struct, frozen=True, omit_defaults=True):
    """Names of one part of a policy."""

    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    changed: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


NO_CHANGES = PartChanges()


class PolicyChanges(Struct, frozen=True, omit_defaults=True):
    """All differences between two policies.

    Attributes:
        mode: before and after, () where it is the same. settings: names of other keys.
        restart: keys that the job was told at its start, and hears of at the next one only.
    """

    detectors: PartChanges = NO_CHANGES
    rules: PartChanges = NO_CHANGES
    runbooks: PartChanges = NO_CHANGES
    budgets: PartChanges = NO_CHANGES
    mode: Sequence[str] = ()
    settings: Sequence[str] = ()
    restart: Sequence[str] = ()

    def __bool__(self) -> bool:
        return self != PolicyChanges()


@dataclass(frozen=True, slots=True)
class Launched:
    """The job's process was started."""

    at_ns: int
    pid: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Announced:
    """A rank's probe published its table of metric names (again, when names came late).

    `segment` tells which segment it and the frames after it were read from: when that was made.
    `again` that its process took the place of one that did not come to a good end: whoever starts
    such a one, a launcher for instance, means the same training.
    """

    at_ns: int
    rank: int
    world_size: int
    pid: int
    names: tuple[str, ...]
    segment: int = 0
    again: bool = False

    @property
    def program(self) -> tuple[int, int]:
        """Which program it is: an exec keeps the process and makes another segment."""
        return self.pid, self.segment


@dataclass(frozen=True, slots=True)
class Frame(Shared):
    """The metrics of one optimizer step of one rank.

    `values[i]` belongs to `names[i]` of the rank's newest `Announced`; None is absent.
    """

    at_ns: int
    rank: int
    attempt: int
    step: int
    values: tuple[float | None, ...]


# Who measures beside the steps of the job: each of these streams has its own order of steps.
Stream = Literal["checkpoint", "savepoint", "build"]


@dataclass(frozen=True, slots=True)
class LateFrame:
    """Metrics of an earlier step, measured beside the job and known minutes later.

    They are judged at their own step, and count for no step of the run. A step may come in parts,
    each with other metrics; what one detector reads belongs into one part. `attempt` is that of the
    weights that were measured.
    """

    at_ns: int
    stream: Stream
    attempt: int
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Gap:
    """Frames were overwritten before they were read."""

    at_ns: int
    rank: int
    first_seq: int
    count: int


# Phases that the supervisor finds, not the probe: silence in them is no standstill.
SUSPENDED, LOADING = "suspended", "loading"
DEAD = "dead"  # the process died, and not at its own end, while the job's first one lives


@dataclass(frozen=True, slots=True)
class Beat:
    """When a rank's probe last ran any hook, and in which phase the job was then.

    `phase` is one of `startup`, `step`, `eval`, `checkpoint`, `paused`, `exiting`. Three are found
    by the supervisor: `suspended`, a signal of somebody else's stops a rank of the job; `loading`,
    a start-up during which the job reads or computes; `dead`, the process of the rank is dead.
    """

    rank: int
    seen_ns: int
    phase: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Sent about once a second, and before anything that waits on a deadline."""

    at_ns: int
    beats: tuple[Beat, ...] = ()


@dataclass(frozen=True, slots=True)
class Notice:
    """Something about the watching itself: a collector switched off, a safeguard that fired,
    a segment that cannot be read, no probe after its deadline.

    `kind` is a short kebab-case id (`no-probe`, `segment-fault`, `collector-off`, `probe-off`,
    `failure`, `capabilities`, `measurement-changed`, `safeguard`, `discards`, `drill`, `shard`,
    `quarantine`, `rollback-unavailable`, `weights-restored`, `continuity`, `resumed`,
    `resume-refused`, `wiring`, `pause-ended`, `report`, `suspended`, `stopped`, `slow-start`,
    `orphans`, `orphans-left`, `preempt`, `host-health`, `training-ended`, `identity-changed`,
    `approval-delivered`, `turns`, `note`);
    `message` is one sentence. What a probe said has the number of its `letter` in the `segment`, as
    `Announced` names it, so that another supervisor knows which letters were taken.
    """

    at_ns: int
    kind: str
    message: str
    rank: int | None = None
    step: int | None = None
    data: Payload = NOTHING
    segment: int | None = None
    letter: int | None = None

    def __post_init__(self) -> None:
        _keep_payload(self, "data")


@dataclass(frozen=True, slots=True)
class Finished:
    """What an action came to. `result` holds observed effects, never intentions."""

    at_ns: int
    action_id: str
    ok: bool
    result: Payload = NOTHING
    error: str | None = None

    def __post_init__(self) -> None:
        _keep_payload(self, "result")


@dataclass(frozen=True, slots=True)
class OperatorCommand:
    """A command from an operator. The record that answers it has the same `args["key"]`."""

    at_ns: int
    operator: str
    command: str
    args: Payload = NOTHING

    def __post_init__(self) -> None:
        _keep_payload(self, "args")


@dataclass(frozen=True, slots=True)
class Adopted:
    """Another supervisor took the run over, since the one before it had died.

    Attributes:
        pid: of the new supervisor.
        alive: whether the job still ran.
        unwatched_ns: since the last event that the other one wrote down.
    """

    at_ns: int
    pid: int
    alive: bool
    unwatched_ns: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The job's processes ended; the run goes on when others are started in their place.

    `returncode` as in `subprocess`: negative is minus the signal's number.
    """

    at_ns: int
    returncode: int


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Another policy took over, or was refused. Events after this one are judged by it.

    Attributes:
        operator: who asked for it.
        digest, name, mode: the new policy; its text is in the run directory under its digest.
        before: digest of the policy that was in force.
        changes: what differs.
        refused: why the old policy stays, one sentence; None when the new one took over.
    """

    at_ns: int
    operator: str
    digest: str
    name: str
    mode: str
    before: str
    changes: PolicyChanges = PolicyChanges()  # noqa: RUF009
    refused: str | None = None


def _keep_payload(event: Notice | Finished | OperatorCommand, name: str) -> None:
    """Let a plain mapping, as JSON is read, count as a payload."""
    fields = getattr(event, name)
    if not isinstance(fields, Payload):
        object.__setattr__(event, name, Payload(fields))


Observation = Launched | Announced | Frame | LateFrame | Gap | Tick
Event = Observation | Notice | Finished | OperatorCommand | Adopted | Exited | Reloaded


POINTS = 128  # of a curve at most; half as many after it was thinned


class LossCurve(Struct, frozen=True):
    """The loss over the whole run, see `Curve`."""

    steps: Sequence[int] = ()
    loss: Sequence[float] = ()


class Curve:
    """The loss over the whole run in at most POINTS points.

    A point is the highest loss of `stride` frames, so that no spike is lost; NaN counts as highest.
    When all points are used up, two become one.
    """

    def __init__(self) -> None:
        self.stride = 1
        self.steps: list[int] = []
        self.losses: list[float] = []
        self._left = 0  # frames that the newest point still takes

    def add(self, step: int, loss: float) -> None:
        """Take the loss of one frame."""
        if self._left:
            self.losses[-1] = _higher(self.losses[-1], loss)
            self._left -= 1
            return
        if len(self.steps) == POINTS:
            pairs = zip(self.losses[::2], self.losses[1::2], strict=True)
            self.losses = [_higher(a, b) for a, b in pairs]
            self.steps = self.steps[::2]
            self.stride *= 2
        self.steps.append(step)
        self.losses.append(loss)
        self._left = self.stride - 1


def _higher(a: float, b: float) -> float:
    return a if math.isnan(a) or a > b else b
