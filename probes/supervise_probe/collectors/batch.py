"""Which data a step saw: an order-sensitive hash of what went into the model.

It tells batches apart and finds them again; it is no checksum of the data set. The first tensor
that goes into the outermost module is hashed, with gradients on; before that module is known, or
where it is never called as a whole, the first tensor of a DataLoader's batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Iterable, Mapping, Optional

from ..spec import MetricSpec
from . import Collector as Base

if TYPE_CHECKING:
    from ..boundary import Step, Update
    from ..probe import Probe
    from ..scalars import Number

METRICS = (
    MetricSpec(
        "batch_fingerprint",
        "1",
        "Hash of the step's input as a whole number below 2^52; absent if no input was seen.",
        "sum(v[i] * (i * 2654435761 | 1)) over the first 65536 values, modulo 2^52",
        "one pass over the input",
    ),
)

LONGEST = 65536  # values hashed per input
_MASK = (1 << 52) - 1
_MIX = 6364136223846793005  # odd; keeps the order of micro-batches


class Collector(Base):
    """Hashes on the device where the batch is; only the hash travels."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._hash: Any = None
        self._of_step: Any = None
        self._weights: Dict[Any, Any] = {}

    def saw(self, values: Iterable[Any]) -> Optional[Any]:
        """These went into the model, or came out of a loader; return the tensor that was hashed."""
        tensor = self._first(values)
        if tensor is not None:
            with self.torch.no_grad():
                found = self._digest(tensor)
                self._hash = found if self._hash is None else self._hash * _MIX + found
        return tensor

    def after_update(self, update: Update) -> None:
        found, self._hash = self._hash, None
        if found is not None:
            self._of_step = found if self._of_step is None else self._of_step * _MIX + found

    def collect(self, step: Step) -> Mapping[str, Number]:
        found, self._of_step = self._of_step, None
        if found is None:
            return {}
        return {"batch_fingerprint": self.scalars.value(found & _MASK)}

    def _first(self, values: Iterable[Any]) -> Optional[Any]:
        fallback = None
        for value in values:
            if isinstance(value, self.torch.Tensor) and value.dim() and value.numel() > 1:
                if value.dtype in (self.torch.int64, self.torch.int32):
                    return value
                if fallback is None and value.dtype is self.torch.float32:
                    fallback = value
        return fallback

    def _digest(self, tensor: Any) -> Any:
        torch = self.torch
        flat = tensor.detach().reshape(-1)[:LONGEST]
        if flat.dtype is torch.float32:
            flat = flat.view(torch.int32)
        weights = self._weights.get(flat.device)
        if weights is None or weights.numel() < flat.numel():
            size = min(LONGEST, 1 << (flat.numel() - 1).bit_length())
            places = torch.arange(1, size + 1, dtype=torch.int64, device=flat.device)
            weights = self._weights[flat.device] = places * 2654435761 | 1
        return (flat.to(torch.int64) * weights[: flat.numel()]).sum()
