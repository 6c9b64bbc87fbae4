"""Whether other data come in: token statistics that stepped, or inputs that have become one token.

A loss jumps for other data as it does for damaged weights. The statistics of what goes into the
model do not depend on the weights. They are looked at every few steps only, so that a level is
compared with all that was seen before and not with a standard deviation of a dozen values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..model import format_readings
from .loss_band import BAND_MADS, EXCLUDED, STEP_MADS, Band, median, spread

SHARE = "batch_top1_share"
TOKENS = ("batch_token_drift", "batch_token_entropy", "batch_unique_ratio", SHARE)
LEAST, BEFORE = 8, 64  # looks before the onset, at least and at most
NEWEST, AFTER = 2, 8  # the same behind it: a drift is told from what is usual, which follows it
BEYOND = 0.5  # times the whole range of before, outside of it; project default
ONE_TOKEN, SEVERAL = 0.99, 0.5  # shares of the commonest token, as `data.constant`
RECENT = 40  # losses whose course is asked for
FALLEN = 0.25  # of its excess at the onset; less may be noise. Project default


@dataclass(frozen=True, slots=True)
class InputChange:
    """What goes into the model is other than before.

    Attributes:
        text: which statistics, with their numbers before and since.
        degenerate: it was one token, of which nothing can be learned; `lasting`: it still is.
    """

    text: str
    degenerate: bool = False
    lasting: bool = False


def input_change(
    series: Mapping[str, Sequence[tuple[int, float]]], onset: int
) -> InputChange | None:
    """Return how the inputs since `onset` differ from those before, None where they do not."""
    shares = series.get(SHARE, ())
    before = [value for step, value in shares if step < onset - EXCLUDED]
    since = [value for step, value in shares if step >= onset]
    ones = sum(value >= ONE_TOKEN for value in since)
    if before and median(before) < SEVERAL and ones >= NEWEST:
        text = f"the inputs were one token in {ones} of {len(since)} looks since step {onset}"
        return InputChange(text, True, since[-1] >= ONE_TOKEN)
    texts = [text for name in TOKENS if (text := _step(name, series.get(name, ()), onset))]
    return InputChange(", ".join(texts)) if texts else None


def _step(name: str, points: Sequence[tuple[int, float]], onset: int) -> str:
    before = [value for step, value in points if step < onset - EXCLUDED][-BEFORE:]
    since = [value for step, value in points if step >= onset][:AFTER]
    if len(before) < LEAST or len(since) < NEWEST:
        return ""
    low, high, now = min(before), max(before), median(since)
    far = BEYOND * (high - low)
    if low - far <= now <= high + far:
        return ""
    return f"{format_readings.metric(name)} {now:.3g} (before {low:.3g} to {high:.3g})"


@dataclass(frozen=True, slots=True)
class LossCourse:
    """Where the losses since a step have gone, in the noise that they had before it.

    Attributes:
        first, older, newer: median of the first ones since the onset, and of the halves since.
        change: of the halves, negative where they fall; 0 where it is within the noise.
        jump: how far the newest two are above those before them; 0 where one loss may be.
        fallen: a good part of the excess at the onset is gone, with nobody's help.
    """

    first: float
    older: float
    newer: float
    change: float
    jump: float
    fallen: bool


def loss_course(
    losses: Sequence[tuple[int, float]], band: Band, onset: int, since: int
) -> LossCourse | None:
    """Return the course of the losses from step `since` on, None with fewer than 4 of them."""
    after = [loss for step, loss in losses if step >= onset]
    recent = [loss for step, loss in losses if step >= since][-RECENT:]
    half = len(recent) // 2
    if half < 2:
        return None
    first, older, newer = median(after[:3]), median(recent[:half]), median(recent[half:])
    own = spread(recent[:-2], median(recent[:-2]))  # other data may be noisier
    moved = newer - older
    noise = max(band.width(half), BAND_MADS * own / math.sqrt(half))
    jump = min(recent[-2:]) - median(recent[:-2])
    excess = first - band.forecast(onset)
    return LossCourse(
        first,
        older,
        newer,
        moved if abs(moved) > noise else 0.0,
        jump if jump > max(band.limit - band.level, STEP_MADS * own) else 0.0,
        first - newer > max(noise, FALLEN * excess),
    )
