"""Savepoints: the state of the run in memory and on disk, and going back to one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FACE = {
    "Busy": "manager",
    "CannotRestore": "manager",
    "FREE_NS": "controller",
    "ReferenceOutput": "weights_check",
    "SWAPPED_OUT": "manager",
    "SavepointManager": "manager",
    "StateWatch": "training_state",
    "TimeShare": "controller",
}


def __getattr__(name: str) -> Any:
    """Import what the package offers when it is asked for (PEP 562)."""
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FACE[name]}"), name)
