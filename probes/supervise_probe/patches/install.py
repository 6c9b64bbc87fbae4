"""Where the probe touches torch: every function that is replaced, and with what.

Each replacement calls the original with the job's own arguments, whatever happens to the probe.
Code that torch.compile may meet is either hidden from it (`hidden`), or a plain pass-through while
it compiles, so that no graph breaks that would not break anyway, and nothing recompiles.

Nothing is ever un-patched: that would fail the guards of compiled code. The switch is
`probe.off_duty()`.
"""

from __future__ import annotations

import functools
import types
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Tuple

from ..checkpoints import save_hooks
from ..runtime.compiler_exclusion import Hidden, as_it_is
from ..runtime.compiler_exclusion import hidden as hide
from ..runtime.warning_stacklevel import uncounted
from ..stepping import discarded_gradients
from ..stepping.optimizer_patch import patch_optimizer
from ..torch_state import forward_patch
from . import collectives, dataloader

if TYPE_CHECKING:
    from ..probe import Probe

LOSSES = ("cross_entropy", "nll_loss")
IGNORE_INDEX = 2  # its place behind (input, target) in both
RETAIN_GRAPH = 2  # its place in torch.autograd.backward


def install(torch: Any, probe: Probe) -> None:
    """Patch torch. What this torch lacks is left out, but for the step itself.

    Raises:
        AttributeError: this torch has no place where a step can be seen.
    """
    hidden: Hidden = functools.partial(hide, torch)
    patch_optimizer(torch, probe, hidden)
    _patch_backward(torch, probe, hidden)
    discarded_gradients.patch_zero_grad(torch, probe)
    _patch_scaler(torch, probe)
    _patch_clips(torch, probe)
    dataloader.patch_loader(torch, probe, hidden)
    _patch_losses(torch, probe)
    save_hooks.install(torch, probe)
    forward_patch.patch_replicas(torch)
    collectives.install(torch, probe, hidden)


def _patch_backward(torch: Any, probe: Probe, hidden: Hidden) -> None:
    original = torch.autograd.backward
    plain, shy = (_around_backward(original, probe, how) for how in (as_it_is, hidden))
    torch.autograd.backward = functools.wraps(original)(
        hide(torch, shy, recursive=False, plain=plain)
    )


def _around_backward(original: Any, probe: Probe, hidden: Hidden) -> Callable[..., Any]:
    """Return what stands for `torch.autograd.backward`."""

    @hidden
    def before(tensors: Any, retains: Any) -> None:
        handmade = probe.boundary.handmade
        if handmade.pending:
            handmade.sign(backward=True)
        probe.guard.run(probe.core, _saw_backward, probe, tensors, retains)
        if handmade.on:
            probe.guard.run(probe.core, handmade.before_backward, tensors)

    @hidden
    def after() -> None:
        probe.guard.run(probe.core, probe.drills.after_backward)
        probe.guard.run(probe.core, probe.boundary.handmade.after_backward)

    @uncounted
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if probe.in_backward or probe.absent():
            return original(tensors, *args, **kwargs)
        if isinstance(tensors, types.GeneratorType):
            tensors = tuple(tensors)
        place = RETAIN_GRAPH - 1
        before(tensors, args[place] if len(args) > place else kwargs.get("retain_graph"))
        probe.in_backward = True  # a checkpointed block runs a backward inside the backward
        began = monotonic_ns()
        try:
            return original(tensors, *args, **kwargs)
        except BaseException:
            probe.boundary.discards.failed = True
            raise
        finally:
            probe.in_backward = False
            probe.times.backward += monotonic_ns() - began
            if probe.drills.active or probe.boundary.handmade.on:
                after()

    return backward


def _saw_backward(probe: Probe, tensors: Any, retains: Any) -> None:
    torch = probe.torch
    loss: Any = None
    if type(tensors) is torch.Tensor:  # by far the most common; the rest costs 20 us
        if tensors.is_meta or not probe.open():
            return
        if tensors.numel() == 1:
            loss = probe.scaling.loss(tensors)
    else:
        several = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        roots = [t for t in several if isinstance(t, torch.Tensor)]
        if any(t.is_meta for t in roots) or not probe.open():
            return
        for tensor in roots:
            tensor = getattr(tensor, "_local_tensor", tensor)
            if tensor.numel() == 1 and not hasattr(tensor, "fake_mode"):
                value = probe.scaling.loss(tensor)
                loss = value if loss is None else loss + value
    if probe.boundary.accumulates or probe.phase != "step":  # else the end of a step was a sign
        probe.beat("step")
    probe.boundary.saw_backward(loss, bool(retains))
    probe.batches.before_backward()


def _patch_scaler(torch: Any, probe: Probe) -> None:
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    scale, unscale, step = scaler.scale, scaler.unscale_, scaler.step

    @functools.wraps(scale)
    @uncounted
    def scale_(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        if not probe.off_duty():
            probe.guard.run(probe.core, probe.scaling.saw_scale, self, outputs, result)
        return result

    @functools.wraps(unscale)
    @uncounted
    def unscale_(self: Any, optimizer: Any) -> Any:
        result = unscale(self, optimizer)
        if not probe.off_duty() and self._enabled:
            probe.guard.run(probe.core, probe.scaling.saw_unscale, optimizer)
        return result

    @functools.wraps(step)
    @uncounted
    def step_(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if probe.inside or probe.off_duty() or not self._enabled:
            return step(self, optimizer, *args, **kwargs)
        probe.scaling.enter(self)
        entries = probe.boundary.entries
        try:
            result = step(self, optimizer, *args, **kwargs)
            if probe.boundary.entries == entries:  # the scaler never called optimizer.step
                probe.guard.run(
                    probe.core, probe.without_grad, probe.boundary.overflowed, optimizer
                )
        finally:
            probe.scaling.scaler = None
        return probe.at_boundary(result)

    scaler.scale, scaler.unscale_, scaler.step = scale_, unscale_, step_


def _patch_clips(torch: Any, probe: Probe) -> None:
    module = torch.nn.utils.clip_grad
    compiling = torch.compiler.is_compiling

    part = probe.guard.part("gradient")

    def saw(params: List[Any], norm: Any, limit: Any) -> None:
        probe.guard.run(part, probe.collectors["gradient"].saw_clip, params, norm, limit)

    def sample(params: List[Any]) -> None:
        before = probe.collectors["groups"].before_clip
        probe.sampling.run("gradients", probe.without_grad, before, params)

    def wrap(name: str, tells_norm: bool) -> None:
        original = getattr(torch.nn.utils, name, None)
        if original is None:
            return

        @functools.wraps(original)
        @uncounted
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling() or probe.absent():
                return original(parameters, *args, **kwargs)
            if isinstance(parameters, torch.Tensor):
                params = [parameters]
            else:
                params = list(parameters)
                if params:  # torch warns of an empty generator
                    parameters = params
            if probe.sampling.due("gradients"):
                sample(params)
            norm_type = args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0)
            limit = args[0] if args else kwargs.get("max_norm")
            sharded = bool(params) and hasattr(params[0], "_local_tensor")
            if tells_norm and not sharded and float(norm_type) == 2.0:
                norm = original(parameters, *args, **kwargs)
                saw(params, norm, limit)
                return norm
            saw(params, None, limit if name == "clip_grads_with_norm_" else None)
            return original(parameters, *args, **kwargs)

        for home in (module, torch.nn.utils):
            if getattr(home, name, None) is original:
                setattr(home, name, clip)

    wrap("clip_grad_norm_", tells_norm=True)
    wrap("clip_grad_value_", tells_norm=False)
    wrap("clip_grads_with_norm_", tells_norm=False)


def _patch_losses(torch: Any, probe: Probe) -> None:
    functional = torch.nn.functional

    def wrap(name: str) -> None:
        original = getattr(functional, name)

        @functools.wraps(original)
        @uncounted
        def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(input, target, *args, **kwargs)
            if (
                type(input) is torch.Tensor
                and type(target) is torch.Tensor
                and result.requires_grad
                and not probe.off_duty()
                and not probe.boundary.repeats
            ):
                if probe.boundary.handmade.pending:
                    probe.boundary.handmade.sign()
                ignored = args[IGNORE_INDEX] if len(args) > IGNORE_INDEX else -100
                # The graph of what a checkpoint computes again is soon gone, and tells nothing.
                whose = None if probe.in_backward else result
                probe.batches.targets(target, kwargs.get("ignore_index", ignored), whose)
                if probe.sampler.wants_logits:
                    probe.sampler.saw_logits(input)
            return result

        # torch's own marks of a function that stands for another one: TorchScript and
        # torch.compile then take the original and never look into ours.
        vars(loss)["__script_if_tracing_wrapper"] = True
        vars(loss)["__original_fn"] = original
        setattr(functional, name, loss)

    for name in LOSSES:
        wrap(name)


def before_forward(probe: Probe) -> Callable[..., Tuple[Tuple[Any, ...], Dict[str, Any]]]:
    """Return what runs in front of each call of an outermost module."""

    def before(
        root: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        if probe.phase != "step":
            probe.beat("step")
        if probe.boundary.handmade.pending:
            probe.boundary.handmade.sign()
        if probe.drills.active:
            args, kwargs = probe.drills.forward(root, args, kwargs)
        if not probe.boundary.repeats:
            probe.batches.inputs((*args, *kwargs.values()) if kwargs else args)
        return args, kwargs

    return hide(probe.torch, before)
