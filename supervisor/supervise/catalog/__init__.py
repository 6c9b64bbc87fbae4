"""YAML files and the parts they name -> one frozen policy. Nothing here runs anything.

The loader is imported when it is asked for: a job whose policy is in the cache starts without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .diagnostics import PolicyErrors, Problem
    from .loader import load_policy
    from .shipped import locate

__all__ = ["PolicyErrors", "Problem", "load_policy", "locate"]

_HOMES = {
    "load_policy": ".loader",
    "locate": ".shipped",
    "PolicyErrors": ".diagnostics",
    "Problem": ".diagnostics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
