"""Faults of the optimizer: its learning rate, its schedule and its moments."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Any, ClassVar, Dict, List, Mapping, Optional, Tuple

from . import CannotActError, Fault, Params, Value


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


FIRST, SECOND = "exp_avg", "exp_avg_sq"
HOW = ("variance", "zero", "restart")


class Moments(Fault):
    """Acts once. `variance` shrinks the second moments, `zero` empties both and keeps the step
    count, `restart` sets that to zero as well."""

    MEANING = "damage the moments of Adam-like optimizers, once"
    MOVES = "update_norm"
    PARAMS: ClassVar[Params] = {
        "how": ("variance", "variance, zero or restart"),
        "factor": (1e-4, "the second moments are multiplied by this"),
    }

    _done = False

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        if params["how"] not in HOW:
            raise ValueError(f"moments: how={params['how']!r} must be one of {', '.join(HOW)}")

    def before_step(self, optimizers: List[Any]) -> None:
        if self._done:
            return
        states = [state for o in optimizers for state in o.state.values() if SECOND in state]
        if not states:
            raise CannotActError(
                "no optimizer keeps second moments: Adam and its kin do, SGD does not"
            )
        with self.torch.no_grad():
            for state in states:
                self._damage(state)
        self._done = True

    def _damage(self, state: Any) -> None:
        manner = self.params["how"]
        if manner == "variance":
            state[SECOND].mul_(float(self.params["factor"]))
            return
        state[FIRST].zero_()
        state[SECOND].zero_()
        if manner == "restart" and isinstance(state.get("step"), self.torch.Tensor):
            state["step"].zero_()


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
        passed = bisect_left(steps, step)  # what comes behind was rolled back
        del steps[passed:], rates[passed:]
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
