"""Random tokens instead of data, as from a damaged shard; targets stay as they are."""

from __future__ import annotations

from typing import Any, ClassVar, Dict, Mapping, Tuple

from . import Fault, Value


class BadBatch(Fault):
    """Replaces the first whole-number tensor that goes into the outermost module."""

    MEANING = "feed random tokens into the model for some steps"
    PARAMS: ClassVar[Mapping[str, Tuple[Value, str]]] = {
        "steps": (10, "for so many steps"),
        "seed": (0, "of the fault's own generator"),
    }

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        self._generator = torch.Generator().manual_seed(int(params["seed"]))

    def forward(
        self, root: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        for index, value in enumerate(args):
            if self._is_tokens(value):
                return (*args[:index], self._noise(root, value), *args[index + 1 :]), kwargs
        for name, value in kwargs.items():
            if self._is_tokens(value):
                return args, {**kwargs, name: self._noise(root, value)}
        raise ValueError("bad_batch found no whole numbers among the inputs of the model")

    def _is_tokens(self, value: Any) -> bool:
        torch = self.torch
        return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)

    def _noise(self, root: Any, like: Any) -> Any:
        sizes = [m.num_embeddings for m in root.modules() if hasattr(m, "num_embeddings")]
        size = max(sizes, default=0) or int(like.max()) + 1
        noise = self.torch.randint(
            size, tuple(like.shape), generator=self._generator, dtype=like.dtype, device="cpu"
        )
        return noise.to(like.device)


FAULT = BadBatch
