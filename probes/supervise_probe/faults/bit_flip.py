"""One bit of one float32 is flipped, as by a failing chip. The bits from 23 to 30 are the exponent:
the higher, the larger the error. Where the optimizer clips, a gradient may be absorbed.
"""

from __future__ import annotations

from typing import Any, ClassVar, List, Mapping

from . import CannotActError, Fault, Params, Value


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

    def after_backward(self, params: List[Any]) -> None:
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
            place = int(flipped.masked_fill(grad.reshape(-1) == 0, -2.0).argmax())
            bits[place : place + 1].bitwise_xor_(mask)
        self._done = True

    def before_update(self, params: List[Any]) -> None:
        self.after_backward(params)
        if not self._done:
            raise CannotActError(f"no {self.params['target']} is a contiguous float32 tensor")
