"""The adapter of each module of a library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..patches import saves
from ..runtime.guard import describe
from . import lightning, torch_parallel, transformers, whole_states

if TYPE_CHECKING:
    from .wrap import Hold

ADAPTERS = {
    "transformers": transformers.listen,
    "lightning": lightning.listen,
    "pytorch_lightning": lightning.listen,
    "accelerate.accelerator": whole_states.listen_accelerate,
    "lightning.fabric.fabric": whole_states.listen_fabric,
    "lightning_fabric.fabric": whole_states.listen_fabric,
    "torch.distributed.fsdp.fully_sharded_data_parallel": torch_parallel.listen_fsdp,
    "torch.distributed.pipelining.stage": torch_parallel.listen_pipeline,
}
SAVES = ("safetensors", "torch.distributed.checkpoint.state_dict_saver")


def listen(hold: Hold, library: Any) -> None:
    """Hear what this module, which has just been imported, will do. Says so if it cannot."""
    name = library.__name__
    key = name if name in (*ADAPTERS, *SAVES) else name.partition(".")[0]
    try:
        if key in SAVES:
            saves.listen(hold.gate, hold.guard, hold.listeners, library)
        else:
            ADAPTERS[key](hold, library)
    except Exception as error:  # a version that is made differently: nothing was replaced
        hold.guard.switch_off(hold.guard.part("framework"), f"{name}: {describe(error)}")
