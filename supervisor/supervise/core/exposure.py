"""What is counted of one shard, and the level that the loss of its steps is compared with."""

from __future__ import annotations

from dataclasses import dataclass

SMOOTH, CLIP = 32, 8.0  # steps of the level; most that one step counts, in mean deviations


@dataclass(slots=True)
class Exposure:
    """How often one shard was there.

    Attributes:
        windows: in how many windows of the run it is; at most 6 for each step, fewer when its
            steps follow each other.
        attempt, step: its newest one.
        steps, high: steps without a trouble whose loss was finite, and the sum of how far their
            losses were above the level before them.
    """

    windows: int = 0
    attempt: int = -1
    step: int = 0
    steps: int = 0
    high: float = 0.0


@dataclass(slots=True)
class Level:
    """Where the loss of a rank lies, and how far it usually strays, as moving means."""

    mean: float = 0.0
    stray: float = 0.0
    steps: int = 0

    def residual(self, loss: float) -> float | None:
        """Return how far `loss` is above the level, clipped; None for the first 32 of them.

        The level follows what was clipped: one spike must not lift it for those that come after.
        """
        self.steps += 1
        far = loss - self.mean
        if self.steps > SMOOTH:
            most = CLIP * self.stray
            far = max(-most, min(most, far))
        share = 1.0 / min(self.steps, SMOOTH)
        self.mean += far * share
        self.stray += (abs(far) - self.stray) * (share if self.steps > 1 else 0.0)
        return far if self.steps > SMOOTH else None
