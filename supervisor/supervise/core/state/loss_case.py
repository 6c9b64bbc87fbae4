"""What is known of the loss around an incident, for `incidents/diagnosis` to tell its class.

What was before the onset is also what `runbooks/verification` asks a recovery to come back to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..analysis.context_event import ContextEvent
from ..analysis.loss_band import Band
from ..analysis.spike_classifier import Verdict


@dataclass(slots=True)
class Excursion:
    """How the frames since the onset looked.

    Attributes:
        peak: the largest loss. outliers: frames whose loss was far out of the band.
        nonfinite: first step whose loss, gradient or update was not finite. skipped: first and last
            one of those that were skipped, and so kept from the weights.
    """

    peak: float | None = None
    outliers: int = 0
    nonfinite: int | None = None
    skipped: tuple[int, ...] = ()


@dataclass(slots=True)
class LossCase:
    """The question how the loss is, and its answer.

    Attributes:
        rank: whose frames are asked; `attempt` of its newest one, `last_step` its step.
        first_step: first step that counts as after the onset: of the new attempt after a rollback.
        since_frame: frame count from which the loss has time to come back; `opened_at_frame` never
            changes.
        band: that the loss was in before the onset. norms: metric -> median before it.
        context: what else happened around the onset.
        rolled_back: it was taken back since. exhausted: it came back after the last level.
        verdict: the class that it was given while it is open.
    """

    rank: int = 0
    attempt: int = 0
    last_step: int = -1
    first_step: int = 0
    since_frame: int = 0
    opened_at_frame: int = 0
    band: Band | None = None
    norms: dict[str, float] = field(default_factory=dict)
    context: list[ContextEvent] = field(default_factory=list)
    excursion: Excursion = field(default_factory=Excursion)
    rolled_back: bool = False
    exhausted: bool = False
    verdict: Verdict | None = None
