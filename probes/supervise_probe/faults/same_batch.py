"""Every rank is fed the same data, as when all of them got the same shard."""

from __future__ import annotations

from typing import Any, ClassVar

from . import Args, Call, CannotActError, Fault, Kwargs, Params
from ._tokens import change, places


class SameBatch(Fault):
    """All ranks get rank 0's tokens."""

    MEANING = "feed rank 0's batch to all ranks"
    PARAMS: ClassVar[Params] = {"steps": (100000, "for so many steps")}

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        group = self.torch.distributed
        several = group.is_available() and group.is_initialized() and group.get_world_size() > 1
        if not several:
            raise CannotActError("the job has one rank")
        where = places(self.torch, args, kwargs)
        if not where:
            raise CannotActError("no whole numbers, such as tokens, among the inputs of the model")

        def shared(tokens: Any) -> Any:
            copy = tokens.clone()
            group.broadcast(copy, 0)
            return copy

        return change(args, kwargs, where, shared)
