"""Finds the tensor that identifies a batch in whatever a model or a loader gives.

Looked into are tuples, lists, dicts, dataclasses and `collections.UserDict`, which transformers'
BatchEncoding is, one level after the other. No code of the job's runs for that: a mapping that
makes its values up when it is asked is not asked.
"""

from __future__ import annotations

from collections import UserDict
from itertools import islice
from typing import Any, Iterable, List, NamedTuple, Optional, Tuple

from ..runtime.object_access import attributes

DEPTH = 4  # levels
MOST = 64  # values of one container, and of one level
WHOLE_NUMBERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")


class Found(NamedTuple):
    """A tensor, and whether its shape gives how much went into the model.

    It does not for whole numbers that are no indices, and in a list, which may hold samples.
    """

    tensor: Any
    counts: bool


class Inputs:
    """Looks for tensors of this torch."""

    def __init__(self, torch: Any) -> None:
        self._tensor = torch.Tensor
        self._strided, self._bool = torch.strided, torch.bool
        self._indices = (torch.int64, torch.int32)
        self._whole = {getattr(torch, name, None) for name in WHOLE_NUMBERS}

    def find(self, values: Iterable[Any]) -> Optional[Found]:
        """Return the first of whole numbers, else of floats, in the first level that has one.

        One of truth values, if there is nothing else at all: it may be a mask that stays.
        """
        mask: Optional[Found] = None
        level = [(value, True) for value in values]
        for _ in range(DEPTH):
            floats: Optional[Found] = None
            inner: List[Tuple[Any, bool]] = []
            for value, alone in level:
                if not isinstance(value, self._tensor):
                    kept = alone and not isinstance(value, list)
                    inner += [(one, kept) for one in islice(_contents(value), MOST)]
                elif value.numel() > 1 and value.layout is self._strided and not value.is_nested:
                    kind = value.dtype
                    if kind in self._whole:
                        return Found(value, alone and kind in self._indices)
                    if kind.is_floating_point:
                        floats = floats or Found(value, alone)
                    elif kind is self._bool:
                        mask = mask or Found(value, False)
            if floats:
                return floats
            level = inner[:MOST]
        return mask


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, tuple):
        return tuple.__iter__(value)
    if isinstance(value, list):
        return list.__iter__(value)
    if isinstance(value, UserDict) or hasattr(type(value), "__dataclass_fields__"):
        return attributes(value).values()
    return ()
