"""Faults of the update: gradients (NaN, overflows, a clip that is not made), rates and moments."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Any, ClassVar, Dict, List, Mapping, Optional, Tuple

from ..torch_state.structure import nested_leaves
from . import Args, Call, CannotActError, Fault, Kwargs, Params, Value


class LrSpike(Fault):
    """Multiplies the rate that the optimizer uses."""

    MEANING = "multiply the learning rate for some steps"
    MOVES = "update_norm"
    PARAMS: ClassVar[Params] = {
        "factor": (30.0, "the learning rate is multiplied by this"),
        "steps": (20, "for so many steps"),
    }

    def lr_factor(self) -> float:
        return float(self.params["factor"])


FIRST, SECOND = "exp_avg", "exp_avg_sq"
HOW = ("variance", "zero", "restart")


class Moments(Fault):
    """Acts once. `variance` shrinks the second moments, `zero` empties both and keeps the step
    count, `restart` sets that to zero as well."""

    MEANING = "damage the moments of Adam-like optimizers, once"
    MOVES = "update_norm"
    PARAMS: ClassVar[Params] = {
        "how": ("variance", "variance, zero or restart"),
        "factor": (1e-4, "the second moments are multiplied by this"),
    }

    _done = False

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        if params["how"] not in HOW:
            raise ValueError(f"moments: how={params['how']!r} must be one of {', '.join(HOW)}")

    def before_step(self, optimizers: List[Any]) -> None:
        if self._done:
            return
        states = [state for o in optimizers for state in o.state.values() if SECOND in state]
        if not states:
            raise CannotActError(
                "no optimizer keeps second moments: Adam and its kin do, SGD does not"
            )
        with self.torch.no_grad():
            for state in states:
                self._damage(state)
        self._done = True

    def _damage(self, state: Any) -> None:
        manner = self.params["how"]
        if manner == "variance":
            state[SECOND].mul_(float(self.params["factor"]))
            return
        state[FIRST].zero_()
        state[SECOND].zero_()
        if manner == "restart" and isinstance(state.get("step"), self.torch.Tensor):
            state["step"].zero_()


SAME = 1e-9  # relative difference that is none


class ScheduleRestart(Fault):
    """Sets each rate to what it was as many steps behind the first one."""

    MEANING = "begin the schedule of the learning rate again"
    MOVES = "learning_rate"
    FOLLOWS = True
    PARAMS: ClassVar[Params] = {"steps": (0, "for so many steps; 0: for the rest of the run")}

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        self._trails: Dict[int, Tuple[array[int], array[float]]] = {}  # by optimizer, at changes
        self._began: Optional[int] = None

    def follow(self, optimizer: Any, step: int) -> None:
        rate = next((g["lr"] for g in optimizer.param_groups if g.get("lr") is not None), 0.0)
        rate = float(rate)
        steps, rates = self._trails.setdefault(id(optimizer), (array("q"), array("d")))
        passed = bisect_left(steps, step)  # what comes behind was rolled back
        del steps[passed:], rates[passed:]
        if not rates or rates[-1] != rate:
            steps.append(step)
            rates.append(rate)

    def schedule_factor(self, optimizer: Any, step: int) -> float:
        steps, rates = self._trails[id(optimizer)]
        if self._began is None:
            if max(rates) - min(rates) <= SAME * max(rates):
                raise CannotActError("the learning rate has been the same since the run began")
            self._began = step
        now = rates[-1]
        again = rates[bisect_right(steps, steps[0] + step - self._began) - 1]
        return again / now if now else 1.0


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
        for tensor in nested_leaves(output):
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
