"""Data of others: JSON objects kept as they came, and the forms in which the engine reads them.

What a probe, an operator or an action sends goes on record unchanged, whatever it holds. The engine
reads a part of it as a form: a class with a type and a default for each field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Self, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Form = TypeVar("Form")


class Shared:
    """What never changes: a deep copy of its holder has the same object."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Payload(Shared, Mapping[str, Json]):
    """A JSON object that somebody sent."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Json] | None = None) -> None:
        self._fields = dict(fields or {})

    def __getitem__(self, name: str) -> Json:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __hash__(self) -> int:
        return hash(frozenset(self._fields))

    def __repr__(self) -> str:
        return repr(self._fields)

    def parse(self, form: type[Form]) -> Form:
        """Return it as a form. Raises ValueError when it is none."""
        return msgspec.convert(self._fields, form, dec_hook=lambda owner, value: owner(value))

    def read(self, form: type[Form]) -> Form:
        """Return it as a form, which has its defaults when this is none."""
        try:
            return self.parse(form)
        except msgspec.ValidationError:
            return form()

    def extended(self, **fields: Json) -> Payload:
        """Return it with more fields, or with other values."""
        return Payload({**self._fields, **fields})


NOTHING = Payload()


# ── notices ───────────────────────────────────────────────────────────────────────────────────────


class SignalSent(Struct, frozen=True):
    """`signal`: somebody sent one to the job.

    Attributes:
        held: it waits for a checkpoint. typed: at a terminal. final: it asks for the job's end.
    """

    signal: str = ""
    held: bool = False
    final: bool = False
    typed: bool = False


class CheckpointState(Struct, frozen=True):
    """`checkpoint`: the guard found one, or has looked at it again; see `Checkpoint`."""

    id: str = ""
    step: int = -1
    attempt: int = 0
    path: str = ""
    ok: bool = False
    bytes: int | None = 0
    resumable: str = "unknown"
    damage: str = ""
    save: int = 0


class CheckpointSearch(Struct, frozen=True):
    """`checkpoint-search`: how many without a verdict may be what a relaunch waits for."""

    candidates: int = 0


class TrainingEnd(Struct, frozen=True):
    """`training-ended`: the steps that a library made of those planned."""

    done: int | None = None
    total: int | None = None
    stopped: bool | None = None


class HostHealth(Struct, frozen=True):
    """`host-health`: why the host is not fit, and what could not be decided."""

    unfit: str = ""
    doubts: str = ""


class RecordSpace(Struct, frozen=True):
    """The disk of the record: what must become free where. seconds: for which the reserve lasts."""

    acts: bool = False
    need_bytes: int | None = None
    reserve_bytes: int = 0
    mount: str = ""
    runs: str = ""
    seconds: float | None = None


class PreemptOutcome(Struct, frozen=True):
    """`preempt`: what became of a request to end the job; phase: see `runtime.preemptor`."""

    phase: str = ""
    cause: str = ""
    signals: Sequence[str] | None = None
    path: str | None = None


class PauseEnd(Struct, frozen=True):
    """`pause-ended`: key of the pause, "" where that is not known."""

    key: str = ""


class Delivery(Struct, frozen=True):
    """`approval-delivered`: id of the request that has reached people."""

    id: str = ""


class DrillParams(Struct, frozen=True):
    """Parameters of a drill that the engine looks at."""

    signal: int | None = None


SLOWING = frozenset(("slow_compute", "slow_input", "memory_creep"))  # drills: of the machine only


class Drill(Struct, frozen=True):
    """`drill`: a fault was injected on purpose."""

    fault: str = ""
    params: DrillParams | None = None
    refused: str = ""

    @property
    def moves_training(self) -> bool:
        """Whether it may move a loss: it was injected, and does more than to slow steps down."""
        return not self.refused and self.fault not in SLOWING


class DrillOrder(Struct, frozen=True):
    """A fault to inject at a step, with all its parameters; rank: the only one that it strikes."""

    fault: str
    step: int
    params: Mapping[str, bool | int | float | str]
    rank: int | UnsetType = UNSET


class Shards(Struct, frozen=True):
    """`shard`: number -> name of shards that the job has told."""

    shards: Mapping[str, str] | None = None


class WiringFacts(Struct, frozen=True):
    """`wiring`: what a message about the wiring of the job needs beside a metric.

    Attributes:
        names: of a few of the tensors or layers. count: how many there are; total: of how many.
        made: the job's line that made the optimizer, or that clips; "" where it is not known.
    """

    metric: str = ""
    names: Sequence[str] = ()
    count: int = 0
    total: int = 0
    made: str = ""

    @property
    def named(self) -> str:
        """Return the names, and how many more there are."""
        more = self.count - len(self.names)
        return ", ".join([*self.names, *([f"{more} more"] if more and self.names else [])])


class ChangedMetrics(Struct, frozen=True):
    """`measurement-changed`: metrics that are measured in another way from now on."""

    metrics: Sequence[str] = ()


class WeightsOrigin(Struct, frozen=True):
    """`weights-restored`: the attempt that goes on with the weights of step `to`."""

    attempt: int = 0
    to: int = -1


class Orphans(Struct, frozen=True):
    """`orphans`: what that means, and the command that ends them."""

    verdict: str = ""
    end: str = ""


class Save(Struct, frozen=True):
    """`checkpoint-saved`: the file or folder, and what the saving rank has counted by then."""

    path: str = ""
    attempt: int | None = None
    counters: Mapping[str, bool | int | float | str | None] = msgspec.field(default_factory=dict)


class Unverified(Struct, frozen=True):
    """`note`: attempt and step of a save for which there will be no verdict, None of others."""

    unverified: tuple[int, int] | None = None


class Safeguard(Struct, frozen=True):
    """`safeguard`: the order by which the probe acted by itself."""

    order: str = "safeguard"


class Comparison(Struct, frozen=True, rename={"now": "is"}):
    """A number of a repeated step, as it was and as it is; None where nobody knows."""

    was: float | None = None
    now: float | None = None


class ProbeBatch(Struct, frozen=True):
    """The verdict on the loss of the probe batch: `equal`, `differs`, or why there is none."""

    verdict: str = ""


class Continuity(Struct, frozen=True):
    """`continuity`: the first step that is made again, and how it was.

    Attributes:
        fingerprint: of its batch: `same`, `other` or `unknown`.
        limit: the loss that the weights of the checkpoint do not exceed; None where none is known.
    """

    step: int = 0
    ok: bool | None = None
    fingerprint: str = ""
    loss: Comparison | None = None
    lr: Comparison | None = None
    probe_batch: ProbeBatch | None = None
    limit: float | None = None


# ── arguments of actions ──────────────────────────────────────────────────────────────────────────


class Rewarm(Struct, frozen=True):
    """A learning rate that rises from `start` times its own to 1.0 in so many steps."""

    start: float = 1.0
    steps: int = 0


class RollbackArgs(Struct, frozen=True):
    """Arguments of `rollback`; sign, sound: see `actions/recovery`."""

    before_step: int = 0
    rewarm: Rewarm | None = None
    moments: str = ""
    sign: int | None = None
    sound: bool = False


class RelaunchArgs(Struct, frozen=True):
    """Arguments of `relaunch`: the checkpoint, and how the job goes on from it."""

    checkpoint: str = ""
    path: str = ""
    step: int = -1
    bytes: int = 0
    attempt: int = 0
    rewarm: Rewarm | None = None
    skip: Sequence[Sequence[int]] | None = None
    if_idle_s: float = 0.0
    resumable: str = ""


class RateArgs(Struct, frozen=True):
    """Arguments of `hold_rate`, a limit with the rate that did harm, and of `lr_scale`."""

    before_step: int | None = None
    limit: float | None = None
    harmful: float = 0.0
    lift: bool = False
    value: float = 1.0
    rewarm_steps: int = 0


class WeightsArgs(Struct, frozen=True):
    """Arguments of `check_weights`; waits: where nobody can say. data_event: that is known."""

    before_step: int = 0
    within: float = 1.0
    again: int = 0
    waits: bool = False
    data_event: str = ""


class QuarantineArgs(Struct, frozen=True):
    """Arguments of `quarantine`."""

    shards: Sequence[str] = ()


class EndArgs(Struct, frozen=True):
    """Arguments of `stop`, and the lease of `pause`."""

    grace_s: float = 0.0
    term_s: float = 0.0
    exit_code: int = 0
    if_idle_s: float = 0.0
    lease_s: float | None = None


# ── results of actions ────────────────────────────────────────────────────────────────────────────


class Outcome(Struct, frozen=True):
    """Observed effects of an action that the engine, or the action itself, looks at.

    Attributes:
        attempt, step: where the job goes on after a rollback or a relaunch; from_step: from where.
        ack_step: the step at whose end the probe carried it out; seen_attempt: in which attempt.
        refused: nothing was touched. inconsistent: some ranks did it, and others did not.
        unfenceable: why the ranks never act at one step. no_space: the disk is full.
        job_ended: the job had ended by then, which is not told yet.
        standstill: why the job stands still. loss, was: of the probe batch, now and by step.
        rate_limit: that a rate is held at.
    """

    attempt: int | None = None
    step: int | None = None
    from_step: int | None = None
    ack_step: int | None = None
    seen_attempt: int | None = None
    exit_code: int | None = None
    refused: bool = False
    inconsistent: bool = False
    unfenceable: str | bool = ""
    no_space: bool = False
    job_ended: bool = False
    standstill: str = ""
    loss: float | None = None
    was: Sequence[tuple[int, float]] = ()
    why: str = "no answer"
    rate_limit: float | None = None

    def loss_before(self, before_step: int) -> float:
        """Return the loss of the probe batch at savepoints from before a step, 0.0 without any.

        The lower one of the newest two: the newest may be from between a damage and its first sign.
        """
        return min([loss for step, loss in self.was if step < before_step][-2:], default=0.0)

    def first_bad_step(self, within: float, before_step: int) -> int | None:
        """Return the first of the newest savepoints before a step whose loss was too high already.

        That is: beyond `within` times the lowest one before it, as at all savepoints since.
        """
        losses = [(step, loss) for step, loss in self.was if step < before_step]
        bad_step = None
        for index in range(len(losses) - 1, 0, -1):
            step, loss = losses[index]
            if loss <= within * min(earlier for _, earlier in losses[:index]):
                break
            bad_step = step
        return bad_step

    def loss_growth_factor(self, before_step: int) -> float:
        """Return how many times that the loss is now; infinite where it is NaN, or not known."""
        was = self.loss_before(before_step)
        ratio = math.nan if self.loss is None or was <= 0.0 else self.loss / was
        return math.inf if math.isnan(ratio) else ratio
