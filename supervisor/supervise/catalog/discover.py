"""Find detectors, actions, notifiers: each is a class, named in YAML after it.

No decorator, no list, no side effect at import: adding one is adding its class.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TypeVar

from msgspec import UNSET, Struct, UnsetType

from supervise_probe import faults

from .. import actions as actions_package
from .. import detectors as detectors_package
from ..core.model.action import Action
from ..core.model.interfaces import Detector, yaml_name
from ..core.model.payload import DrillOrder
from ..errors import UsageError
from ..notifiers import Settings, kinds
from .diagnostics import did_you_mean

T = TypeVar("T")


def discover(package: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """Map the YAML name of each subclass of `base` in the public modules of a package to it.

    Modules whose name begins with an underscore are helpers and left out.
    """
    parts: dict[str, type[T]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("_"):
            continue
        module = import_module(f"{package.__name__}.{info.name}")
        for value in vars(module).values():
            is_own = isinstance(value, type) and value.__module__ == module.__name__
            if is_own and issubclass(value, base):
                parts[yaml_name(value)] = value
    return dict(sorted(parts.items()))


@cache
def detector_classes() -> Mapping[str, type[Detector]]:
    """Return the detector classes by `kind`."""
    return discover(detectors_package, Detector)  # type: ignore[type-abstract]


@cache
def action_classes() -> Mapping[str, type[Action]]:
    """Return the action classes by verb."""
    return discover(actions_package, Action)


@cache
def notifiers() -> Mapping[str, type[Settings]]:
    """Return the settings classes of the notifiers by name."""
    return kinds()


def name_of(part: Detector | Action) -> str:
    """Return the YAML name of a detector or an action."""
    return yaml_name(type(part))


RANK = "rank"  # a parameter of every fault: the only rank that it strikes
FORM = "FAULT@STEP or FAULT:name=value,name=value@STEP"


def parse_drill(text: str) -> DrillOrder:
    """Return the order that a text asks for, with every parameter filled in.

    Raises:
        UsageError: no such fault or parameter, or not of this form.
    """
    head, separator, step = text.rpartition("@")
    if not separator or not step.isdecimal():
        raise UsageError(f"--drill {text!r}: no step", hint=f"write {FORM}, e.g. lr_spike@150")
    name, _, settings = head.partition(":")
    catalog = faults.catalog()
    if name not in catalog:
        raise UsageError(f"--drill {text!r}: no fault {name!r}", hint=did_you_mean(name, catalog))
    params: dict[str, str] = {}
    rank: int | UnsetType = UNSET
    for pair in filter(None, settings.split(",")):
        key, equals, value = pair.partition("=")
        if key == RANK and value.isdecimal():
            rank = int(value)
            continue
        if key not in catalog[name].PARAMS or not equals:
            hint = did_you_mean(key, catalog[name].PARAMS) or f"{name} has no parameters"
            raise UsageError(f"--drill {text!r}: {name} has no parameter {key!r}", hint=hint)
        params[key] = value
    try:
        return DrillOrder(name, int(step), faults.complete(name, params), rank)
    except ValueError as error:
        raise UsageError(f"--drill {text!r}: {error}") from None


class DrillParameter(Struct, frozen=True):
    """A parameter of a fault."""

    default: bool | int | float | str
    meaning: str


class DrillFacts(Struct, frozen=True):
    """A fault: what it does, the metric that it moves, its parameters."""

    drill: str
    does: str
    moves: str | None
    parameters: Mapping[str, DrillParameter]


def drill_facts() -> dict[str, DrillFacts]:
    """Return each fault that can be injected, by name."""
    return {
        name: DrillFacts(
            name,
            fault.MEANING,
            fault.MOVES or None,
            {key: DrillParameter(*parameter) for key, parameter in fault.PARAMS.items()},
        )
        for name, fault in faults.catalog().items()
    }
