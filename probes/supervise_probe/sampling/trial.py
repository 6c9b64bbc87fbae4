"""Trial of one more forward pass of a model, whose traces are undone.

In the trial the model runs twice with copies of all its weights kept. Refused for good is one whose
forward changes a weight, or Python state other than tensors: what else it changes is not known.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from ..capture.type_classes import TypeClasses
from ..runtime.guard import describe, from_signal_handler
from ..torch_state.structure import leaves
from . import side_forward
from .forward_inputs import NeverError, RefusedError

if TYPE_CHECKING:
    from ..context import ProbeContext

SAME = 1e-6  # relative; as metrics.md allows among ranks
PIECE = 1 << 20  # elements that are squared at a time

_Key = Tuple[int, Tuple[bool, ...]]


class Trials:
    """The trials of one process.

    Attributes:
        kinds: what values are, remembered by their types.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context, self._torch = context, context.torch
        self.kinds = TypeClasses(context.torch)
        self._never: Dict[int, Tuple[Any, str]] = {}
        self._passed: Dict[_Key, Tuple[Any, bool]] = {}

    def check(self, root: Any) -> None:
        """Look whether `root` was refused.

        Raises:
            NeverError: it was.
        """
        known = self._never.get(id(root))
        if known is not None and known[0]() is root:
            raise NeverError(known[1])

    def never(self, root: Any, why: str) -> None:
        """Refuse `root` for good."""
        self._never[id(root)] = weakref.ref(root), why

    def passed(self, root: Any, inputs: side_forward.Inputs) -> bool:
        """Try `root` in the modes of these inputs, if that was not yet done.

        Returns:
            Whether a forward changes what the next one gives.

        Raises:
            RefusedError: it cannot be run, or not now.
        """
        self.check(root)
        key = id(root), inputs.modes
        known = self._passed.get(key)
        if known is not None and known[0]() is root:
            return known[1]
        try:
            values = self.run(root, inputs, fixed=True, trial=True, take=self._value)
        except RefusedError:
            raise
        except Exception as error:
            if from_signal_handler(error):
                raise
            why = f"one more forward of it failed: {describe(error)}"
            self.never(root, why)
            raise NeverError(why) from error
        first, second = (None if v is None else float(v) for v in values)
        drifts = first is not None and second is not None and not equal(first, second, SAME)
        self._passed[key] = weakref.ref(root), drifts
        return drifts

    def run(self, root: Any, inputs: side_forward.Inputs, **how: Any) -> List[Any]:
        """As `side.run`; what is refused for good there is remembered."""
        try:
            return side_forward.run(self._context, root, inputs, self.kinds, **how)
        except NeverError as refusal:
            self.never(root, str(refusal))
            raise

    def _value(self, output: Any) -> Optional[Any]:
        return value_of(self._torch, output) if floating(self._torch, output) else None


def floating(torch: Any, output: Any) -> List[Any]:
    """Return the floating tensors that a model's output holds."""
    several = [v for v in leaves(output) if isinstance(v, torch.Tensor)]
    return [v.detach() for v in several if v.is_floating_point() and v.numel()]


def value_of(torch: Any, output: Any) -> Any:
    """Return what a model's output comes to, as a tensor of one float64: the loss where it holds a
    floating tensor of one element, else the mean of the squares of the first floating tensor.

    Raises:
        RefusedError: it holds no floating tensor.
    """
    several = floating(torch, output)
    loss = next((v for v in several if v.numel() == 1), None)
    if loss is not None:
        return loss.double().reshape(())
    if not several:
        raise RefusedError("the model's output holds no floating tensor")
    pieces = several[0].flatten().split(PIECE)
    return sum(piece.double().square().sum() for piece in pieces) / several[0].numel()


def equal(was: float, now: float, close: float) -> bool:
    """Whether two values agree within `close`, relative; NaN agrees with NaN."""
    if was == now or (was != was and now != now):
        return True
    return math.isfinite(was) and math.isfinite(now) and abs(was - now) <= close * abs(was)
