"""The nouns of a step, which collectors are shown.

Plain records; whoever fills them is in boundary.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Optional

if TYPE_CHECKING:
    from .scalars import Number


class SkipUpdate(BaseException):
    """Leaves `optimizer.step(closure)` from inside the closure, before the update."""


class Update:
    """One optimizer's part of a step.

    Attributes:
        params: its parameters that have a gradient; `all_params` has the others too.
        scaler: the GradScaler that runs this step, else None; `scale` is its loss scale.
        found_inf: above 0 when a fused optimizer will mask its update, for overflow.
        scheduled: the rate of its first group before the probe scaled it.
        gradient_norm: of `params`, unscaled; None when nobody measured it.
        skip: why the update is not applied, "" when it is.
        closure: whether gradients come from a closure inside the step.
        measured: whether the gradients have been looked at.
    """

    __slots__ = (
        "all_params", "closure", "found_inf", "gradient_norm", "measured", "optimizer", "params",
        "result", "scale", "scaler", "scheduled", "skip",
    )  # fmt: skip

    def __init__(self, optimizer: Any, closure: bool) -> None:
        self.optimizer = optimizer
        self.closure = closure
        self.all_params: List[Any] = [p for g in optimizer.param_groups for p in g["params"]]
        self.params: List[Any] = []
        self.scaler: Any = None
        self.scale: Number = 1.0
        self.found_inf: Optional[Number] = None
        self.scheduled: Any = None
        self.gradient_norm: Optional[Number] = None
        self.skip = ""
        self.measured = False
        self.result: Any = None


class Step:
    """A step that is over. `elapsed_ns` is None for the first of a process."""

    __slots__ = ("at_ns", "attempt", "elapsed_ns", "number")

    def __init__(self, number: int, attempt: int, at_ns: int, elapsed_ns: Optional[int]) -> None:
        self.number = number
        self.attempt = attempt
        self.at_ns = at_ns
        self.elapsed_ns = elapsed_ns
