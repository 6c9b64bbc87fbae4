"""One gradient element becomes NaN, as after an overflow in a kernel."""

from __future__ import annotations

from typing import Any, ClassVar, List

from . import CannotActError, Fault, Params


class NanGrad(Fault):
    """Acts once, in the first parameter that has a gradient, before the job can clip."""

    MEANING = "set one gradient element to NaN, once"
    MOVES = "grad_global_norm"
    PARAMS: ClassVar[Params] = {}

    _done = False

    def after_backward(self, params: List[Any]) -> None:
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
