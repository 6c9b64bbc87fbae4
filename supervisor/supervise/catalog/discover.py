"""Find detectors, actions, notifiers: each is a class, named in YAML after it.

The face of their package lists them, so that a policy imports only what it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from supervise_probe import faults

from .. import actions, detectors
from ..core.model.action import Action
from ..core.model.interfaces import Detector, snake_case, yaml_name
from ..core.model.payload import DrillOrder
from ..errors import UsageError
from ..exports import LazyClasses, offered_names
from ..notifiers import KINDS, Settings
from .diagnostics import did_you_mean


def _classes_of(package: str) -> Mapping[str, type[Any]]:
    """Return the classes that the face of a package offers, by their YAML names."""
    names = {snake_case(name): name for name in offered_names(package) if not name.isupper()}
    return LazyClasses(package, dict(sorted(names.items())))


@cache
def detector_classes() -> Mapping[str, type[Detector]]:
    """Return the detector classes by `kind`."""
    return _classes_of(detectors.__name__)


@cache
def action_classes() -> Mapping[str, type[Action]]:
    """Return the action classes by verb."""
    return _classes_of(actions.__name__)


def notifier_classes() -> Mapping[str, type[Settings]]:
    """Return the settings classes of the notifiers by name."""
    return KINDS


def yaml_name_of(part: Detector | Action) -> str:
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
    catalog = faults.fault_classes()
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
        return DrillOrder(name, int(step), faults.complete_parameters(name, params), rank)
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
        for name, fault in faults.fault_classes().items()
    }
