"""Libraries that the probe observes: those that train (Lightning, transformers, accelerate, FSDP),
and those that a job saves its checkpoints with (torch, DCP, safetensors).

Source: torch.save, torch.distributed.checkpoint.save, safetensors.torch.save_file and save_model.
"""

from __future__ import annotations

import functools
import inspect
import os
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Optional

from ..runtime.guard import describe_error, hidden_from_stacklevel

if TYPE_CHECKING:
    from ..runtime.guard import Gate, Guard, Part
    from ..torch_state.records import Times
    from .listeners import Listeners

PART = "saves"

What = Callable[..., tuple[Any, Any]]


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
) -> tuple[Any, Any]:
    if checkpoint_id is None:
        checkpoint_id = getattr(storage_writer, "path", None)
    return state_dict, checkpoint_id


def _around(gate: Gate, guard: Guard, listeners: Listeners) -> Callable[..., Any]:
    def around(original: Callable[..., Any], method: str, save_target: What) -> Callable[..., Any]:
        """Return a function that saves in the phase "checkpoint", and reports a checkpoint.

        Args:
            save_target: given the same arguments, returns the object that is saved, and where.
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
        on_save: given its seconds, its arguments and its keyword arguments once it has returned;
            runs as `part`.
    """

    @functools.wraps(original)
    @hidden_from_stacklevel
    def save(*args: Any, **kwargs: Any) -> Any:
        listener = listeners.saves
        if listener.reports.saving or gate.must_skip_hook():
            return original(*args, **kwargs)
        listener.reports.enter_checkpoint_phase()
        began = monotonic_ns()
        try:
            result = original(*args, **kwargs)
            if listener.reports_saves:
                seconds = (monotonic_ns() - began) / 1e9
                guard.run(part, on_save, seconds, args, kwargs)
            return result
        finally:
            listener.reports.leave_checkpoint_phase()

    return save


class HookContext(NamedTuple):
    """What an adapter is given; it stays the same for the life of the process."""

    gate: Gate
    guard: Guard
    times: Times
    listeners: Listeners


def observe_then_call(
    hold: HookContext,
    original: Callable[..., Any],
    observe: Callable[..., None],
    name: str = "framework",
) -> Callable[..., Any]:
    """Return a function that calls `observe` with the same arguments, and then `original`.

    Args:
        name: of the part of the probe whose numbers are wrong if `observe` fails.
    """
    gate, guard, part = hold.gate, hold.guard, hold.guard.part(name)

    def hear(args: Any, kwargs: Any) -> None:
        observe(*args, **kwargs)

    @functools.wraps(original)
    @hidden_from_stacklevel
    def call(*args: Any, **kwargs: Any) -> Any:
        if not gate.must_skip_hook():
            guard.run(part, hear, args, kwargs)
        return original(*args, **kwargs)

    return call


def wrap_save(
    hold: HookContext,
    original: Callable[..., Any],
    save_target: Callable[..., tuple[str, Optional[int]]],
) -> Callable[..., Any]:
    """Return a function that saves a checkpoint in the phase of that name, and reports it.

    Args:
        save_target: given the same arguments once it is saved, returns its path, "" where another
            rank reports it, and the library's count of steps if it has one.
    """

    def on_save(seconds: float, args: Any, kwargs: Any) -> None:
        hold.listeners.saves.report_library_save(
            seconds, functools.partial(save_target, *args, **kwargs)
        )

    part = hold.guard.part("framework")
    return in_checkpoint_phase(hold.gate, hold.guard, hold.listeners, original, part, on_save)


def wrap_resume_argument(
    hold: HookContext, original: Callable[..., Any], parameter: str, unfit: Callable[[str], str]
) -> Callable[..., Any]:
    """Return `original`, a call that trains, which is given the checkpoint to go on from.

    Raises:
        AttributeError: it takes no such parameter; nothing was replaced.
    """
    signature = inspect.signature(original)
    if parameter not in signature.parameters:
        raise AttributeError(f"{original.__qualname__} takes no {parameter}")
    guard, part = hold.guard, hold.guard.part("framework")

    @functools.wraps(original)
    @hidden_from_stacklevel
    def train(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(signature.bind, *args, **kwargs)
        steered = guard.run(part, hold.listeners.trainer.steer, call, parameter, unfit)
        if steered is not None:
            args, kwargs = steered
        return original(*args, **kwargs)

    return train


# How people call the loss of their validation, in the order in which we look.
NAMES = tuple(
    f"{prefix}{joint}loss" for joint in "_/" for prefix in ("val", "valid", "validation", "eval")
)
SLICE = "/dataloader_idx_"


def patch_lightning(hold: HookContext, library: Any) -> None:
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

    def save_target(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> tuple[str, int]:
        return str(filepath) if self.is_global_zero else "", self.global_step

    def run(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        """The model is not called from outside, so its forward is the rest of `training_step`."""
        module = getattr(trainer, "lightning_module", None)
        automatic = getattr(module, "automatic_optimization", False)
        if hook_name != "training_step" or not automatic or hold.gate.must_skip_hook():
            return strategy(trainer, hook_name, *args, **kwargs)
        began, apart = monotonic_ns(), hold.times.inside()
        try:
            return strategy(trainer, hook_name, *args, **kwargs)
        finally:
            elapsed = monotonic_ns() - began - (hold.times.inside() - apart)
            hold.times.forward += max(0, elapsed)

    fit = wrap_resume_argument(hold, trainer._fit_impl, "ckpt_path", _unfit)
    trainer._fit_impl = fit
    calls._call_callback_hooks = observe_then_call(hold, hook, observe)
    calls._call_strategy_hook = functools.wraps(strategy)(run)
    trainer.save_checkpoint = wrap_save(hold, save, save_target)


def _unfit(path: str) -> str:
    return "" if os.path.exists(path) else "there is no such file"


def _inexact(trainer: Any) -> str:
    """What does not go on where a checkpoint was written."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current.processed
    stateful = hasattr(trainer.train_dataloader, "load_state_dict")
    if 0 < batches < trainer.num_training_batches and not stateful:
        return (
            f"{batches} batches of the epoch were seen, and the loader begins again with its first"
        )
    return "random state is not put back"


def _path(trainer: Any) -> str:
    """A name of its own, beside the job's own checkpoints."""
    keeper = trainer.checkpoint_callback
    folder = getattr(keeper, "dirpath", None) or trainer.default_root_dir
    return os.path.join(str(folder), f"supervise-{trainer.global_step}.ckpt")


def _fraction(batch: int, batches: float) -> float:
    return batch / batches if 0 < batches < float("inf") else 0.0


def _length(trainer: Any) -> tuple[float, int]:
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
        name, separator, index = key.partition(SLICE)
        if separator and name in NAMES:
            yield "slice_val_loss." + index, value


PREFIX, SUFFIX = "eval_", "_loss"
STATE = "trainer_state.json"
RESTARTS = "ignore_data_skip is set, so the epoch starts again with its first batch"


def patch_trainer(hold: HookContext, library: Any) -> None:
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
            for name, value in _trainer_losses(kwargs.get("metrics") or {}):
                library.report(name, value)

    def save_target(self: Any, *args: Any, **kwargs: Any) -> tuple[str, int]:
        step = self.state.global_step
        if not self.state.is_world_process_zero:
            return "", step
        trial = kwargs.get("trial", args[1] if len(args) > 1 else None)
        return os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{step}"), step

    train = wrap_resume_argument(hold, trainer.train, "resume_from_checkpoint", _unfit_trainer)
    trainer.train = train
    handler.call_event = observe_then_call(hold, call, observe)
    trainer._save_checkpoint = wrap_save(hold, save, save_target)


def _unfit_trainer(path: str) -> str:
    """Why `Trainer` would not go on from there, or not with everything."""
    if not os.path.isdir(path):
        return "there is no such folder"
    names = os.listdir(path)
    if STATE not in names:
        return f"it holds no {STATE}, without which Trainer does not go on"
    if not any("optimizer" in name or name.startswith("global_step") for name in names):
        return "it holds no optimizer state, and Trainer would begin with a new one"
    return ""


def _trainer_losses(metrics: Mapping[str, Any]) -> Any:
    """Yield (id, value): `eval_loss` is our `val_loss`, `eval_code_loss` a slice of it."""
    for key, value in metrics.items():
        if key == PREFIX + "loss":
            yield "val_loss", value
        elif key.startswith(PREFIX) and key.endswith(SUFFIX):
            yield "slice_val_loss." + key[len(PREFIX) : -len(SUFFIX)], value


def patch_fsdp_clipping(hold: HookContext, library: Any) -> None:
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

    wrapper.clip_grad_norm_ = observe_then_call(hold, wrapper.clip_grad_norm_, observe, "gradient")


def patch_pipeline_scaling(hold: HookContext, library: Any) -> None:
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

    stage.scale_grads = observe_then_call(hold, stage.scale_grads, observe, "loss")


def patch_accelerate_saves(hold: HookContext, library: Any) -> None:
    """Stand around `save_state`. Raises AttributeError: this version has no such thing."""
    accelerator = library.Accelerator

    def save_target(
        self: Any, output_dir: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[str, None]:
        settings = self.project_configuration
        if settings.automatic_checkpoint_naming:
            name = f"checkpoint_{settings.iteration - 1}"  # it has been counted on
            output_dir = os.path.join(str(settings.project_dir), "checkpoints", name)
        return str(output_dir) if self.is_main_process else "", None

    accelerator.save_state = wrap_save(hold, accelerator.save_state, save_target)


def patch_fabric_saves(hold: HookContext, library: Any) -> None:
    """Stand around `save`. Raises AttributeError: this version has no such thing."""
    fabric = library.Fabric

    def save_target(self: Any, path: Any, *args: Any, **kwargs: Any) -> tuple[str, None]:
        return str(path) if self.is_global_zero else "", None

    fabric.save = wrap_save(hold, fabric.save, save_target)


ADAPTERS = {
    "transformers": patch_trainer,
    "lightning": patch_lightning,
    "pytorch_lightning": patch_lightning,
    "accelerate.accelerator": patch_accelerate_saves,
    "lightning.fabric.fabric": patch_fabric_saves,
    "lightning_fabric.fabric": patch_fabric_saves,
    "torch.distributed.fsdp.fully_sharded_data_parallel": patch_fsdp_clipping,
    "torch.distributed.pipelining.stage": patch_pipeline_scaling,
}
SAVES = ("safetensors", "torch.distributed.checkpoint.state_dict_saver")


def patch_imported_library(hold: HookContext, library: Any) -> None:
    """Hear what this module, which has just been imported, will do. Says so if it cannot."""
    name = library.__name__
    key = name if name in (*ADAPTERS, *SAVES) else name.partition(".")[0]
    try:
        if key in SAVES:
            patch_library_saves(hold.gate, hold.guard, hold.listeners, library)
        else:
            ADAPTERS[key](hold, library)
    except Exception as error:  # a version that is made differently: nothing was replaced
        hold.guard.switch_off(hold.guard.part("framework"), f"{name}: {describe_error(error)}")
