"""torch's pipeline schedules: they put the loss of each micro-batch into backward undivided.

When all of them have been, the gradients are divided by their number. The loss that the divided
gradients belong to is the mean, and so it is reported.

Source: `_PipelineStageBase.scale_grads` in torch/distributed/pipelining/stage.py, which schedules
call with 1 where the losses are sums. A version without it divides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .wrap import beside

if TYPE_CHECKING:
    from .wrap import Hold


def listen(hold: Hold, library: Any) -> None:
    """Stand beside `scale_grads`, where there is one.

    Raises:
        AttributeError: this version has no such stage; nothing was replaced.
    """
    stage = library._PipelineStageBase
    if not hasattr(stage, "scale_grads"):
        return

    def observe(self: Any, grad_scale_factor: int) -> None:
        if self.is_last:  # the others have no loss
            hold.listeners.step.averaged(grad_scale_factor)

    stage.scale_grads = beside(hold, stage.scale_grads, observe, "loss")
