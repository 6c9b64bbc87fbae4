"""Detectors and runbook steps as values in a file: a `kind`, or a verb, decides which keys fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...core.model.action import Action
from ...core.model.interfaces import Detector
from .. import discover
from ..diagnostics import Place, Problems
from ..schema import validation
from ..schema.dataclass_types import build, keys_of, mistakes, read_form, record_schema, written
from ..schema.field_types import BAD, FieldType
from ..yaml_document import MapNode, Node, Scalar, first_text

METRIC = re.compile(r"[A-Za-z_][A-Za-z0-9_./:@-]{0,127}")
METRIC_WORDS = "a letter or _, then letters, digits and _ . / : @ -"
BASELINE_KEYS = ("window", "min")  # a detector that has both keeps a baseline
WINDOWS = ("window", "slow", "ref")  # samples that a detector looks back on; `freeze` is in them


def read_detector(
    node: Node,
    problems: Problems,
    what: str,
    *,
    baseline: Mapping[str, Any] | None = None,
    overridden: Mapping[str, Place] | None = None,
) -> Any:
    """Return the detector that a mapping `{kind: robust_z, metric: ..., gt: 6}` describes, or BAD.

    Args:
        baseline: the policy's `window` and `min`, for detectors that keep a baseline.
        overridden: see `dataclass_types.read_form`.
    """
    if validation.check(_kind_schema(), node, problems, what):
        return BAD
    form = _form(node)
    assert form is not None
    assert isinstance(node, MapNode)
    keys = node.without("kind")
    defaults = _defaults(form, node, baseline or {})
    detector = read_form(form, keys, problems, what, defaults=defaults, overridden=overridden)
    wrong = [] if detector is BAD else [m for m in detector.metrics if not METRIC.fullmatch(m)]
    for metric in wrong:
        place = first_text(node, metric) if metric else node.place("metric")
        problems.add(place, f"{what}: {metric!r} is no name of a metric", METRIC_WORDS)
    return BAD if wrong else detector


def read_valid_keys(node: Node) -> Any:
    """Return a detector of those keys that are right by themselves, or BAD; notes nothing."""
    form = _form(node)
    if form is None or not isinstance(node, MapNode):
        return BAD
    wrong = mistakes(form, node.without("kind"), Problems(), "")
    return read_detector(node.without(*wrong), Problems(), "")


def write_detector(detector: Detector) -> dict[str, Any]:
    """Return a detector as plain data."""
    return {"kind": discover.name_of(detector), **written(detector)}


def _form(node: Node) -> type[Detector] | None:
    kind = node.get("kind") if isinstance(node, MapNode) else None
    return discover.detectors().get(kind.text) if isinstance(kind, Scalar) else None


@cache
def _kind_schema() -> dict[str, Any]:
    kind = {"title": "kind of detector", "enum": list(discover.detectors())}
    return {"type": "object", "required": ["kind"], "properties": {"kind": kind}}


def _defaults(form: type, node: MapNode, baseline: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the defaults of a detector: the baseline, and bounds that fit in it."""
    keys = keys_of(form)
    found = dict(baseline) if all(key in keys for key in BASELINE_KEYS) else {}
    given = {key: node.get(key) for key in WINDOWS if key in keys}
    sizes = [each.value for each in given.values() if isinstance(each, Scalar)]
    window = next((each for each in sizes if type(each) is int), found.get("window"))
    for key in ("min", "freeze") if window is not None else ():
        if key in keys:
            found[key] = max(1, min(window, found.get(key, keys[key].default)))
    return found


@dataclass(frozen=True, slots=True)
class StepType(FieldType):
    """`pause`, or `rollback: {at_least: 10}`: a verb alone, or a verb with its keys."""

    def schema(self) -> dict[str, Any]:
        keyed = {
            verb: {"description": summary(form), **_nullable(form)}
            for verb, form in discover.actions().items()
        }
        alone = [verb for verb, form in keyed.items() if "required" not in form]
        mapping = {"type": "object", "properties": keyed, "additionalProperties": False}
        return {
            "anyOf": [
                {"title": "action", "enum": alone},
                {"title": "action", **mapping, "minProperties": 1, "maxProperties": 1},
            ]
        }

    def _build(self, node: Node, problems: Problems, what: str) -> Any:
        if isinstance(node, MapNode):
            ((verb, (_, keys)),) = node.pairs.items()
        else:
            assert isinstance(node, Scalar)
            verb, keys = node.text, node
        return build(discover.actions()[verb], keys, problems, f"{what}.{verb}")

    def fits(self, node: Node) -> bool:
        return isinstance(node, MapNode | Scalar)

    def holds(self, value: Any) -> bool:
        return isinstance(value, Action)

    def write(self, value: Any) -> Any:
        keys = written(value)
        return {discover.name_of(value): keys} if keys else discover.name_of(value)


def _nullable(form: type) -> dict[str, Any]:
    """An action without required keys may be written as `pause:`."""
    schema = record_schema(form)
    return schema if "required" in schema else {**schema, "type": ["object", "null"]}


@dataclass(frozen=True, slots=True)
class KeysOf(FieldType):
    """The keys of one action, without its verb."""

    verb: str

    def schema(self) -> dict[str, Any]:
        return record_schema(discover.actions()[self.verb])

    def _build(self, node: Node, problems: Problems, what: str) -> Any:
        return build(discover.actions()[self.verb], node, problems, what)

    def write(self, value: Any) -> Any:
        return written(value)


@dataclass(frozen=True, slots=True)
class NotifiersType(FieldType):
    """`{slack: {url_env: SLACK_URL}}`: notifiers by name; the console is always one of them."""

    def schema(self) -> dict[str, Any]:
        keyed = {name: record_schema(form) for name, form in discover.notifiers().items()}
        return {
            "title": "notifier",
            "type": "object",
            "properties": keyed,
            "additionalProperties": False,
        }

    def _build(self, node: Node, problems: Problems, what: str) -> Any:
        assert isinstance(node, MapNode)
        found = {
            name: build(discover.notifiers()[name], keys, problems, f"{what}.{name}")
            for name, (_, keys) in node.pairs.items()
        }
        if any(settings is BAD for settings in found.values()):
            return BAD
        return {
            name: {key: value for key, value in vars(settings).items() if value not in (None, ())}
            for name, settings in found.items()
        }

    def write(self, value: Any) -> Any:
        known = discover.notifiers()
        return {name: written(known[name](**keys)) for name, keys in value.items()}


def summary(form: type) -> str:
    """Return the first sentence of a class's docstring, on one line."""
    text = " ".join((form.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"\.\s+(?=[A-Z`])", text)[0].rstrip(".") + "."
