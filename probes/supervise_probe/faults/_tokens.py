"""Tokens among the arguments of a model: whole numbers in a tensor."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

Call = Tuple[Tuple[Any, ...], Dict[str, Any]]


def is_tokens(torch: Any, value: Any) -> bool:
    """Whether this may be token ids or class indices, shape (batch, ...)."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in (torch.int64, torch.int32)
        and value.dim() > 0
    )


def places(torch: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> List[Any]:
    """Return positions and names of all tokens; a model's own input comes first."""
    found: List[Any] = [i for i, value in enumerate(args) if is_tokens(torch, value)]
    return found + [name for name, value in kwargs.items() if is_tokens(torch, value)]


def change(
    args: Tuple[Any, ...], kwargs: Dict[str, Any], where: List[Any], how: Callable[[Any], Any]
) -> Call:
    """Return the arguments with `how` applied at `where`; the job's own are not changed."""
    changed = tuple(how(value) if i in where else value for i, value in enumerate(args))
    return changed, {k: how(v) if k in where else v for k, v in kwargs.items()}
