"""Engines that keep weights and moments where no savepoint finds them, and update them themselves.

DeepSpeed's engine trains flat partitions in 32 bits that are the optimizer's parameters, and copies
them into the model's weights behind each update; with ZeRO each rank has another part of them.
Putting back what the model holds would last until the next update. What is imported but not used
is no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Tuple

if TYPE_CHECKING:
    from .registry import Registry

ENGINES = {"deepspeed": ("DeepSpeed", "DeepSpeedEngine")}  # by package: its name, and its class


class ForeignEngine:
    """Looks for one among the modules of the job: 0.1 us while none has come or gone."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._looked: Tuple[int, str] = (-1, "")  # at this state of the registry: what was found

    def why_not(self) -> str:
        """Return why nothing of the training can be changed or restored here, "" where it can."""
        modules = self._registry.modules
        if self._looked[0] != modules.changes:
            found = next(filter(None, (_name_of(type(each)) for each in modules)), "")
            self._looked = modules.changes, found
        name = self._looked[1]
        return name and f"{name} keeps weights and moments of its own, which no savepoint holds"


def _name_of(kind: type) -> str:
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package in ENGINES and base.__name__ == ENGINES[package][1]:
            return ENGINES[package][0]
    return ""
