"""A schedule that begins again, as after a resume that lost the state of the scheduler.

The rates that the job has set since the probe is there are kept, and set once more from the first
one on: warm-up, peak and what follows. What the job sets meanwhile goes on, and counts again
afterwards; its scheduler is not touched. With a torch scheduler the probe sees a rate that is not
the scheduler's, which after a real resume it would be.

Of a run that was itself resumed the beginning is not known: its first rate is that of the resume.
All groups of an optimizer get the factor of its first one; where that is at 0, nothing is set.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Any, ClassVar, Dict, Mapping, Optional, Tuple

from . import CannotActError, Fault, Params, Value

SAME = 1e-9  # relative difference that is none


class ScheduleRestart(Fault):
    """Sets each rate to what it was as many steps behind the first one."""

    MEANING = "begin the schedule of the learning rate again"
    MOVES = "learning_rate"
    FOLLOWS = True
    PARAMS: ClassVar[Params] = {"steps": (0, "for so many steps; 0: for the rest of the run")}

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        self._trails: Dict[int, Tuple[array[int], array[float]]] = {}  # by optimizer, at changes
        self._began: Optional[int] = None

    def follow(self, optimizer: Any, step: int) -> None:
        rate = next((g["lr"] for g in optimizer.param_groups if g.get("lr") is not None), 0.0)
        rate = float(rate)
        steps, rates = self._trails.setdefault(id(optimizer), (array("q"), array("d")))
        kept = bisect_left(steps, step)  # what comes behind was rolled back
        del steps[kept:], rates[kept:]
        if not rates or rates[-1] != rate:
            steps.append(step)
            rates.append(rate)

    def schedule_factor(self, optimizer: Any, step: int) -> float:
        steps, rates = self._trails[id(optimizer)]
        if self._began is None:
            if max(rates) - min(rates) <= SAME * max(rates):
                raise CannotActError("the learning rate has been the same since the run began")
            self._began = step
        now = rates[-1]
        again = rates[bisect_right(steps, steps[0] + step - self._began) - 1]
        return again / now if now else 1.0
