"""Validate a tree of nodes with `jsonschema`; each error becomes a problem at its place.

The message comes from the schema; a hint says what was probably meant. `jsonschema` is imported at
the first mistake.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ..core.model.values import DURATION
from .diagnostics import Problems, did_you_mean, quote_names
from .yaml_document import ListNode, MapNode, Node, Scalar, plain_yaml, position_inside

if TYPE_CHECKING:
    from jsonschema import ValidationError

MAX_OPTIONS = 60  # names in a list of what there is: more than there are kinds of detectors
# Spellings that people know from other tools and difflib does not find.
ALIASES = {
    "severity": "sev",
    "runbook": "run",
    "name": "id",
    "condition": "when",
    "per_steps": "per",
}


def validate_node(
    schema: Mapping[str, Any],
    node: Node,
    problems: Problems,
    label: str,
    *,
    excused: Collection[str] = (),
) -> set[str]:
    """Note every mistake in `node`.

    Args:
        label: the name of the node in messages; "" for a whole file.
        excused: required keys whose absence is no mistake of its own.

    Returns:
        The keys of `node` that have a mistake; "" for a mistake of the node itself.
    """
    value = plain_yaml(node)
    wrong: set[str] = set()
    reporter = _Reporter(node, problems, label, excused)
    for error in _validator()(schema).iter_errors(value):
        wrong.add(str(error.path[0]) if error.path else "")
        reporter.report(error)
    return wrong


def unknown_keys(
    node: MapNode,
    names: Collection[str],
    problems: Problems,
    label: str,
    *,
    used: Collection[str] | None = None,
) -> set[str]:
    """Note the keys of a mapping that it cannot have.

    Args:
        used: the keys that were not meant, since they are there already; None: those of `node`
            that are written in the same file.

    Returns:
        The keys that were probably meant.
    """
    suggestions: set[str] = set()
    for key, (key_node, _) in node.pairs.items():
        if key not in names:
            # A key that a base has may be meant by the file that extends it.
            siblings = [n for n, (k, _) in node.pairs.items() if k.source is key_node.source]
            used_keys = siblings if used is None else used
            hint = did_you_mean(
                ALIASES.get(key, key), [name for name in names if name not in used_keys]
            )
            problems.add(key_node, f"{label or 'the file'} has no key {key!r}", hint)
            suggestions.update(name for name in names if hint == f"did you mean {name!r}?")
    return suggestions


def describe_schema(schema: Mapping[str, Any]) -> str:
    """Return a description of the values of a schema: "a whole number", "a time such as 30s"."""
    if "patternErrorMessage" in schema:
        return str(schema["patternErrorMessage"]).removeprefix("should be ")
    if "anyOf" in schema:
        return " or ".join(
            describe_schema(option) for option in schema["anyOf"] if option.get("type") != "null"
        )
    if "enum" in schema or "const" in schema:
        options = [
            option for option in schema.get("enum", [schema.get("const")]) if option is not None
        ]
        return f"one of {quote_names(options)}" if len(options) > 1 else repr(options[0])
    match _type(schema):
        case "integer":
            return "a number of steps" if schema.get("x-unit") == "steps" else "a whole number"
        case "boolean":
            return "true or false"
        case "string":
            return "text"
        case "array":
            size = f" of {schema['minItems']}" if "minItems" in schema else ""
            return f"a list{size}, each item {describe_schema(schema['items'])}"
        case "object":
            values = schema.get("additionalProperties")
            if isinstance(values, dict):
                return f"a mapping from names to {describe_schema(values)}"
            return f"a mapping with {quote_names(schema.get('properties', ()))}"
        case "number":
            return "a number"
    return "anything"


def _type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "")
    return kind if isinstance(kind, str) else str(kind[0])


class _Reporter:
    """Turns the errors of one validation into problems (`Any`: the stubs type them loosely)."""

    def __init__(
        self, root: Node, problems: Problems, label: str, excused: Collection[str]
    ) -> None:
        self.root = root
        self.problems = problems
        self.what = label
        self.excused = excused

    def report(self, error: Any) -> None:
        """Note one error."""
        node, name = self.root, self.what
        for key in error.absolute_path:
            if isinstance(node, ListNode) and isinstance(key, int):
                node, name = node.items[key], f"{name}[{key}]"
            elif isinstance(node, MapNode):
                node, name = node.pairs[str(key)][1], f"{name}.{key}" if name else str(key)
        report = _REPORTS.get(str(error.validator), _Reporter._report_value)
        report(self, error, node, name)

    def _keys(self, error: Any, node: Node, name: str) -> None:
        assert isinstance(node, MapNode)
        properties = error.schema["properties"]
        if title := error.schema.get("title"):
            for key, (key_node, _) in node.pairs.items():
                if key not in properties:
                    self.problems.add(
                        key_node, f"{name}: no {title} {key!r}", did_you_mean(key, properties)
                    )
        else:
            unknown_keys(node, properties, self.problems, name)

    def _required(self, error: Any, node: Node, name: str) -> None:
        assert isinstance(node, MapNode)
        excused = self.excused
        if error.absolute_path:  # a misspelt key is the mistake: report it once
            excused = unknown_keys(node, error.schema["properties"], Problems(), "")
        missing = [k for k in error.validator_value if k not in node.pairs and k not in excused]
        for key in missing:
            options = error.schema["properties"].get(key, {}).get("enum")
            hint = None if options is None else f"one of {quote_names(options, MAX_OPTIONS)}"
            self.problems.add(node, f"{name or 'the file'} needs the key {key!r}", hint)

    def _names(self, error: Any, node: Node, name: str) -> None:
        assert isinstance(node, MapNode)
        key = str(error.instance)
        text = f"a name in {name} should be {describe_schema(error.schema)}, not {key[:40]!r}"
        self.problems.add(node.pairs[key][0], text)

    def _any_of(self, error: Any, node: Node, name: str) -> None:
        options: list[dict[str, Any]] = error.validator_value
        for option in options:
            if isinstance(error.instance, str) and (
                keyed := option.get("properties", {}).get(error.instance)
            ):
                needed = quote_names(keyed["required"])
                self.problems.add(node, f"{name}.{error.instance} needs the key {needed}")
                return
        groups: dict[Any, list[Any]] = {}
        for inner in error.context or ():
            groups.setdefault(inner.schema_path[0], []).append(inner)
        fitting = [errors for errors in groups.values() if not any(map(_of_another_type, errors))]
        if len(fitting) == 1:
            for inner in fitting[0]:
                self.report(inner)
        else:
            self._report_value(error, node, name)

    def _limit(self, error: Any, node: Node, name: str) -> None:
        bound = "most" if error.validator == "maximum" else "least"
        text = f"should be at {bound} {error.validator_value:.16g}, not {error.instance:.16g}"
        self.problems.add(node, f"{name} {text}")

    def _size(self, error: Any, node: Node, name: str) -> None:
        expected, size = error.validator_value, len(error.instance)
        unit = "key" if isinstance(node, MapNode) else "item"
        plural = "" if expected == 1 else "s"
        self.problems.add(node, f"{name} should hold {expected} {unit}{plural}, not {size}")

    def _pattern(self, error: Any, node: Node, name: str) -> None:
        if "propertyNames" in error.schema_path:
            self._names(error, node, name)
            return
        assert isinstance(node, Scalar)
        token, is_reported = error.schema.get("x-token"), False
        for match in re.finditer(r"\S+", error.instance) if token else ():
            if not re.fullmatch(token, match[0]):
                is_reported = True
                text = f"should be {describe_schema(error.schema)}; "
                text += f"{match[0][:40]!r} is not part of one"
                hint = "value, then perhaps +step or *factor, then perhaps xCOUNT"
                self.problems.add(position_inside(node, match.start()), f"{name} {text}", hint)
        if not is_reported:
            self._report_value(error, node, name)

    def _report_value(self, error: Any, node: Node, name: str) -> None:
        schema = error.schema
        value = error.instance
        hint = None
        if error.validator == "enum" and isinstance(value, str):
            options = [option for option in error.validator_value if option is not None]
            hint = did_you_mean(value, options)
            if title := schema.get("title"):
                self.problems.add(node, f"{name}: no {title} {value!r}", hint)
                return
            hint = hint if hint and "did you" in hint else None
        elif isinstance(value, float) and not math.isfinite(value) and _is_number(schema):
            self.problems.add(node, f"{name} should be a finite number, not {value}")
            return
        elif DURATION.pattern in schema.get("pattern", "") and _is_real(value):
            hint = f"write {value}s, {value}m"
            self.problems.add(node, f"{name} is a time and needs a unit", hint)
            return
        else:
            hint = _hint(schema, node)
        self.problems.add(
            node, f"{name} should be {describe_schema(schema)}, not {node.shape}", hint
        )


_REPORTS: dict[str, Callable[[_Reporter, Any, Node, str], None]] = {
    "additionalProperties": _Reporter._keys,
    "required": _Reporter._required,
    "anyOf": _Reporter._any_of,
    "pattern": _Reporter._pattern,
    **dict.fromkeys(("minimum", "maximum"), _Reporter._limit),
    **dict.fromkeys(("minItems", "maxItems"), _Reporter._size),
    **dict.fromkeys(("minProperties", "maxProperties"), _Reporter._size),
}


def _of_another_type(error: Any) -> bool:
    """Return whether an alternative was not meant: the value has another type."""
    here = len(error.relative_path) == 0
    if error.validator == "enum":
        return here and not isinstance(error.instance, str)
    return here and error.validator == "type"


def _hint(schema: Mapping[str, Any], node: Node) -> str | None:
    value = node.value if isinstance(node, Scalar) else None
    if DURATION.pattern in schema.get("pattern", ""):
        return "30s, 5m, 2h or 500ms, without spaces" if isinstance(value, str) else None
    if _is_number(schema) and isinstance(value, str):
        if DURATION.fullmatch(value):
            return "a bare number counts steps" if "x-unit" in schema else "it has no unit"
        if re.fullmatch(r"[-+]?[0-9][0-9_,]*", value):
            return "write the digits only" if len(value) < 19 else "that is too large"
    if _type(schema) == "boolean":
        return "only true and false are booleans"
    if _type(schema) == "string" and isinstance(node, Scalar) and node.text:
        return None if isinstance(value, str) else "put quotes around it"
    return None


def _is_number(schema: Mapping[str, Any]) -> bool:
    return _type(schema) in ("integer", "number")


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@cache
def _validator() -> Any:
    """Return draft-07 with finite numbers and patterns that the whole text matches."""
    from jsonschema import Draft7Validator, ValidationError
    from jsonschema.validators import extend

    def finite(checker: Any, value: object) -> bool:
        return _is_real(value) and math.isfinite(value)  # type: ignore[arg-type]

    def pattern(checker: Any, regex: str, text: object, schema: Any) -> Iterator[ValidationError]:
        # Python's `$` matches before a last line break, ECMA's, which the schema means, does not.
        if isinstance(text, str) and not re.fullmatch(regex, text):
            yield ValidationError(f"{text!r} does not match {regex!r}")

    def reference(*_: object) -> Iterator[ValidationError]:
        return iter(())  # a part that is validated by itself, see `sections.part_mark`

    def required(
        checker: Any, keys: Iterable[str], value: object, schema: Any
    ) -> Iterator[ValidationError]:
        if isinstance(value, dict) and not value.keys() >= set(keys):  # one error for all of them
            yield ValidationError("keys are missing")

    types = Draft7Validator.TYPE_CHECKER.redefine("number", finite)
    keywords = {"pattern": pattern, "required": required, "$ref": reference}
    return extend(Draft7Validator, keywords, type_checker=types)  # type: ignore[no-untyped-call]
