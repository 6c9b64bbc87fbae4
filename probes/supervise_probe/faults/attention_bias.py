"""A biased backward of attention, as from a kernel that rounds its output before it is reused.

The backward of attention needs the row sums of dO * O. Where O was rounded in one direction, every
step has a small error in the same direction, which is not visible for a hundred steps.

Source: arXiv:2606.28116; the fault model is our own: `bits` is added to the 16-bit pattern of O as
bfloat16, whose mantissa has 7 of them. 256 makes it four times as large, and the logits of small
models grow within 100 steps, also where these have converged; 64, by a half at most, is felt within
300 steps in some of them, and half of that in few.
"""

from __future__ import annotations

import math
from typing import Any, Callable, ClassVar, List

from . import Args, Call, CannotActError, Fault, Kwargs, Params


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

    def before_update(self, params: List[Any]) -> None:
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
