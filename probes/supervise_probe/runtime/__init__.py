"""Protection of the job's process from the probe."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FACE = {
    "Guard": "guard",
    "Scalars": "scalars",
    "WINDOW": "guard",
}


def __getattr__(name: str) -> Any:
    """Import what the package offers when it is asked for (PEP 562)."""
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FACE[name]}"), name)
