"""Findings about an incident that are on record: the class of a spike, a slow step, a shard.

The arithmetic behind them is in `spike_classifier`, `trends` and `shard_attribution`; a field that
was not measured is UNSET and not on record, one that has no value is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import UNSET, Struct, UnsetType

YES, NO, UNKNOWN = "yes", "no", "unknown"  # answers of a question


class BandRange(Struct, frozen=True):
    """The level of a loss before an onset, and what a single loss had to stay under."""

    level: float
    limit: float


class ContextEvent(Struct, frozen=True, omit_defaults=True):
    """Something that happened near an onset, or a fault of the job's wiring since before.

    Attributes:
        kind: data, logging, planned, rate, action, wiring, ...
        rule: which one is about the wiring. tensors: names of a few of those that it is about.
    """

    step: int
    kind: str
    text: str
    rule: str = ""
    tensors: Sequence[str] = ()


class Answer(Struct, frozen=True, kw_only=True):
    """The answer to a question about a spike: YES, NO or UNKNOWN, and a clause with the numbers."""

    answer: str
    text: str


class Rejoined(Answer, frozen=True, kw_only=True):
    """Whether the loss came back into its band.

    Attributes:
        excursion: the loss left its band, or the incident is about it.
        rejoined_step: first step of the window that was back, None while there is none.
        in_time: the answer is not final yet. is_sum: it is of as many tokens as before.
    """

    onset: int | UnsetType = UNSET
    level: float | UnsetType = UNSET
    slope: float | UnsetType = UNSET
    spread: float | UnsetType = UNSET
    samples: int | UnsetType = UNSET
    frames: int | UnsetType = UNSET
    peak: float | UnsetType | None = UNSET
    excursion: bool
    window: int | UnsetType = UNSET
    band: float | UnsetType = UNSET
    residual: float | UnsetType = UNSET
    smoothed_residual: float | UnsetType = UNSET
    rejoined_step: int | UnsetType | None = UNSET
    in_time: bool | UnsetType = UNSET
    is_sum: bool | UnsetType = UNSET

    @property
    def step(self) -> int | None:
        """The step from which the loss was back in its band, None where it was not."""
        return None if isinstance(self.rejoined_step, UnsetType) else self.rejoined_step


class EvalShifted(Answer, frozen=True, kw_only=True):
    """Whether an evaluation of the same artefact moved off its own trend."""

    metric: str | UnsetType = UNSET
    shift: float | UnsetType = UNSET
    limit: float | UnsetType = UNSET
    before: float | UnsetType = UNSET
    evaluations: tuple[int, int] | UnsetType = UNSET
    artefact: str | UnsetType = UNSET


class NormChange(Struct, frozen=True):
    """The median of a norm before and after an onset, and what it had to stay under."""

    before: float
    after: float
    limit: float


class NormsStayed(Answer, frozen=True, kw_only=True):
    """Whether the norms are as before; `high`: those that are not."""

    high: Sequence[str] | UnsetType = UNSET
    metrics: Mapping[str, NormChange] | UnsetType = UNSET


class ElseHappened(Answer, frozen=True, kw_only=True):
    """Whether anything else happened near the onset."""

    events: Sequence[ContextEvent]


class Questions(Struct, frozen=True, kw_only=True):
    """The four questions about a spike."""

    rejoined: Rejoined
    eval_shifted: EvalShifted
    norms_stayed: NormsStayed
    else_happened: ElseHappened


class SpikeClass(StrEnum):
    """The class of a spike, as records and messages spell it."""

    RECOVERABLE = "recoverable spike"
    PLATEAU = "new worse plateau"
    DATA = "data event"
    STRUCTURAL = "structural instability"
    SUSPECT = "structural instability suspected"
    ARTEFACT = "logging artefact or data order"
    EXPECTED = "expected transition"
    NUMERIC = "numeric fault"
    CONTAINED = "contained numeric fault"
    SCHEDULE = "learning rate jump"
    CUT = "batch size change"
    UNDECIDED = "undecided"
    NO_EXCURSION = "no loss excursion"


class Verdict(Struct, frozen=True, omit_defaults=True, rename={"kind": "class"}):
    """The class of a spike, and the questions behind it.

    Attributes:
        recurring: why it counts as one of a series, "" where it does not.
        skipped: first and last step whose update was skipped, and so kept from the weights.
        repaired: what was not finite is gone behind a rollback. unseen: steps without a frame.
        no_objective: the loss has not descended in this run, so that its height tells little.
    """

    kind: SpikeClass
    questions: Questions
    recurring: str = ""
    skipped: tuple[int, ...] = ()
    repaired: bool = False
    unseen: int = 0
    no_objective: bool = False

    @property
    def text(self) -> str:
        """The class and the four answers in one sentence."""
        questions = self.questions
        answers = (
            questions.rejoined,
            questions.eval_shifted,
            questions.norms_stayed,
            questions.else_happened,
        )
        return f"{self.kind}: " + "; ".join(answer.text for answer in answers)


PARTS = {  # metric -> where the time goes
    "input_time": "waiting for data",
    "forward_time": "the forward pass",
    "backward_time": "the backward pass",
    "optimizer_time": "the optimizer",
    "checkpoint_time": "writing checkpoints",
    "other_time": "reading data, or other code outside of forward, backward and optimizer",
}


class MechanismSigns(Struct, frozen=True, omit_defaults=True):
    """Which of attention, routers and step size moved around an onset, and which stayed.

    Their faults have signatures of their own: what stayed where it was is not the cause.

    Attributes:
        first: the one that moved first. step: when. metric: what of it.
        layer: the attention layer or router where that is worst, None where it is not known.
        moved: the others that moved, stayed: those that are judged and did not.
    """

    first: str
    step: int
    metric: str
    layer: int | None = None
    moved: tuple[str, ...] = ()
    stayed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One clause."""
        layer = "" if self.layer is None else f", most in layer {self.layer}"
        parts = [f"{self.first} moved first (step {self.step}{layer})"]
        if self.moved:
            parts.append(f"{' and '.join(self.moved)} moved too")
        if self.stayed:
            parts.append(f"{' and '.join(self.stayed)} stayed")
        return ", ".join(parts)


class SlowStep(Struct, frozen=True, omit_defaults=True):
    """Steps that take longer.

    Attributes:
        since: the first such step. before_s, now_s: what a step took, and takes.
        part: the metric of the part that explains most of it, "" for none; part_s: what that takes.
        where: the rank that the others wait for, and what it is slow at; "" where that is not so.
    """

    since: int
    before_s: float
    now_s: float
    part: str = ""
    part_s: float = 0.0
    where: str = ""

    @property
    def cause(self) -> str:
        """Return where the time goes, "" where that is not one part."""
        if self.where or not self.part:
            return self.where
        return f"{PARTS[self.part]} ({slow_duration(self.part_s)} of {slow_duration(self.now_s)})"

    @property
    def text(self) -> str:
        """Return it in one line."""
        return self.describe()

    def describe(self, by_step: int | None = None) -> str:
        """Return it in one line; `by_step`: the newest step of `now_s`."""
        by = "" if by_step is None else f" by step {by_step}"
        text = f"steps take {self.now_s / self.before_s:.2g} times as long since step {self.since}"
        text += f": {slow_duration(self.now_s)}{by}, {slow_duration(self.before_s)} before"
        if self.where:
            return f"{text}; {self.where}"
        return f"{text}; most of it is {self.cause}" if self.cause else text


def slow_duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{seconds * 1e3:.3g} ms"


class ShardAccount(Struct, frozen=True):
    """The numbers about one shard.

    Attributes:
        blamed: in how many of `troubles` it was seen; share: of windows that it is in; p: chance.
        loss_z: of its mean loss against that of the others, None where that is not known.
        loss_stands_out: that alone would survive the same correction.
    """

    blamed: int
    troubles: int
    share: float
    p: float
    loss_z: float | None
    loss_stands_out: bool
