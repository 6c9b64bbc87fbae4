"""Detectors and runbook steps as values in a file: a `kind`, or a verb, decides which keys fit."""

from __future__ import annotations

import re
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass
from typing import Any

from ...core.model.action import Action
from ..document.diagnostics import Place, Problems, did_you_mean
from ..document.nodes import Mapping, Node, Scalar, first_text
from ..inventory import discover
from ..schema.dataclass_types import build, keys_of, record_schema, written
from ..schema.field_types import BAD, FieldType

METRIC = re.compile(r"[A-Za-z_][A-Za-z0-9_./:@-]{0,127}")
METRIC_WORDS = "a letter or _, then letters, digits and _ . / : @ -"
BASELINE_KEYS = ("window", "min")  # a detector that has both keeps a baseline
WINDOWS = ("window", "slow", "ref")  # samples that a detector looks back on; `freeze` is in them


@dataclass(frozen=True, slots=True)
class DetectorKind(FieldType):
    """`{kind: robust_z, metric: ..., gt: 6}`: `kind` names the class, the rest are its keys."""

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        return read_detector(node, problems, what)

    def fits(self, node: Node) -> bool:
        return isinstance(node, Mapping)

    def write(self, value: Any) -> Any:
        return {"kind": discover.name_of(value), **written(value)}

    def schema(self) -> dict[str, Any]:
        return {"$ref": "#/definitions/detector"}

    def words(self) -> str:
        return "a mapping with 'kind' and the keys of that kind"


def read_detector(
    node: Node,
    problems: Problems,
    what: str,
    *,
    baseline: AbstractMapping[str, Any] | None = None,
    overridden: AbstractMapping[str, Place] | None = None,
) -> Any:
    """Return the detector that a mapping describes, or BAD.

    Args:
        baseline: the policy's `window` and `min`, for detectors that keep a baseline.
        overridden: see `dataclass_types.build`.
    """
    if not isinstance(node, Mapping):
        return DetectorKind().refuse(node, problems, what)
    classes = discover.detectors()
    kind = node.get("kind")
    if kind is None:
        problems.add(node, f"{what} needs the key 'kind'", f"one of {', '.join(classes)}")
        return BAD
    name = kind.value if isinstance(kind, Scalar) else None
    if not isinstance(name, str) or name not in classes:
        hint = did_you_mean(name, classes) if isinstance(name, str) else None
        problems.add(kind, f"{what} has an unknown kind, {kind.shape}", hint)
        return BAD
    form = classes[name]
    detector = build(
        form,
        node.without("kind"),
        problems,
        what,
        defaults=_defaults(form, node, baseline or {}),
        overridden=overridden,
    )
    wrong = [] if detector is BAD else [m for m in detector.metrics if not METRIC.fullmatch(m)]
    for metric in wrong:
        place = first_text(node, metric) if metric else node.place("metric")
        problems.add(place, f"{what}: {metric!r} is no name of a metric", METRIC_WORDS)
    return BAD if wrong else detector


def legible_part(node: Node) -> Any:
    """Return a detector of those keys that are right by themselves, or BAD; notes nothing."""
    kind = node.get("kind") if isinstance(node, Mapping) else None
    form = discover.detectors().get(kind.text) if isinstance(kind, Scalar) else None
    if form is None or not isinstance(node, Mapping):
        return BAD
    keys, nobody = keys_of(form), Problems()
    wrong = [
        key
        for key, (_, value) in node.pairs.items()
        if key != "kind" and (key not in keys or keys[key].kind.read(value, nobody, "") is BAD)
    ]
    return read_detector(node.without(*wrong), nobody, "")


def _defaults(
    form: type, node: Mapping, baseline: AbstractMapping[str, Any]
) -> AbstractMapping[str, Any]:
    """Return what a detector has that does not say: its baseline, and bounds that fit in it."""
    keys = keys_of(form)
    found = dict(baseline) if all(key in keys for key in BASELINE_KEYS) else {}
    given = {key: node.get(key) for key in WINDOWS if key in keys}
    told = [each.value for each in given.values() if isinstance(each, Scalar)]
    window = next((each for each in told if type(each) is int), found.get("window"))
    for key in ("min", "freeze") if window is not None else ():
        if key in keys:
            found[key] = max(1, min(window, found.get(key, keys[key].default)))
    return found


@dataclass(frozen=True, slots=True)
class StepKind(FieldType):
    """`pause`, or `rollback: {at_least: 10}`: a verb alone, or a verb with its keys."""

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        if isinstance(node, Mapping) and len(node.pairs) == 1:
            ((verb, (at, keys)),) = node.pairs.items()
            if isinstance(keys, Scalar) and keys.value is None:
                keys = Mapping(keys.source, at.line, at.col, {})
        elif isinstance(node, Scalar) and isinstance(node.value, str):
            verb, at, keys = node.text, node, Mapping(node.source, node.line, node.col, {})
        else:
            return self.refuse(node, problems, what)
        if verb not in discover.actions():
            problems.add(at, f"{what}: no action {verb!r}", did_you_mean(verb, discover.actions()))
            return BAD
        return build(discover.actions()[verb], keys, problems, f"{what}.{verb}")

    def fits(self, node: Node) -> bool:
        return isinstance(node, Mapping | Scalar)

    def holds(self, value: Any) -> bool:
        return isinstance(value, Action)

    def write(self, value: Any) -> Any:
        keys = written(value)
        return {discover.name_of(value): keys} if keys else discover.name_of(value)

    def schema(self) -> dict[str, Any]:
        return {"$ref": "#/definitions/step"}

    def words(self) -> str:
        return "an action such as `pause` or `rollback: {at_least: 10}`"


@dataclass(frozen=True, slots=True)
class KeysOf(FieldType):
    """The keys of one action, where the verb goes without saying."""

    verb: str

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        return build(discover.actions()[self.verb], node, problems, what)

    def fits(self, node: Node) -> bool:
        return isinstance(node, Mapping)

    def write(self, value: Any) -> Any:
        return written(value)

    def schema(self) -> dict[str, Any]:
        return record_schema(discover.actions()[self.verb])

    def words(self) -> str:
        return f"a mapping with the keys of {self.verb}"


@dataclass(frozen=True, slots=True)
class NotifyKind(FieldType):
    """`{slack: {url_env: SLACK_URL}}`: notifiers by name; the console is always one of them."""

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        if not isinstance(node, Mapping):
            return self.refuse(node, problems, what)
        found: dict[str, Any] = {}
        for name, (at, keys) in node.pairs.items():
            form = discover.notifiers().get(name)
            if form is None:
                hint = did_you_mean(name, discover.notifiers())
                problems.add(at, f"{what}: no notifier {name!r}", hint)
                found[name] = BAD
            else:
                read = build(form, keys, problems, f"{what}.{name}")
                found[name] = read if read is BAD else written(read)
        return BAD if BAD in found.values() else found

    def fits(self, node: Node) -> bool:
        return isinstance(node, Mapping)

    def schema(self) -> dict[str, Any]:
        keyed = {name: record_schema(form) for name, form in discover.notifiers().items()}
        return {"type": "object", "properties": keyed, "additionalProperties": False}

    def words(self) -> str:
        return f"a mapping with {', '.join(discover.notifiers())}"


@dataclass(frozen=True, slots=True)
class Later(FieldType):
    """A value that is read when more is known: `read` gives its node."""

    kind: FieldType

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        return node

    def fits(self, node: Node) -> bool:
        return True

    def schema(self) -> dict[str, Any]:
        return self.kind.schema()

    def words(self) -> str:
        return self.kind.words()


def definitions() -> dict[str, Any]:
    """Return the JSON Schemas of all detectors and steps.

    Detectors are told apart by `kind` with if/then: under `oneOf` a validator blames the wrong
    alternative.
    """
    kinds, verbs = discover.detectors(), discover.actions()
    branches = [
        {
            "if": {"properties": {"kind": {"const": name}}, "required": ["kind"]},
            "then": {
                "description": summary(form),
                **record_schema(form, {"kind": {"const": name}}),
            },
        }
        for name, form in kinds.items()
    ]
    keyed = {
        name: {"description": summary(form), **_nullable(form)} for name, form in verbs.items()
    }
    alone = [
        name
        for name, form in verbs.items()
        if not any(key.required for key in keys_of(form).values())
    ]
    return {
        "detector": {
            "type": "object",
            "required": ["kind"],
            "properties": {"kind": {"enum": list(kinds)}},
            "allOf": branches,
        },
        "step": {
            "anyOf": [
                {"enum": alone},
                {
                    "type": "object",
                    "properties": keyed,
                    "additionalProperties": False,
                    "minProperties": 1,
                    "maxProperties": 1,
                },
            ]
        },
    }


def _nullable(form: type) -> dict[str, Any]:
    """An action without required keys may stand as `pause:` with nothing behind the colon."""
    if any(key.required for key in keys_of(form).values()):
        return record_schema(form)
    return {**record_schema(form), "type": ["object", "null"]}


def summary(form: type) -> str:
    """Return the first sentence of a class's docstring, on one line."""
    text = " ".join((form.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"\.\s+(?=[A-Z`])", text)[0].rstrip(".") + "."
