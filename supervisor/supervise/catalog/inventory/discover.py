"""Find detectors, actions, notifiers: one class per file, the file name is the YAML name.

No decorator, no list, no side effect at import: adding one is adding its file.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TypeVar

from ... import actions as actions_package
from ... import detectors as detectors_package
from ...core.model.action import Action
from ...core.model.interfaces import Detector
from ...notifiers import Settings, kinds

T = TypeVar("T")


def discover(package: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """Map each public module's name to the one subclass of `base` that it defines.

    Modules whose name begins with an underscore are helpers and left out.

    Raises:
        TypeError: a module defines none, or more than one.
    """
    found: dict[str, type[T]] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        if name.startswith("_"):
            continue
        module = import_module(f"{package.__name__}.{name}")
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, base)
            and value.__module__ == module.__name__
        ]
        if len(classes) != 1:
            raise TypeError(
                f"{module.__name__} must define one {base.__name__}, not {len(classes)}"
            )
        found[name] = classes[0]
    return found


@cache
def detectors() -> Mapping[str, type[Detector]]:
    """Return the detector classes by `kind`."""
    return discover(detectors_package, Detector)  # type: ignore[type-abstract]


@cache
def actions() -> Mapping[str, type[Action]]:
    """Return the action classes by verb."""
    return discover(actions_package, Action)


@cache
def notifiers() -> Mapping[str, type[Settings]]:
    """Return the settings classes of the notifiers by name."""
    return kinds()


def name_of(part: Detector | Action) -> str:
    """Return the YAML name of a detector or an action: the name of the file it is defined in."""
    return type(part).__module__.rpartition(".")[2]
