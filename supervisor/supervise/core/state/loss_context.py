"""What may explain an excursion of the loss; read by `incidents/diagnosis` and `data_suspicion`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..analysis.shard_attribution import ShardAttribution


@dataclass(slots=True)
class LossContext:
    """What happened in the run, how often the loss went astray, and on which data.

    Attributes:
        happened: (step, attempt, kind, text) of what may explain an excursion of the loss.
        onsets: frame counts at which the newest excursions were noticed.
        attribution: which shards troubles began in.
    """

    happened: deque[tuple[int, int, str, str]] = field(default_factory=lambda: deque(maxlen=64))
    onsets: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    attribution: ShardAttribution = field(default_factory=ShardAttribution)

    def copy(self) -> LossContext:
        """Return an independent copy."""
        return LossContext(self.happened.copy(), self.onsets.copy(), self.attribution.copy())
