"""A smaller batch than planned, as from a wrong configuration after a restart."""

from __future__ import annotations

from typing import Any, ClassVar

from . import Args, Call, CannotActError, Fault, Kwargs, Params
from ._tokens import places


class BatchCut(Fault):
    """Keeps the first rows only, of every input that has as many rows as the tokens."""

    MEANING = "keep a part of each batch only"
    MOVES = "tokens_per_update"
    PARAMS: ClassVar[Params] = {
        "factor": (0.125, "which part of its rows, one at least"),
        "steps": (100000, "for so many steps"),
    }

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        where = places(self.torch, args, kwargs)
        if not where:
            raise CannotActError("no whole numbers, such as tokens, among the inputs of the model")
        if len(where) < 2:  # cut inputs and whole targets would kill the job
            raise CannotActError("no targets of whole numbers among the inputs of the model")
        first = args[where[0]] if isinstance(where[0], int) else kwargs[where[0]]
        rows = first.shape[0]
        kept = max(1, int(rows * float(self.params["factor"])))

        def cut(value: Any) -> Any:
            whole = isinstance(value, self.torch.Tensor) and value.dim() > 0
            return value[:kept] if whole and value.shape[0] == rows else value

        return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}
