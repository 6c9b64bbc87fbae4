"""Gradients that keep overflowing, as under FP16 with a scale that never settles."""

from __future__ import annotations

from typing import Any, ClassVar, List

from . import Fault, Params


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
        before = int(self._count)
        self._count += float(self.params["share"])
        victim = next((p for p in params if p.grad is not None and p.grad.numel()), None)
        if int(self._count) > before and victim is not None:
            with self.torch.no_grad():
                gradient = getattr(victim.grad, "_local_tensor", victim.grad)
                if gradient.numel():
                    gradient[(0,) * gradient.dim()] = float("inf")
