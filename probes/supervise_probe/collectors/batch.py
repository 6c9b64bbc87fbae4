"""Which data a step saw: an order-sensitive hash of what went into the model.

It tells batches apart and finds them again; it is no checksum of the data set. The first tensor
that goes into the outermost module is hashed, with gradients on; before that module is known, or
where it is never called as a whole, the first tensor of a DataLoader's batch.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import TYPE_CHECKING, Any, Dict, Iterable, Optional

from ..spec import MetricSpec
from . import Collector as Base

if TYPE_CHECKING:
    from ..probe import Probe
    from ..scalars import Number
    from ..step import Step, Update

METRICS = (
    MetricSpec(
        "batch_fingerprint",
        "1",
        "Hash of the step's input as a whole number below 2^52; absent if no input was seen.",
        "CRC-32 of the first 16384 values, and their size; on a device a weighted sum of them",
        "one pass over the input",
    ),
)

LONGEST = 16384  # values hashed per input
_MASK = (1 << 52) - 1
_MIX = 6364136223846793005  # odd; keeps the order of micro-batches


class Collector(Base):
    """Hashes on the device where the batch is; only the hash travels."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._hash: Any = None
        self._loaded: Any = None
        self._of_step: Any = None
        self._weights: Dict[Any, Any] = {}

    def saw_loaded(self, values: Iterable[Any]) -> None:
        """These came out of a loader."""
        tensor = self._first(values)
        if tensor is not None:
            self._loaded = self._mix(self._loaded, self._digest(tensor))

    def saw(self, values: Iterable[Any]) -> Optional[Any]:
        """These went into the model; return the tensor that was hashed."""
        tensor = self._first(values)
        if tensor is not None:
            self._hash = self._mix(self._hash, self._digest(tensor))
        return tensor

    def after_update(self, update: Update) -> None:
        found = self._loaded if self._hash is None else self._hash
        self._hash = self._loaded = None
        if found is not None:
            self._of_step = self._mix(self._of_step, found)

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        found, self._of_step = self._of_step, None
        if isinstance(found, int):
            values["batch_fingerprint"] = float(found & _MASK)
        elif found is not None:
            values["batch_fingerprint"] = self.scalars.value(found & _MASK)

    def _first(self, values: Iterable[Any]) -> Optional[Any]:
        fallback = None
        for value in values:
            if isinstance(value, self.torch.Tensor) and value.dim() and value.numel() > 1:
                if value.dtype in (self.torch.int64, self.torch.int32):
                    return value
                if fallback is None and value.dtype is self.torch.float32:
                    fallback = value
        return fallback

    def _mix(self, so_far: Any, found: Any) -> Any:
        if so_far is None:
            return found
        return (so_far & _MASK) * _MIX + found if isinstance(found, int) else so_far * _MIX + found

    def _digest(self, tensor: Any) -> Any:
        torch = self.torch
        if self.scalars.reads(tensor):
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            size = min(tensor.numel(), LONGEST) * tensor.element_size()
            raw = (ctypes.c_char * size).from_address(tensor.data_ptr())
            return zlib.crc32(raw) | (size & 0xFFFFF) << 32
        flat = tensor.detach().reshape(-1)[:LONGEST]
        if flat.dtype is torch.float32:
            flat = flat.view(torch.int32)
        weights = self._weights.get(flat.device)
        if weights is None:
            places = torch.arange(1, LONGEST + 1, dtype=torch.int64, device=flat.device)
            weights = self._weights[flat.device] = places * 2654435761 | 1
        return (flat.to(torch.int64) * weights[: flat.numel()]).sum()
