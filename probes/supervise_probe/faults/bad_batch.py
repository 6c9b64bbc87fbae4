"""Random tokens instead of data, as from a damaged shard; targets stay as they are."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

from . import Args, Call, CannotActError, Fault, Kwargs, Params, Value
from ._tokens import change, places


class BadBatch(Fault):
    """Replaces the first whole-number tensor that goes into the outermost module."""

    MEANING = "feed random tokens into the model for some steps"
    MOVES = "train_loss_raw"
    PARAMS: ClassVar[Params] = {
        "steps": (10, "for so many steps"),
        "seed": (0, "of the fault's own generator"),
    }

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        self._generator = torch.Generator().manual_seed(int(params["seed"]))

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        where = places(self.torch, args, kwargs)[:1]
        if not where:
            raise CannotActError("no whole numbers, such as tokens, among the inputs of the model")
        return change(args, kwargs, where, lambda tokens: self._noise(root, tokens))

    def _noise(self, root: Any, like: Any) -> Any:
        sizes = [m.num_embeddings for m in root.modules() if hasattr(m, "num_embeddings")]
        size = max(sizes, default=0) or int(like.max()) + 1
        noise = self.torch.randint(
            size, tuple(like.shape), generator=self._generator, dtype=like.dtype, device="cpu"
        )
        return noise.to(like.device)
