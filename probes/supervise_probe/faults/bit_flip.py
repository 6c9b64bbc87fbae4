"""One bit of one float32 is flipped, as by a failing chip. The bits from 23 to 30 are the exponent:
the higher, the larger the error. Where the optimizer clips, a gradient may be absorbed.
"""

from __future__ import annotations

from typing import Any, ClassVar, List

from . import CannotActError, Fault, Params


class BitFlip(Fault):
    """Acts once, in the largest float32 parameter or its gradient, on the element that becomes the
    largest number."""

    MEANING = "flip one bit of a gradient or a weight, once"
    PARAMS: ClassVar[Params] = {
        "target": ("grad", "grad or weight"),
        "bit": (30, "which bit of the float32: 23 to 30 are the exponent, 31 the sign"),
    }

    _done = False

    def after_backward(self, params: List[Any]) -> None:
        tensors = [p.grad if self.params["target"] == "grad" else p.data for p in params]
        tensors = [
            t
            for t in tensors
            if t is not None and t.dtype is self.torch.float32 and t.numel() and t.is_contiguous()
        ]
        if self._done or not tensors:
            return
        victim = max(tensors, key=lambda t: t.numel())
        bit = 1 << int(self.params["bit"])
        mask = bit - (1 << 32) if bit >= 1 << 31 else bit
        with self.torch.no_grad():
            bits = victim.view(-1).view(self.torch.int32)
            flipped = (bits ^ mask).view(self.torch.float32).abs()
            place = int(flipped.nan_to_num(-1.0, -1.0, -1.0).argmax())
            bits[place : place + 1].bitwise_xor_(mask)
        self._done = True

    def before_update(self, params: List[Any]) -> None:
        self.after_backward(params)
        if not self._done:
            raise CannotActError(f"no {self.params['target']} is a contiguous float32 tensor")
