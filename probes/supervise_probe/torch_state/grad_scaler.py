"""Effect of the job's GradScaler on the numbers that the probe reads.

Under a scaler the tensor that goes into backward is the loss times the scale, and gradients stay
scaled until `unscale_`. Here is remembered which tensor was which loss, and which optimizers'
gradients are unscaled already; nothing of it outlives a step.

Source: torch/amp/grad_scaler.py; a job may clip before `unscale_`, and then clips scaled gradients.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, FrozenSet, Tuple

from ..runtime.scalars import Number, Scalars

NOBODY: FrozenSet[int] = frozenset()


class GradScalerState:
    """The scaler's part in the step that is under way.

    Attributes:
        scaler: the GradScaler whose `step()` is running, else None.
        appeared: called when a GradScaler is used; more than once, it may be.
        unscaled: ids of the optimizers whose gradients are unscaled in this step.
    """

    def __init__(self, scalars: Scalars) -> None:
        self.scaler: Any = None
        self.appeared: Callable[[], None] = lambda: None
        self._scalars = scalars
        self._losses: Dict[int, Tuple[weakref.ref[Any], Any]] = {}
        self._scale: Any = None  # set while scaled losses wait for their backward
        self.unscaled: FrozenSet[int] = NOBODY

    def enter(self, scaler: Any) -> None:
        """`scaler.step()` is about to run."""
        self.scaler = scaler
        self.appeared()

    def saw_scale(self, scaler: Any, outputs: Any, result: Any) -> None:
        """`scaler.scale(outputs)` returned `result`."""
        if result is outputs:
            return
        self._scale = scaler._scale
        try:
            self._losses[id(result)] = (weakref.ref(result), outputs.detach())
        except (AttributeError, TypeError):  # a list of losses
            pass

    def loss(self, tensor: Any) -> Number:
        """Return the unscaled value of the one-element `tensor` that goes into backward."""
        loss = self._losses.pop(id(tensor), None)
        scale, self._scale = self._scale, None
        if loss is not None and loss[0]() is tensor:
            return self._scalars.value(loss[1])
        value = self._scalars.value(tensor)
        # Scaled, then divided by the accumulation steps, or several scaled losses added up.
        return value if scale is None else value / self._scalars.value(scale)

    def saw_unscale(self, optimizer: Any) -> None:
        """`scaler.unscale_(optimizer)` was called."""
        self.unscaled = self.unscaled | {id(optimizer)}

    def scale(self) -> Number:
        """Return the loss scale of the running scaler, 1.0 without one."""
        scale = None if self.scaler is None else self.scaler._scale
        return 1.0 if scale is None else self._scalars.value(scale)

    def forget(self) -> None:
        """The gradients that were unscaled were thrown away."""
        self.unscaled = NOBODY

    def step_ended(self) -> None:
        """Forget the losses and optimizers of the step."""
        self._losses.clear()
        self.unscaled = NOBODY
        self._scale = None
