"""Patches of torch: every function that is replaced, and with what.

Each replacement calls the original with the job's own arguments, whatever happens to the probe.
Code that torch.compile may meet is either hidden from it (`hidden`), or a plain pass-through while
it compiles, so that no graph breaks that would not break anyway, and nothing recompiles.

Nothing is ever un-patched: that would fail the guards of compiled code. The switch is
`gate.must_skip_hook()`.
"""

from __future__ import annotations

import functools
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Mapping

from ..runtime.guard import Hidden, hidden_from_stacklevel, hide_from_compiler, return_unchanged
from . import calls, libraries, waits
from .calls import patch_optimizer

if TYPE_CHECKING:
    from ..runtime.guard import Gate, Guard
    from ..torch_state.records import Times
    from .listeners import Listeners

LOSSES = ("cross_entropy", "nll_loss")
# Of a target as large as the output.
PAIRED_LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"),
)
# What may follow (input, target) in both, but for the last, which nll_loss does not have.
OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
RETAIN_GRAPH = 2  # its place in torch.autograd.backward


def install_patches(
    torch: Any, gate: Gate, guard: Guard, times: Times, listeners: Listeners
) -> None:
    """Patch torch. What this torch lacks is left out, but for the step itself.

    Raises:
        AttributeError: this torch has no place where a step can be seen.
    """
    hidden: Hidden = functools.partial(hide_from_compiler, torch)
    patch_optimizer(torch, gate, times, listeners, hidden)
    _patch_backward(torch, gate, times, listeners, hidden)
    _patch_zero_grad(torch, gate, listeners)
    _patch_scaler(torch, gate, listeners, hidden)
    _patch_clips(torch, gate, listeners)
    waits.patch_loader(torch, gate, times, listeners, hidden)
    _patch_losses(torch, gate, listeners)
    libraries.patch_torch_save(torch, gate, guard, listeners)
    calls.patch_replicas(torch)
    waits.patch_collectives(torch, gate, times, hidden)


def _patch_backward(
    torch: Any, gate: Gate, times: Times, listeners: Listeners, hidden: Hidden
) -> None:
    original = torch.autograd.backward
    plain, shy = (
        _around_backward(original, gate, times, listeners, hide_from)
        for hide_from in (return_unchanged, hidden)
    )
    torch.autograd.backward = functools.wraps(original)(
        hide_from_compiler(torch, shy, recursive=False, plain=plain)
    )


def _around_backward(
    original: Any, gate: Gate, times: Times, listeners: Listeners, hidden: Hidden
) -> Callable[..., Any]:
    """Return what stands for `torch.autograd.backward`."""

    @hidden
    def before_backward(tensors: Any, retains: Any) -> None:
        listeners.step.before_backward(tensors, retains)

    @hidden
    def after_backward() -> None:
        listeners.step.after_backward()

    @hidden_from_stacklevel
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if gate.in_backward or gate.must_bypass():
            return original(tensors, *args, **kwargs)
        if hasattr(tensors, "__next__"):  # one pass is all that an iterator gives
            tensors = tuple(tensors)
        index = RETAIN_GRAPH - 1
        before_backward(tensors, args[index] if len(args) > index else kwargs.get("retain_graph"))
        gate.in_backward = True  # a checkpointed block runs a backward inside the backward
        began = monotonic_ns()
        try:
            return original(tensors, *args, **kwargs)
        except BaseException:
            listeners.step.on_backward_error()
            raise
        finally:
            gate.in_backward = False
            times.backward += monotonic_ns() - began
            step = listeners.step
            if step.drills.active or step.inferred.on or step.wiring.residues:
                after_backward()

    return backward


def _patch_zero_grad(torch: Any, gate: Gate, listeners: Listeners) -> None:
    """See `zero_grad` of optimizers and modules: behind a backward, or before the first forward."""
    compiling = torch.compiler.is_compiling

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        @hidden_from_stacklevel
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if not compiling():
                tracker = listeners.step.tracker
                if (
                    tracker.accumulates
                    and not tracker.is_closure_repeated
                    and not gate.must_bypass()
                ):
                    listeners.step.on_zero_grad(self)
                elif not tracker.entries and not gate.must_bypass():
                    listeners.step.prepares()
            return result

        return zero_grad

    optimizer, module = torch.optim.Optimizer, torch.nn.Module
    original = optimizer.zero_grad  # no compiler looks into torch's own either
    optimizer.zero_grad = functools.wraps(original)(hide_from_compiler(torch, wrap(original)))
    module.zero_grad = wrap(module.zero_grad)


def _patch_scaler(torch: Any, gate: Gate, listeners: Listeners, hidden: Hidden) -> None:
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    scale, unscale, step = scaler.scale, scaler.unscale_, scaler.step

    @hidden
    def scaled(self: Any, outputs: Any, result: Any) -> None:
        if not gate.must_skip_hook():
            listeners.step.scaled(self, outputs, result)

    @hidden_from_stacklevel
    def scale_(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        scaled(self, outputs, result)
        return result

    @hidden_from_stacklevel
    def unscale_(self: Any, optimizer: Any) -> Any:
        result = unscale(self, optimizer)
        if not gate.must_skip_hook() and self._enabled:
            listeners.step.unscaled(optimizer)
        return result

    @hidden_from_stacklevel
    def step_(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if gate.inside or gate.must_skip_hook() or not self._enabled:
            return step(self, optimizer, *args, **kwargs)
        entries = listeners.step.before_scaler_step(self)
        try:
            result = step(self, optimizer, *args, **kwargs)
            listeners.step.after_scaler_step(optimizer, entries)
        finally:
            listeners.step.leave_scaler_step()
        listeners.step.boundary.run_due_work()
        return result

    for original, ours in ((scale, scale_), (unscale, unscale_), (step, step_)):
        name = original.__name__
        setattr(scaler, name, functools.wraps(original)(hidden(ours, recursive=False)))


def _patch_clips(torch: Any, gate: Gate, listeners: Listeners) -> None:
    module = torch.nn.utils.clip_grad
    compiling = torch.compiler.is_compiling

    def wrap(name: str, tells_norm: bool) -> None:
        original = getattr(torch.nn.utils, name, None)
        if original is None:
            return

        @functools.wraps(original)
        @hidden_from_stacklevel
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling() or gate.must_bypass():
                return original(parameters, *args, **kwargs)
            if isinstance(parameters, torch.Tensor):
                params = [parameters]
            else:
                params = list(parameters)
                if params:  # torch warns of an empty generator
                    parameters = params
            norm_type = args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0)
            drills = listeners.step.drills
            if drills.active and not drills.allows_clip():
                return _total_norm(torch, params, float(norm_type)) if tells_norm else None
            listeners.step.before_clip(params)
            limit = args[0] if args else kwargs.get("max_norm")
            sharded = bool(params) and hasattr(params[0], "_local_tensor")
            if tells_norm and not sharded and float(norm_type) == 2.0:
                norm = original(parameters, *args, **kwargs)
                listeners.step.clipped(params, norm, limit)
                return norm
            by_value = name == "clip_grad_value_"
            if by_value and not args:
                limit = kwargs.get("clip_value")
            joint = sharded and tells_norm
            limit = None if tells_norm else limit
            listeners.step.clipped(params, None, limit, joint=joint, by_value=by_value)
            return original(parameters, *args, **kwargs)

        for home in (module, torch.nn.utils):
            if getattr(home, name, None) is original:
                setattr(home, name, clip)

    wrap("clip_grad_norm_", tells_norm=True)
    wrap("clip_grad_value_", tells_norm=False)
    wrap("clip_grads_with_norm_", tells_norm=False)


def _total_norm(torch: Any, params: list[Any], kind: float) -> Any:
    """Return what `clip_grad_norm_` would; as `get_total_norm` of torch 2.6, no gradient: 0."""
    norms = [torch.linalg.vector_norm(p.grad.detach(), kind) for p in params if p.grad is not None]
    if not norms:
        return torch.tensor(0.0)
    norms = [norm.to(norms[0].device) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms), kind)


def _patch_losses(torch: Any, gate: Gate, listeners: Listeners) -> None:
    functional = torch.nn.functional

    def wrap(name: str) -> None:
        original = getattr(functional, name)

        @functools.wraps(original)
        @hidden_from_stacklevel
        def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(input, target, *args, **kwargs)
            losses = listeners.forward
            if (
                type(input) is torch.Tensor
                and type(target) is torch.Tensor
                and (result.requires_grad or losses.evaluation.waiting or losses.onlooker)
                and not gate.must_skip_hook()
            ):
                options = dict(zip(OPTIONS, args), **kwargs)
                ignored = options.get("ignore_index", -100)
                reduction = options.get("reduction", "mean") if _is_plain(options) else ""
                if result.requires_grad:
                    # The graph of what a checkpoint computes again is soon gone: it proves nothing.
                    whose = None if gate.in_backward else result
                    losses.on_class_loss(input, target, ignored, whose, reduction, result)
                elif losses.onlooker is not None:
                    losses.onlooker(input)
                elif not torch.is_grad_enabled():
                    losses.evaluation.add_loss(target, ignored, reduction, result)
            return result

        replace(name, original, loss)

    def wrap_paired(name: str) -> None:
        original = getattr(functional, name)

        @functools.wraps(original)
        @hidden_from_stacklevel
        def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(input, target, *args, **kwargs)
            losses = listeners.forward
            if (
                losses.wants_pair
                and type(input) is type(target) is type(result) is torch.Tensor
                and result.requires_grad
                and not gate.must_skip_hook()
            ):
                losses.keep_loss_pair(input, target, result, original, args, kwargs)
            return result

        replace(name, original, loss)

    def replace(name: str, original: Any, loss: Any) -> None:
        # torch's own marks of a function that stands for another one: TorchScript and
        # torch.compile then take the original and never look into ours.
        vars(loss)["__script_if_tracing_wrapper"] = True
        vars(loss)["__original_fn"] = original
        setattr(functional, name, loss)

    for name in LOSSES:
        wrap(name)
    for name in PAIRED_LOSSES:
        wrap_paired(name)


def _is_plain(options: Mapping[str, Any]) -> bool:
    """Whether a loss with these options is made of the targets' own, each counted alike."""
    if options.get("weight") is not None or options.get("label_smoothing"):
        return False
    return options.get("size_average") is None and options.get("reduce") is None
