"""Lightning's `Trainer`: observed at the hooks of its callbacks and at its saves, and timed in its
`training_step`; its first `fit` may be given a checkpoint to go on from.

Under both of its names, `lightning.pytorch` and `pytorch_lightning`. No callback is added, and no
property is read that computes: what was logged is taken as it lies. A checkpoint that was asked for
is written by `save_checkpoint` where `ModelCheckpoint` would: when the batch is over, and schedules
and counters stand where its own files have them.

Source: trainer/call.py; `_fit_impl`, which `fit` and each process that it spawns call, and
`save_checkpoint` in trainer/trainer.py; the end of a batch in loops/training_epoch_loop.py.
"""

from __future__ import annotations

import functools
import os
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Mapping, Tuple

from .wrap import around_save, beside, resuming

if TYPE_CHECKING:
    from .wrap import Hold

# How people call the loss of their validation, in the order in which we look.
NAMES = tuple(
    f"{prefix}{joint}loss" for joint in "_/" for prefix in ("val", "valid", "validation", "eval")
)
SLICE = "/dataloader_idx_"


def listen(hold: Hold, library: Any) -> None:
    """Stand beside `_call_callback_hooks`, around `_fit_impl`, `training_step`, `save_checkpoint`.

    Raises:
        AttributeError: this version has no such thing; nothing was replaced.
    """
    calls, trainer = library.call, library.Trainer
    hook, save = calls._call_callback_hooks, trainer.save_checkpoint
    strategy = calls._call_strategy_hook

    def observe(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> None:
        library = hold.listeners.trainer
        if hook_name == "on_train_batch_start":
            library.epoch(trainer.current_epoch + _fraction(args[1], trainer.num_training_batches))
        elif hook_name == "on_train_start":
            library.trained_by("Lightning")
            library.began(trainer.global_step, _inexact(trainer))
            library.length(*_length(trainer))
        elif hook_name == "on_train_batch_end":
            path = library.take_order()
            if path is not None:
                trainer.save_checkpoint(path or _path(trainer))
        elif hook_name == "on_train_end":
            library.ended(trainer.global_step, trainer.should_stop)
        elif hook_name == "on_validation_end" and not trainer.sanity_checking:
            for name, value in _losses(trainer._logger_connector._callback_metrics):
                library.report(name, value)

    def what(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Tuple[str, int]:
        return str(filepath) if self.is_global_zero else "", self.global_step

    def run(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        """The model is not called from outside, so its forward is the rest of `training_step`."""
        module = getattr(trainer, "lightning_module", None)
        automatic = getattr(module, "automatic_optimization", False)
        if hook_name != "training_step" or not automatic or hold.gate.off_duty():
            return strategy(trainer, hook_name, *args, **kwargs)
        began, apart = monotonic_ns(), hold.times.inside()
        try:
            return strategy(trainer, hook_name, *args, **kwargs)
        finally:
            elapsed = monotonic_ns() - began - (hold.times.inside() - apart)
            hold.times.forward += max(0, elapsed)

    fit = resuming(hold, trainer._fit_impl, "ckpt_path", _unfit)
    trainer._fit_impl = fit
    calls._call_callback_hooks = beside(hold, hook, observe)
    calls._call_strategy_hook = functools.wraps(strategy)(run)
    trainer.save_checkpoint = around_save(hold, save, what)


def _unfit(path: str) -> str:
    return "" if os.path.exists(path) else "there is no such file"


def _inexact(trainer: Any) -> str:
    """What does not go on where a checkpoint was written."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.processed
    stateful = hasattr(trainer.train_dataloader, "load_state_dict")
    if 0 < done < trainer.num_training_batches and not stateful:
        return f"{done} batches of the epoch were seen, and the loader begins again with its first"
    return "random state is not put back"


def _path(trainer: Any) -> str:
    """A name of its own, beside the job's own checkpoints."""
    keeper = trainer.checkpoint_callback
    folder = getattr(keeper, "dirpath", None) or trainer.default_root_dir
    return os.path.join(str(folder), f"supervise-{trainer.global_step}.ckpt")


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
