"""The nouns of a step, which collectors are shown.

Plain records; whoever fills them is in boundary.py.
"""

from __future__ import annotations

import weakref
from itertools import chain
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Optional

if TYPE_CHECKING:
    from .scalars import Number

_MEMBERS = itemgetter("params")


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

    __slots__ = ("clipped_as", "first_group", "ids", "params", "real", "reference")

    def __init__(self, optimizer: Any) -> None:
        self.reference = weakref.ref(optimizer)
        self.first_group = 0
        self.params: List[Any] = []
        self.ids: FrozenSet[int] = frozenset()
        self.clipped_as: List[Any] = []
        self.real = False
        self.refresh(optimizer)

    def refresh(self, optimizer: Any) -> bool:
        """Read the parameters again if they are others now, or in another order; whether they are.

        A job may put another one into the list of a group, so every one is looked at, by C alone.
        """
        params = list(chain.from_iterable(map(_MEMBERS, optimizer.param_groups)))
        if len(params) == len(self.params) and all(map(is_, params, self.params)):
            return False
        self.params = self.clipped_as = params
        self.ids = frozenset(map(id, params))
        first = params[0] if params else None
        self.real = not (first is None or first.is_meta or hasattr(first, "fake_mode"))
        return True


def in_order(known: Dict[int, Known]) -> Dict[int, Known]:
    """Return those whose optimizers live, their groups counted through."""
    living, groups = {}, 0
    for key, each in known.items():
        optimizer = each.reference()
        if optimizer is not None:
            living[key], each.first_group = each, groups
            groups += len(optimizer.param_groups)
    return living


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


def rate_of(torch: Any, optimizer: Any) -> Any:
    """Return the rate of its first group as it is now, None where it has none."""
    rate = optimizer.param_groups[0].get("lr")
    if type(rate) is not float and isinstance(rate, torch.Tensor):
        return rate.clone()
    return rate


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
