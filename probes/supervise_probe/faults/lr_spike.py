"""Too high a learning rate for some steps, as from a wrong schedule; the schedule is untouched."""

from __future__ import annotations

from typing import ClassVar

from . import Fault, Params


class LrSpike(Fault):
    """Multiplies the rate that the optimizer uses."""

    MEANING = "multiply the learning rate for some steps"
    MOVES = "update_norm"
    PARAMS: ClassVar[Params] = {
        "factor": (30.0, "the learning rate is multiplied by this"),
        "steps": (20, "for so many steps"),
    }

    def lr_factor(self) -> float:
        return float(self.params["factor"])
