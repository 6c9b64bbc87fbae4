"""Faults of the weights and of their updates: noise, a flipped bit, a biased attention, a broken
router; gradients (NaN, overflows, a clip that is not made), rates and moments.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from typing import Any, Callable, ClassVar, Mapping, Optional

from ..torch_state.structure import nested_leaves
from . import Args, Call, CannotActError, Fault, Kwargs, Params, Value


class AttentionBias(Fault):
    """Replaces `scaled_dot_product_attention` while it acts; without masks and dropout."""

    MEANING = "bias the backward of scaled_dot_product_attention"
    MOVES = "max_attn_logit"
    PARAMS: ClassVar[Params] = {
        "bits": (256, "added to the bfloat16 pattern of the output"),
        "steps": (100000, "for so many steps"),
    }

    _original: Any = None
    _called = False

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        if self._original is None:
            home = self.torch.nn.functional
            self._original = home.scaled_dot_product_attention
            self._ours = _attention(
                self.torch, self._original, int(self.params["bits"]), self._note_call
            )
            home.scaled_dot_product_attention = self._ours
        return args, kwargs

    def _note_call(self) -> None:
        self._called = True

    def before_update(self, params: list[Any]) -> None:
        if self._original is not None and not self._called:
            raise CannotActError(
                "the model calls no scaled_dot_product_attention without mask and dropout"
            )

    def end(self) -> None:
        home = self.torch.nn.functional
        if self._original is not None and home.scaled_dot_product_attention is self._ours:
            home.scaled_dot_product_attention = self._original


def _attention(
    torch: Any, original: Callable[..., Any], bits: int, on_call: Callable[[], None]
) -> Callable[..., Any]:
    class Biased(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, causal: bool, scale: float) -> Any:
            scores = query @ key.transpose(-2, -1) * scale
            if causal:
                shape = scores.shape[-2:]
                later = torch.ones(shape, dtype=torch.bool, device=scores.device).triu(1)
                scores = scores.masked_fill(later, -math.inf)
            weights = scores.softmax(dim=-1)
            output = weights @ value
            ctx.save_for_backward(query, key, value, weights, output)
            ctx.scale = scale
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            query, key, value, weights, output = ctx.saved_tensors
            rounded = (output.bfloat16().view(torch.int16) + bits).view(torch.bfloat16)
            delta = (gradient * rounded.to(gradient)).sum(dim=-1, keepdim=True)
            scores = weights * (gradient @ value.transpose(-2, -1) - delta) * ctx.scale
            into_key = scores.transpose(-2, -1) @ query
            return scores @ key, into_key, weights.transpose(-2, -1) @ gradient, None, None

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        causal = bool(kwargs.get("is_causal", args[2] if len(args) > 2 else False))
        plain = not (args[:2] and (args[0] is not None or args[1])) and not kwargs.get("dropout_p")
        plain = plain and kwargs.get("attn_mask") is None and not kwargs.get("enable_gqa")
        if not (plain and torch.is_grad_enabled()):
            return original(query, key, value, *args, **kwargs)
        on_call()
        scale = kwargs.get("scale") or 1.0 / math.sqrt(query.shape[-1])
        return Biased.apply(query, key, value, causal, scale)

    return attention


ROUTER_FAULTS = ("common", "sharp", "flat")
NAMES = ("router", "gate")


class Router(Fault):
    """Acts once, in the weights of every router, one row per expert.

    `common` halves the rows and adds one vector to all: softmax does not see it. `sharp` multiplies
    the centred rows by 6: the first expert takes all. `flat` multiplies them by 0.05.
    """

    MEANING = "damage the routers of a mixture of experts, once"
    MOVES = "router_token_entropy"
    PARAMS: ClassVar[Params] = {"how": ("sharp", "common, sharp or flat")}

    _done = False

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        if params["how"] not in ROUTER_FAULTS:
            raise ValueError(
                f"router: how={params['how']!r} must be one of {', '.join(ROUTER_FAULTS)}"
            )

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        if not self._done:
            candidates = [
                parameter
                for name, parameter in root.named_parameters()
                if parameter.dim() == 2 and any(n in name.split(".")[-2:][0] for n in NAMES)
            ]
            if not candidates:
                raise CannotActError("no matrix of the model is called router or gate")
            with self.torch.no_grad():
                for weight in candidates:
                    weight.copy_(self._damaged(weight))
            self._done = True
        return args, kwargs

    def _damaged(self, weight: Any) -> Any:
        mean = weight.mean(dim=0, keepdim=True)
        if self.params["how"] == "common":
            return weight * 0.5 + mean
        return mean + (weight - mean) * (6.0 if self.params["how"] == "sharp" else 0.05)


class WeightNoise(Fault):
    """Acts once, in the last parameter of its kind."""

    MEANING = "add noise to one weight matrix or vector, once"
    MOVES = "train_loss_raw"
    PARAMS: ClassVar[Params] = {
        "target": ("matrix", "matrix or vector"),
        "std": (8.0, "in standard deviations of the parameter; of a constant one, in its size"),
        "seed": (0, "of the fault's own generator"),
    }

    _done = False

    def before_update(self, params: list[Any]) -> None:
        dimensions = 1 if self.params["target"] == "vector" else 2
        victims = [p for p in params if p.dim() == dimensions and p.is_floating_point()]
        if self._done:
            return
        if not victims:
            raise CannotActError(f"no {self.params['target']} of floats is trained")
        victim, generator = victims[-1], self.torch.Generator()
        generator.manual_seed(int(self.params["seed"]))
        with self.torch.no_grad():
            size = float(victim.std()) if victim.numel() > 1 else 0.0
            size = size or float(victim.abs().mean())
            noise = self.torch.randn(tuple(victim.shape), generator=generator)
            victim.add_(noise.to(victim) * (size * float(self.params["std"])))
        self._done = True


class BitFlip(Fault):
    """Acts once, in the last float32 matrix or its gradient, on what becomes the largest number, of
    what the step used."""

    MEANING = "flip one bit of a gradient or a weight, once"
    MOVES = "grad_global_norm"
    PARAMS: ClassVar[Params] = {
        "target": ("grad", "grad or weight"),
        "bit": (30, "which bit of the float32: 23 to 30 are the exponent, 31 the sign"),
    }

    _done = False

    @classmethod
    def moves(cls, params: Mapping[str, Value]) -> str:
        return "train_loss_raw" if params["target"] == "weight" else cls.MOVES

    def after_backward(self, params: list[Any]) -> None:
        torch, of_grad = self.torch, self.params["target"] == "grad"
        pairs = [(p.grad if of_grad else p.data, p.grad) for p in params if p.grad is not None]
        pairs = [
            (t, grad)
            for t, grad in pairs
            if t.dtype is torch.float32 and t.layout is grad.layout is torch.strided
            if t.numel() and t.is_contiguous()
        ]
        if self._done or not pairs:
            return
        # What lies in front of a norm is absorbed, however large; the last matrix is near the loss.
        victim, grad = ([pair for pair in pairs if pair[0].dim() > 1] or pairs)[-1]
        bit = 1 << int(self.params["bit"])
        mask = bit - (1 << 32) if bit >= 1 << 31 else bit
        with torch.no_grad():
            bits = victim.view(-1).view(torch.int32)
            flipped = (bits ^ mask).view(torch.float32).abs().nan_to_num(-1.0, -1.0, -1.0)
            index = int(flipped.masked_fill(grad.reshape(-1) == 0, -2.0).argmax())
            bits[index : index + 1].bitwise_xor_(mask)
        self._done = True

    def before_update(self, params: list[Any]) -> None:
        self.after_backward(params)
        if not self._done:
            raise CannotActError(f"no {self.params['target']} is a contiguous float32 tensor")


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
MOMENT_FAULTS = ("variance", "zero", "restart")


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
        if params["how"] not in MOMENT_FAULTS:
            raise ValueError(
                f"moments: how={params['how']!r} must be one of {', '.join(MOMENT_FAULTS)}"
            )

    def before_step(self, optimizers: list[Any]) -> None:
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
        self._trails: dict[int, tuple[array[int], array[float]]] = {}  # by optimizer, at changes
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

    def allows_clip(self) -> bool:
        self._called = True
        return False

    def before_update(self, params: list[Any]) -> None:
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
        "alone": (0, "1: behind the sum over the ranks, as where memory of one rank is broken")
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

    def after_backward(self, params: list[Any]) -> None:
        if self._is_summed():
            return
        for param in params:
            # Of a sharded one the part that is here: an element of the whole is a copy.
            gradient = getattr(param.grad, "_local_tensor", param.grad)
            if not self._done and gradient is not None and gradient.numel():
                with self.torch.no_grad():
                    gradient[(0,) * gradient.dim()] = float("nan")
                self._done = True

    def before_update(self, params: list[Any]) -> None:
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
    PARAMS: ClassVar[Params] = {"share": (0.3, "of the steps"), "steps": (300, "for so many steps")}

    _count = 0.0
    _struck = False

    def before_step(self, optimizers: list[Any]) -> None:
        self._struck = False  # for the next step

    def after_backward(self, params: list[Any]) -> None:
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
