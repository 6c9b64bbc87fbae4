"""Faults of the gradients: NaN, overflows of a loss scale, a clip that is not made."""

from __future__ import annotations

from typing import Any, ClassVar, List

from ..torch_state.structure import leaves
from . import Args, Call, CannotActError, Fault, Kwargs, Params


class GuardOff(Fault):
    """Turns the job's clips into measurements of the norm."""

    MEANING = "let the job's clips of its gradients do nothing"
    MOVES = "guard_active"
    PARAMS: ClassVar[Params] = {"steps": (0, "for so many steps; 0: for the rest of the run")}

    _called = False

    def clips(self) -> bool:
        self._called = True
        return False

    def before_update(self, params: List[Any]) -> None:
        if not self._called:
            raise CannotActError("the job clips no gradients by torch.nn.utils before its step")


class NanGrad(Fault):
    """Acts once, in the first parameter that has a gradient, before the job can clip.

    With several ranks in the gradient of the model's output instead: a kernel's overflow is there
    before the ranks add up their gradients, and comes to all of them.
    """

    MEANING = "set one gradient element to NaN, once"
    MOVES = "grad_global_norm"
    PARAMS: ClassVar[Params] = {
        "alone": (0, "1: behind the sum over the ranks, as where memory of one rank is broken"),
    }

    _done = False
    _hook: Any = None

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        if self._hook is None and not self._done and self._is_summed():
            self._hook = root.register_forward_hook(self._in_output)
        return args, kwargs

    def _in_output(self, module: Any, args: Any, output: Any) -> None:
        for tensor in leaves(output):
            if isinstance(tensor, self.torch.Tensor) and tensor.requires_grad and tensor.numel():
                tensor.register_hook(self._strike)

    def _strike(self, gradient: Any) -> Any:
        if self._done:
            return gradient
        self._done = True
        struck = gradient.clone()
        struck.view(-1)[0] = float("nan")
        return struck

    def after_backward(self, params: List[Any]) -> None:
        if self._is_summed():
            return
        for param in params:
            # Of a sharded one the part that is here: an element of the whole is a copy.
            gradient = getattr(param.grad, "_local_tensor", param.grad)
            if not self._done and gradient is not None and gradient.numel():
                with self.torch.no_grad():
                    gradient[(0,) * gradient.dim()] = float("nan")
                self._done = True

    def before_update(self, params: List[Any]) -> None:
        self.after_backward(params)
        if not self._done:
            raise CannotActError("no parameter has a gradient")

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _is_summed(self) -> bool:
        """Return whether the gradients of several ranks are added up behind the fault."""
        distributed = self.torch.distributed
        if self.params["alone"] or not distributed.is_available():
            return False
        return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


class OverflowStorm(Fault):
    """Makes one gradient element infinite in a share of the steps."""

    MEANING = "make gradients infinite in a share of the steps"
    MOVES = "grad_global_norm"
    PARAMS: ClassVar[Params] = {
        "share": (0.3, "of the steps"),
        "steps": (300, "for so many steps"),
    }

    _count = 0.0
    _struck = False

    def before_step(self, optimizers: List[Any]) -> None:
        self._struck = False  # for the next step

    def after_backward(self, params: List[Any]) -> None:
        if self._struck:
            return
        self._struck = True
        count = int(self._count)
        self._count += float(self.params["share"])
        victim = next((p for p in params if p.grad is not None and p.grad.numel()), None)
        if int(self._count) > count and victim is not None:
            with self.torch.no_grad():
                gradient = getattr(victim.grad, "_local_tensor", victim.grad)
                if gradient.numel():
                    gradient[(0,) * gradient.dim()] = float("inf")
