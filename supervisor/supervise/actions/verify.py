"""Verify: judge a runbook by its effect, not by its intention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action
from ..core.model.values import Steps


@dataclass(frozen=True)
class Verify(Action):
    """Within `within` steps the trouble must have been gone for `clear_for` steps in a row.

    Gone means: every action showed its effect in the next frame (the rate really lower, the step
    really back), no rule of the incident is in breach or cannot be judged, and the loss is back
    under the band it had before the first breach. After a rollback or a relaunch the step of the
    first breach must have been passed too, and the median of these losses be in the band; quiet
    steps up to there are not counted in `within`. The engine watches it. When it does not come
    true, the runbook has failed and the ladder climbs. Every runbook that touches the job ends so.

    Example:
        - verify: {within: 100, clear_for: 20}

    Undo: none needed; it touches nothing.
    Source: an incident that resolved is one whose signal stayed away for a while, as Prometheus'
        keep_firing_for learnt; 20 steps outlast the single good step inside a divergence.
    """

    touches_job: ClassVar[bool] = False
    engine_step: ClassVar[bool] = True

    within: Steps = 100
    clear_for: Steps = 20

    def check(self) -> list[tuple[str, str]]:
        if self.clear_for < 1:
            return [("clear_for", f"must be at least 1 step, not {self.clear_for}")]
        if self.within < self.clear_for:
            text = f"must be at least clear_for ({self.clear_for} steps), not {self.within}"
            return [("within", text)]
        return []
