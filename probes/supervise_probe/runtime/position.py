"""Position of this process: which rank of how many, and at which step of which attempt."""

from __future__ import annotations


class Position:
    """Written by the wiring (rank) and by the step tracker; read by nearly every part.

    Attributes:
        rank, world_size: as the process group or the launcher says.
        step: number of the one under way.
        attempt: counts launches and rollbacks of the run.
        held_ns: since the last step ended, the time in which the probe held the job: it is no part
            of a step's time.
    """

    __slots__ = ("attempt", "held_ns", "rank", "step", "world_size")

    def __init__(self, step: int, attempt: int) -> None:
        self.rank, self.world_size = 0, 1
        self.step, self.attempt = step, attempt
        self.held_ns = 0
