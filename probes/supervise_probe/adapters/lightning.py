"""Lightning's `Trainer`: heard at the hooks that it calls on its callbacks, and at its saves, and
timed in its `training_step`.

Under both of its names, `lightning.pytorch` and `pytorch_lightning`. No callback is added, and no
property is read that computes: what was logged is taken as it lies.

Source: trainer/call.py and Trainer.save_checkpoint in trainer/trainer.py.
"""

from __future__ import annotations

import functools
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Mapping, Tuple

from . import around_save, beside

if TYPE_CHECKING:
    from ..probe import Probe

# How people call the loss of their validation, in the order in which we look.
NAMES = tuple(
    f"{prefix}{joint}loss" for joint in "_/" for prefix in ("val", "valid", "validation", "eval")
)
SLICE = "/dataloader_idx_"


def listen(probe: Probe, library: Any) -> None:
    """Stand beside `_call_callback_hooks`, and around `training_step` and `save_checkpoint`.

    Raises:
        AttributeError: this version has no such thing; nothing was replaced.
    """
    calls, trainer = library.call, library.Trainer
    hook, save = calls._call_callback_hooks, trainer.save_checkpoint
    strategy = calls._call_strategy_hook

    def heard(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> None:
        library = probe.collectors["library"]
        if hook_name == "on_train_batch_start":
            library.epoch(trainer.current_epoch + _fraction(args[1], trainer.num_training_batches))
        elif hook_name == "on_train_start":
            library.length(*_length(trainer))
        elif hook_name == "on_validation_end" and not trainer.sanity_checking:
            for name, value in _losses(trainer._logger_connector._callback_metrics):
                library.tell(name, value)

    def what(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Tuple[str, int]:
        return str(filepath) if self.is_global_zero else "", self.global_step

    def run(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        """The model is not called from outside, so its forward is the rest of `training_step`."""
        module = getattr(trainer, "lightning_module", None)
        automatic = getattr(module, "automatic_optimization", False)
        if hook_name != "training_step" or not automatic or probe.off_duty():
            return strategy(trainer, hook_name, *args, **kwargs)
        began, apart = monotonic_ns(), probe.times.inside()
        try:
            return strategy(trainer, hook_name, *args, **kwargs)
        finally:
            elapsed = monotonic_ns() - began - (probe.times.inside() - apart)
            probe.times.forward += max(0, elapsed)

    calls._call_callback_hooks = beside(probe, hook, heard)
    calls._call_strategy_hook = functools.wraps(strategy)(run)
    trainer.save_checkpoint = around_save(probe, save, what)


def _fraction(batch: int, batches: float) -> float:
    return batch / batches if 0 < batches < float("inf") else 0.0


def _length(trainer: Any) -> Tuple[float, int]:
    """Steps in all, and those that are done; (-1, ...) where the library cannot know.

    With manual optimisation it counts each optimizer's step, and not ours.
    """
    if trainer.train_dataloader is None or not trainer.lightning_module.automatic_optimization:
        return -1, trainer.global_step
    return trainer.estimated_stepping_batches, trainer.global_step


def _losses(logged: Mapping[str, Any]) -> Any:
    """Yield (id, value): the validation's loss, and with several loaders one slice for each."""
    for name in NAMES:
        if name in logged:
            yield "val_loss", logged[name]
            return
    for key, value in logged.items():
        name, found, index = key.partition(SLICE)
        if found and name in NAMES:
            yield "slice_val_loss." + index, value
