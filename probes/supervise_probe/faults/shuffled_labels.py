"""Targets in another order than their inputs, as from a loader that lost its pairing."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

from . import Args, Call, CannotActError, Fault, Kwargs, Params, Value
from ._tokens import change, places


class ShuffledLabels(Fault):
    """Shuffles the last whole-number input of the outermost module along its last dimension."""

    MEANING = "shuffle the targets within each sequence for some steps"
    MOVES = "train_loss_raw"
    PARAMS: ClassVar[Params] = {
        "steps": (10, "for so many steps"),
        "seed": (0, "of the fault's own generator"),
    }

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        self._generator = torch.Generator().manual_seed(int(params["seed"]))

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        where = places(self.torch, args, kwargs)
        if len(where) < 2:
            raise CannotActError("no targets of whole numbers among the inputs of the model")
        return change(args, kwargs, where[-1:], self._shuffle)

    def _shuffle(self, labels: Any) -> Any:
        order = self.torch.randperm(labels.shape[-1], generator=self._generator)
        return labels[..., order.to(labels.device)]
