"""The nouns of a step, which collectors are shown.

Plain records; whoever fills them is in boundary.py.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, FrozenSet, List, Optional, Tuple

if TYPE_CHECKING:
    from .scalars import Number


class SkipUpdate(BaseException):
    """Leaves `optimizer.step(closure)` from inside the closure, before the update."""


class Known:
    """What stays the same of an optimizer from step to step.

    Attributes:
        params: all its parameters. ids: their ids.
        real: false where they hold no values, or where there are none.
        clipped_as: a list of parameters that is known to hold all of these.
        first_group: flat number of its first parameter group.
    """

    __slots__ = ("_shape", "clipped_as", "first_group", "ids", "params", "real", "reference")

    def __init__(self, optimizer: Any) -> None:
        self.reference = weakref.ref(optimizer)
        self.first_group = 0
        self._shape: Optional[List[Tuple[int, int]]] = None
        self.params: List[Any] = []
        self.ids: FrozenSet[int] = frozenset()
        self.clipped_as: List[Any] = []
        self.real = False

    def refresh(self, optimizer: Any) -> None:
        """Read the parameters again if groups or their lengths changed."""
        shape = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        if shape != self._shape:
            self._shape = shape
            self.params = [p for group in optimizer.param_groups for p in group["params"]]
            self.ids = frozenset(map(id, self.params))
            self.clipped_as = self.params
            first = self.params[0] if self.params else None
            self.real = not (first is None or first.is_meta or hasattr(first, "fake_mode"))


class Update:
    """One optimizer's part of a step.

    Attributes:
        known: what stays the same of the optimizer.
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
        "closure", "found_inf", "gradient_norm", "known", "measured", "optimizer", "result",
        "scale", "scaler", "scheduled", "skip",
    )  # fmt: skip

    def __init__(self, optimizer: Any, closure: bool, known: Known) -> None:
        self.optimizer = optimizer
        self.closure = closure
        self.known = known
        self.scaler: Any = None
        self.scale: Number = 1.0
        self.found_inf: Optional[Number] = None
        self.scheduled: Any = None
        self.gradient_norm: Optional[Number] = None
        self.skip = ""
        self.measured = False
        self.result: Any = None

    @property
    def all_params(self) -> List[Any]:
        return self.known.params

    @property
    def params(self) -> List[Any]:
        return [p for p in self.known.params if p.grad is not None]


class Step:
    """A step that is over. `elapsed_ns` is None for the first of a process."""

    __slots__ = ("at_ns", "attempt", "elapsed_ns", "number")

    def __init__(self, number: int, attempt: int, at_ns: int, elapsed_ns: Optional[int]) -> None:
        self.number = number
        self.attempt = attempt
        self.at_ns = at_ns
        self.elapsed_ns = elapsed_ns


def is_phantom(torch: Any, update: Update, backward: bool) -> bool:
    """Whether the job only pretends to step: rate 0 and gradients 0, to create its state.

    Args:
        backward: whether one has run since the last step.
    """
    for group in update.optimizer.param_groups:
        rate = group.get("lr")
        if type(rate) is not float and isinstance(rate, torch.Tensor):
            if rate.device.type != "cpu":
                return False
            rate = rate.item()
        if rate != 0:
            return False
    if update.closure:
        return False
    grads = [p.grad for p in update.all_params if p.grad is not None]
    if any(g.device.type != "cpu" for g in grads):
        return not backward
    return not any(bool((g != 0).any()) for g in grads)
