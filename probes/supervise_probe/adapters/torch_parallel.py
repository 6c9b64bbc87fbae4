"""torch's first FSDP, which clips by a method of its own, and its pipeline schedules.

FSDP: no function of torch.nn.utils sees its clip; as for every sharded clip, what is reported is
the norm of this rank's shard before it. Pipelines: the loss of each micro-batch goes into backward
undivided, and the gradients are divided by their number afterwards, so the mean is reported.

Source: `clip_grad_norm_` in torch/distributed/fsdp/fully_sharded_data_parallel.py, which without
shards calls that of torch.nn.utils; `_PipelineStageBase.scale_grads` in
torch/distributed/pipelining/stage.py, which schedules call with 1 where the losses are sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .wrap import beside

if TYPE_CHECKING:
    from .wrap import Hold


def listen_fsdp(hold: Hold, library: Any) -> None:
    """Stand beside `clip_grad_norm_`.

    Raises:
        AttributeError: this version has no such thing; nothing was replaced.
    """
    wrapper = library.FullyShardedDataParallel

    def observe(self: Any, *_: Any, **__: Any) -> None:
        if not any(handle.uses_sharded_strategy for handle in self._all_handles):
            return
        params = list(self.parameters())
        hold.listeners.step.before_clip(params)
        hold.listeners.step.clipped(params, None, None, joint=True)

    wrapper.clip_grad_norm_ = beside(hold, wrapper.clip_grad_norm_, observe, "gradient")


def listen_pipeline(hold: Hold, library: Any) -> None:
    """Stand beside `scale_grads`; a version without it divides nothing.

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
