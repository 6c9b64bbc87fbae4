"""The job's modules, optimizers, schedulers and batches, as torch shows them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FACE = {
    "LearningRate": "learning_rate",
    "OptimizerInfo": "records",
    "Optimizers": "records",
    "RateHold": "learning_rate",
    "Registry": "registry",
    "StructureError": "structure",
    "TRAIL_LENGTH": "learning_rate",
    "Warmup": "learning_rate",
    "healthy_rate": "learning_rate",
    "is_readable": "tensor_copies",
    "pickle_structure": "structure",
    "record_rates": "learning_rate",
    "replicated_parameters": "structure",
}


def __getattr__(name: str) -> Any:
    """Import what the package offers when it is asked for (PEP 562)."""
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FACE[name]}"), name)
