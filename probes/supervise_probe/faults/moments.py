"""Optimizer moments that are finite and wrong, as after a bad resume or a silent corruption."""

from __future__ import annotations

from typing import Any, ClassVar, List, Mapping

from . import CannotActError, Fault, Params, Value

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
        how = self.params["how"]
        if how == "variance":
            state[SECOND].mul_(float(self.params["factor"]))
            return
        state[FIRST].zero_()
        state[SECOND].zero_()
        if how == "restart" and isinstance(state.get("step"), self.torch.Tensor):
            state["step"].zero_()
