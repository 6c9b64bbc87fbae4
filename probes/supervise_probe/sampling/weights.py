"""Tensors that a forward must leave alone: the weights of a model, above all.

The first time copies are kept on the host, and bits compared; behind a forward that has proved to
change nothing it is enough to look at where the memory of each is, and at torch's count of writes.
"""

from __future__ import annotations

from typing import Any, Iterable, List, NamedTuple, Tuple

from ..torch_state.tensor_copies import same_bits
from .forward_inputs import NeverError, attempt

MOST_BYTES = 1 << 30  # of copies


class _Copy(NamedTuple):
    """One tensor with an alias of its memory, a copy on the host, and its gradient."""

    tensor: Any
    alias: Any
    copy: Any
    gradient: Any


class Weights:
    """These tensors, as they are now.

    Args:
        copies: keep copies as well, and put gradients aside.

    Raises:
        NeverError: they are too many to be copied.
    """

    def __init__(self, torch: Any, tensors: Iterable[Any], copies: bool) -> None:
        self._torch = torch
        self._marks = [(tensor, _mark(tensor)) for tensor in tensors]
        self._copies: List[_Copy] = []
        if not copies:
            return
        total = sum(t.numel() * t.element_size() for t, _ in self._marks)
        if total > MOST_BYTES:
            raise NeverError(
                f"the parameters have {total >> 20} MB, and whether a forward changes them is "
                f"tried with {MOST_BYTES >> 20} MB at most"
            )
        for tensor, _ in self._marks:
            alias = tensor.data
            gradient = tensor.grad if tensor.is_leaf else None
            self._copies.append(_Copy(tensor, alias, alias.to("cpu", copy=True), gradient))

    def begin(self) -> None:
        """The forward is about to run; one that computes gradients finds none to add to."""
        for copy in self._copies:
            if copy.gradient is not None:
                copy.tensor.grad = None

    def put_back(self) -> bool:
        """Put back what can be, in any case the rest; whether anything had changed."""
        changed = [attempt("failed", self._put_back, copy) for copy in self._copies]
        changed += [attempt("failed", _differs, *mark) for mark in self._marks]
        return any(changed)

    def _put_back(self, original: _Copy) -> bool:
        tensor, alias, changed = original.tensor, original.alias, False
        if tensor.is_leaf and tensor.grad is not None:
            changed = True
        if original.gradient is not None or changed:
            tensor.grad = original.gradient
        if _address(tensor) != _address(alias):
            changed, tensor.data = True, alias
        copy = original.copy if alias.device.type == "cpu" else original.copy.to(alias.device)
        if not same_bits(self._torch, alias, copy):
            changed = True
            if alias.shape == copy.shape:
                alias.copy_(copy)
        return changed


def _address(tensor: Any) -> Tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _mark(tensor: Any) -> Tuple[Any, ...]:
    """What shows most changes of a tensor, without looking into it."""
    version = -1 if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), version, tensor.requires_grad, tensor.shape)


def _differs(tensor: Any, mark: Tuple[Any, ...]) -> bool:
    return _mark(tensor) != mark
