"""Hears the job save a checkpoint, whatever it saves it with: torch, DCP or safetensors.

Source: torch.save, torch.distributed.checkpoint.save, safetensors.torch.save_file and save_model.
"""

from __future__ import annotations

import functools
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Tuple

from ..runtime.guard import hidden_from_stacklevel

if TYPE_CHECKING:
    from ..runtime.guard import Gate, Guard, Part
    from .listeners import Listeners

PART = "saves"

What = Callable[..., Tuple[Any, Any]]


def patch_torch_save(torch: Any, gate: Gate, guard: Guard, listeners: Listeners) -> None:
    """Stand around `torch.save`. To be called once."""
    around = _around(gate, guard, listeners)
    torch.save = around(torch.save, "torch.save", lambda obj, f, *_, **__: (obj, f))


def patch_library_saves(gate: Gate, guard: Guard, listeners: Listeners, module: Any) -> None:
    """Stand around the functions of a module that saves, right after its import, if it has them."""
    guard.run(guard.part(PART), _listen, _around(gate, guard, listeners), module)


def _listen(around: Callable[..., Any], module: Any) -> None:
    if module.__name__ == "safetensors.torch":
        file, model = module.save_file, module.save_model
        module.save_file = around(file, "safetensors", _first_two)
        module.save_model = around(model, "safetensors", _first_two)
    else:
        module.save = around(module.save, "distributed checkpoint", _distributed)


def _first_two(content: Any = None, filename: Any = None, *args: Any, **kwargs: Any) -> Any:
    return kwargs.get("tensors", kwargs.get("model", content)), filename


def _distributed(
    state_dict: Any, *args: Any, checkpoint_id: Any = None, storage_writer: Any = None, **_: Any
) -> Tuple[Any, Any]:
    if checkpoint_id is None:
        checkpoint_id = getattr(storage_writer, "path", None)
    return state_dict, checkpoint_id


def _around(gate: Gate, guard: Guard, listeners: Listeners) -> Callable[..., Any]:
    def around(original: Callable[..., Any], method: str, save_target: What) -> Callable[..., Any]:
        """Return a function that saves in the phase "checkpoint", and reports a checkpoint.

        Args:
            what: given the same arguments, returns the object that is saved, and where.
        """

        def on_save(seconds: float, args: Any, kwargs: Any) -> None:
            thing, target = save_target(*args, **kwargs)
            listeners.saves.on_save(seconds, thing, target, method)

        return in_checkpoint_phase(gate, guard, listeners, original, guard.part(PART), on_save)

    return around


def in_checkpoint_phase(
    gate: Gate,
    guard: Guard,
    listeners: Listeners,
    original: Callable[..., Any],
    part: Part,
    on_save: Callable[..., None],
) -> Callable[..., Any]:
    """Return `original` in the phase "checkpoint"; a save inside another one is part of that.

    Args:
        saved: given its seconds, its arguments and its keyword arguments once it has returned;
            runs as `part`.
    """

    @functools.wraps(original)
    @hidden_from_stacklevel
    def save(*args: Any, **kwargs: Any) -> Any:
        listener = listeners.saves
        if listener.reports.saving or gate.off_duty():
            return original(*args, **kwargs)
        listener.reports.begins()
        began = monotonic_ns()
        try:
            result = original(*args, **kwargs)
            if listener.active:
                seconds = (monotonic_ns() - began) / 1e9
                guard.run(part, on_save, seconds, args, kwargs)
            return result
        finally:
            listener.reports.ends()

    return save
