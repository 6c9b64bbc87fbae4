"""The same token over and over, as from a file of padding; targets repeat it too."""

from __future__ import annotations

from typing import Any, ClassVar

from . import Args, Call, CannotActError, Fault, Kwargs, Params
from ._tokens import change, places


class RepeatedTokens(Fault):
    """Makes every whole-number input of the outermost module constant."""

    MEANING = "feed one token over and over, inputs and targets"
    MOVES = "train_loss_raw"
    PARAMS: ClassVar[Params] = {
        "steps": (10, "for so many steps"),
        "token": (0, "which token"),
    }

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        where = places(self.torch, args, kwargs)
        if not where:
            raise CannotActError("no whole numbers, such as tokens, among the inputs of the model")
        token = int(self.params["token"])
        return change(args, kwargs, where, lambda t: self.torch.full_like(t, token))
