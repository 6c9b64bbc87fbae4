"""The phase that a run is in: early, steady or late. What a rule counts for may depend on it.

`early` lasts while the learning rate warms up (`lr_phase` below 1) and for the policy's `warmup`
frames at least, and never comes back in a training session. One that is first seen beyond that
many steps, as a log that begins at step 7000, has its start behind it: only its rate can be early.
`late` is where a decay has taken the rate to half of its highest: the second half of a linear or
cosine decay, and all of a staircase after its first large step. `steady` is the rest, and where
nothing is known of the rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.rate_cause import GOOD
from ..model.policy import EARLY, LATE, STEADY, Policy

LR_PHASE = "lr_phase"
STABLE, DECAY, REWARM = 1.0, 2.0, 3.0  # where these parts of `lr_phase` begin
LOW = 0.5  # of the highest rate; project default


@dataclass(slots=True)
class RunPhase:
    """The phase now.

    Attributes:
        name: `early`, `steady` or `late`. highest: the highest rate so far; `settled` without the
            newest 128 frames at least.
    """

    name: str = EARLY
    highest: float = 0.0
    settled: float = 0.0
    _settles: float = 0.0
    _first_step: int | None = None
    _written: Policy | None = None
    _in_force: Policy | None = None

    def follow(
        self, step: int, lr_phase: float | None, rate: float | None, *, seen: int, warmup: int
    ) -> bool:
        """Take a frame of the leading rank; return whether another phase begins.

        Args:
            seen: frames of this training session, this one included.
            warmup: the policy's, in frames.
        """
        before = self.name
        if self._first_step is None:
            self._first_step = step
        warms_up = seen < warmup and self._first_step < warmup
        if rate is not None and rate > self.highest:
            self.highest = rate
        if seen % GOOD == 0:
            self.settled, self._settles = self._settles, self.highest
        if before == EARLY and (warms_up or (lr_phase is not None and lr_phase < STABLE)):
            return False
        if lr_phase is None or rate is None:
            self.name = LATE if before == LATE else STEADY
        elif lr_phase < REWARM:  # our own ramp after a rollback is no phase of the run
            low = lr_phase >= DECAY and rate <= LOW * self.highest
            self.name = LATE if low else STEADY
        else:
            self.name = STEADY if before == EARLY else before
        return self.name != before

    def of(self, policy: Policy) -> Policy:
        """Return a policy as it is in this phase."""
        if self._written is not policy:
            self._written, self._in_force = policy, policy.in_phase(self.name)
        assert self._in_force is not None
        return self._in_force

    def moved(self, policy: Policy) -> Policy:
        """Return a policy as it is in the phase that has just begun."""
        self._written = None
        return self.of(policy)
