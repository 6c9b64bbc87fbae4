"""torch's first FSDP: it clips by a method of its own, which no function of torch.nn.utils sees.

As for every sharded clip, what is reported is the norm of this rank's shard before it.

Source: `clip_grad_norm_` in torch/distributed/fsdp/fully_sharded_data_parallel.py; without shards
it calls that of torch.nn.utils.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .wrap import beside

if TYPE_CHECKING:
    from .wrap import Hold


def listen(hold: Hold, library: Any) -> None:
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
        hold.listeners.step.clipped(params, None, None)

    wrapper.clip_grad_norm_ = beside(hold, wrapper.clip_grad_norm_, observe, "gradient")
