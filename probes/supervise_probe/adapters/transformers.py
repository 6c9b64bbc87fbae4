"""Hugging Face `Trainer`: heard at the events that it sends to its callbacks, and at its saves.

No callback is added: a job may look at the list of them.

Source: CallbackHandler.call_event in transformers/trainer_callback.py, `_save_checkpoint` and
`_get_output_dir` in transformers/trainer.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Mapping, Tuple

from . import around_save, beside

if TYPE_CHECKING:
    from ..probe import Probe

PREFIX, SUFFIX = "eval_", "_loss"


def listen(probe: Probe, library: Any) -> None:
    """Stand beside `CallbackHandler.call_event` and around `Trainer._save_checkpoint`.

    Raises:
        AttributeError: this version has no such thing; nothing was replaced.
    """
    handler, trainer = library.CallbackHandler, library.Trainer
    call, save = handler.call_event, trainer._save_checkpoint

    def heard(self: Any, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        library = probe.collectors["library"]
        if event == "on_step_begin":
            library.epoch(float(state.epoch or 0.0))
        elif event == "on_train_begin":
            library.length(state.max_steps, state.global_step)
        elif event == "on_evaluate":
            for name, value in _losses(kwargs.get("metrics") or {}):
                library.tell(name, value)

    def what(self: Any, *args: Any, **kwargs: Any) -> Tuple[str, int]:
        step = self.state.global_step
        if not self.state.is_world_process_zero:
            return "", step
        trial = kwargs.get("trial", args[1] if len(args) > 1 else None)
        return os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{step}"), step

    handler.call_event = beside(probe, call, heard)
    trainer._save_checkpoint = around_save(probe, save, what)


def _losses(metrics: Mapping[str, Any]) -> Any:
    """Yield (id, value): `eval_loss` is our `val_loss`, `eval_code_loss` a slice of it."""
    for key, value in metrics.items():
        if key == PREFIX + "loss":
            yield "val_loss", value
        elif key.startswith(PREFIX) and key.endswith(SUFFIX):
            yield "slice_val_loss." + key[len(PREFIX) : -len(SUFFIX)], value
