"""Hugging Face `Trainer`: observed at the events of its callbacks and at its saves; its first
`train` may be given a checkpoint to go on from.

No callback is added: a job may look at the list of them. A checkpoint that was asked for is the
library's own, with its name: `control.should_save`, as a callback would ask.

Source: CallbackHandler.call_event in transformers/trainer_callback.py, `train`, `_save_checkpoint`
and `_get_output_dir` in transformers/trainer.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Mapping, Tuple

from .wrap import around_save, beside, resuming

if TYPE_CHECKING:
    from .wrap import Hold

PREFIX, SUFFIX = "eval_", "_loss"
STATE = "trainer_state.json"
RESTARTS = "ignore_data_skip is set, so the epoch starts again with its first batch"


def listen(hold: Hold, library: Any) -> None:
    """Stand beside `CallbackHandler.call_event`, around `Trainer.train` and `_save_checkpoint`.

    Raises:
        AttributeError: this version has no such thing; nothing was replaced.
    """
    handler, trainer = library.CallbackHandler, library.Trainer
    call, save = handler.call_event, trainer._save_checkpoint

    def observe(self: Any, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        library = hold.listeners.trainer
        if event == "on_step_begin":
            library.epoch(float(state.epoch or 0.0))
        elif event == "on_train_begin":
            library.trained_by("Trainer", names_saves=True)
            library.began(state.global_step, RESTARTS if args.ignore_data_skip else "")
            library.length(state.max_steps, state.global_step)
        elif event == "on_step_end":
            control.should_save |= library.take_order() is not None
        elif event == "on_train_end":
            library.ended(state.global_step, control.should_training_stop)
        elif event == "on_evaluate":
            for name, value in _losses(kwargs.get("metrics") or {}):
                library.report(name, value)

    def what(self: Any, *args: Any, **kwargs: Any) -> Tuple[str, int]:
        step = self.state.global_step
        if not self.state.is_world_process_zero:
            return "", step
        trial = kwargs.get("trial", args[1] if len(args) > 1 else None)
        return os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{step}"), step

    train = resuming(hold, trainer.train, "resume_from_checkpoint", _unfit)
    trainer.train = train
    handler.call_event = beside(hold, call, observe)
    trainer._save_checkpoint = around_save(hold, save, what)


def _unfit(path: str) -> str:
    """Why `Trainer` would not go on from there, or not with everything."""
    if not os.path.isdir(path):
        return "there is no such folder"
    names = os.listdir(path)
    if STATE not in names:
        return f"it holds no {STATE}, without which Trainer does not go on"
    if not any("optimizer" in name or name.startswith("global_step") for name in names):
        return "it holds no optimizer state, and Trainer would begin with a new one"
    return ""


def _losses(metrics: Mapping[str, Any]) -> Any:
    """Yield (id, value): `eval_loss` is our `val_loss`, `eval_code_loss` a slice of it."""
    for key, value in metrics.items():
        if key == PREFIX + "loss":
            yield "val_loss", value
        elif key.startswith(PREFIX) and key.endswith(SUFFIX):
            yield "slice_val_loss." + key[len(PREFIX) : -len(SUFFIX)], value
