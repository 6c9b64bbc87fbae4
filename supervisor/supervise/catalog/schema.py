"""Sections of a file: read from nodes, written as plain data, described as JSON Schema.

A section is a msgspec Struct, or a frozen dataclass such as a detector. Its fields are its YAML
keys (a trailing underscore is dropped: `for_` is `for`), and a key that no field has is a mistake.
Valid nodes are converted by msgspec alone. Only for others `validation` lists all mistakes, each at
its place.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, ValidationError

from ..core.model.action import Action
from ..core.model.values import Parsed
from . import validation
from .diagnostics import Place, Problems, near_miss
from .yaml_document import ListNode, MapNode, Node, plain_yaml

BAD: Final[Any] = object()  # what is returned for a section whose mistakes are noted
MAX_INTEGER = 2**53  # whole numbers beyond it are not exact in JSON
SURE = 0.75  # minimum similarity at which a misspelt key is read as the similar one

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a section."""

    name: str
    attribute: str
    hint: Any
    required: bool
    default: Any  # None for a required one
    doc: str  # one line for people


@cache
def struct_of(form: type) -> type[Struct]:
    """Return the Struct of a section; one with the same fields for a dataclass."""
    if issubclass(form, Struct):
        return form
    hints = typing.get_type_hints(form, include_extras=True)
    columns = []
    for field in dataclasses.fields(form):  # type: ignore[arg-type]
        default: dict[str, Any] = {}
        if field.default is not dataclasses.MISSING:
            default["default"] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default["default_factory"] = field.default_factory
        if field.init:
            column = msgspec.field(name=field.name.rstrip("_"), **default)
            columns.append((field.name, hints[field.name], column))
    return msgspec.defstruct(
        form.__name__, columns, frozen=True, kw_only=True, forbid_unknown_fields=True
    )


@cache
def keys_of(form: type) -> dict[str, Key]:
    """Return the keys of a section by their YAML names, in field order."""
    keys = {}
    for field in msgspec.structs.fields(struct_of(form)):
        default = None if field.default is msgspec.NODEFAULT else field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        marks = typing.get_args(field.type)[1:] if _origin(field.type) is Annotated else ()
        docs = [m.description for m in marks if isinstance(m, Meta) and m.description]
        keys[field.encode_name] = Key(
            field.encode_name, field.name, field.type, field.required, default, (docs or [""])[-1]
        )
    return keys


def convert_section(data: Any, form: type[T]) -> T:
    """Return the section that plain data describe.

    Raises:
        ValidationError: they are no such section, or hold a number that JSON cannot.
    """
    if not _is_exact(data):
        raise ValidationError("a number is too large, or not finite")
    kind: type = form
    struct = _value(data, struct_of(kind))
    if isinstance(struct, form):
        return struct
    return form(**{key.attribute: getattr(struct, key.attribute) for key in keys_of(kind).values()})


def _value(data: Any, hint: Any) -> Any:
    return msgspec.convert(data, hint, dec_hook=lambda kind, value: kind.decode(value))


def _is_exact(data: Any) -> bool:
    if isinstance(data, float):
        return math.isfinite(data)
    if isinstance(data, int):
        return -MAX_INTEGER <= data <= MAX_INTEGER
    if isinstance(data, dict):
        return all(map(_is_exact, data.values()))
    return not isinstance(data, list) or all(map(_is_exact, data))


def read_section(
    form: type,
    node: Node,
    problems: Problems,
    label: str,
    *,
    defaults: Mapping[str, Any] | None = None,
    overridden: Mapping[str, Place] | None = None,
    lenient: bool = False,
) -> Any:
    """Return the section in a node; BAD after noting every mistake in it.

    Args:
        label: the name of the node in messages; "" for a whole file.
        defaults: values for keys that the node leaves out, before the fields' own defaults.
        overridden: where keys were overridden; a value that contradicts the others is reported
            there, since that is the line to change.
        lenient: after noting mistakes go on with the defaults, so that more can be found; a key
            without one that is missing or wrong is None then. A misspelt key is read as the
            one that was probably meant, and added to the node as that.
    """
    count, wrong = problems.count, set[str]()
    section: Any = None
    if isinstance(node, MapNode):
        try:
            section = convert_section({**(defaults or {}), **plain_yaml(node)}, form)
        except ValidationError:
            section = None
    if section is None:
        wrong = find_mistakes(form, node, problems, label, overridden=overridden, rename=lenient)
        if not isinstance(node, MapNode) or (problems.count > count and not lenient):
            return BAD
        section = _filled(form, node, problems, label, defaults or {}, wrong)
    for location, message in _flaws(section, node, label, overridden, wrong=wrong):
        problems.add(location, message)
    return BAD if problems.count > count and not lenient else section


def find_mistakes(
    form: type,
    node: Node,
    problems: Problems,
    label: str,
    *,
    overridden: Mapping[str, Place] | None = None,
    rename: bool = False,
) -> set[str]:
    """Note what is wrong with a node, and return the keys in which it is; see `read_section`."""
    if not isinstance(node, MapNode):
        return validation.validate_node(json_schema(form), node, problems, label)
    keys = keys_of(form)
    # Over what a pack has written, a policy may have meant a key that is there already.
    changed = list(overridden) if overridden else None
    suggestions = validation.unknown_keys(node, keys, problems, label, used=changed)
    used = changed or list(node.pairs)
    unknown = [key for key in node.pairs if key not in keys]
    for key in unknown if rename else ():
        free = [name for name in keys if name not in used]
        sure = near_miss(validation.ALIASES.get(key, key), free, SURE)
        if sure is not None:
            node.pairs[sure] = node.pairs[key]  # other checks look for it there
    valid = node.without(*unknown)
    return {
        *unknown,
        *validation.validate_node(json_schema(form), valid, problems, label, excused=suggestions),
    }


def _filled(
    form: type,
    node: MapNode,
    problems: Problems,
    label: str,
    defaults: Mapping[str, Any],
    wrong: set[str],
) -> Any:
    """Return the section with the right values of a node, then `defaults`, then its own."""
    values: dict[str, Any] = {}
    for key in keys_of(form).values():
        value_node = node.get(key.name)
        if value_node is None or key.name in wrong:
            if key.name in defaults or key.required:
                values[key.attribute] = defaults.get(key.name)
            continue
        try:
            values[key.attribute] = _value(_integral(plain_yaml(value_node)), key.hint)
        except ValidationError as error:  # msgspec and the schema disagree
            problems.add(
                value_node, f"{label}.{key.name}: {error}" if label else f"{key.name}: {error}"
            )
            values[key.attribute] = key.default
    return form(**values)


def _integral(data: Any) -> Any:
    """Return data with `1e3`, a whole number for the schema, as an int."""
    if isinstance(data, float) and data.is_integer():
        return int(data)
    if isinstance(data, dict):
        return {key: _integral(value) for key, value in data.items()}
    return [_integral(value) for value in data] if isinstance(data, list) else data


def _flaws(
    section: Any,
    node: Node,
    label: str,
    overridden: Mapping[str, Place] | None = None,
    *,
    wrong: Collection[str] = (),
) -> Iterator[tuple[Place, str]]:
    """Yield where values contradict each other, and how: `find_errors` of each section.

    Args:
        wrong: keys of `section` that have other mistakes; it cannot be checked as a whole then.
    """
    is_whole = hasattr(section, "find_errors") and not wrong
    for attribute, message in section.find_errors() if is_whole else ():
        name = attribute.rstrip("_")
        location: Place = node.locate(name) if isinstance(node, MapNode) else node
        if overridden:
            location = overridden.get(name) or next(iter(overridden.values()))
        yield location, f"{label}.{name}: {message}" if label else f"{name}: {message}"
    form: type = type(section)
    for key in keys_of(form).values():
        value_node = node.get(key.name) if isinstance(node, MapNode) else None
        value = getattr(section, key.attribute)
        if value_node is not None and key.name not in wrong and type(value) not in _ATOMS:
            name = f"{label}.{key.name}" if label else key.name
            yield from _inner_flaws(value, value_node, name)


_ATOMS = frozenset((str, bool, int, float, type(None)))  # they contradict nothing in themselves


def _inner_flaws(value: Any, node: Node, label: str) -> Iterator[tuple[Place, str]]:
    if isinstance(value, tuple) and isinstance(node, ListNode):
        for i, (item, item_node) in enumerate(zip(value, node.items, strict=True)):
            if type(item) not in _ATOMS:
                yield from _inner_flaws(item, item_node, f"{label}[{i}]")
    elif isinstance(value, dict) and isinstance(node, MapNode):
        for name, item in value.items():
            yield from _inner_flaws(item, node.locate(name), f"{label}.{name}")
    elif isinstance(value, Action) and isinstance(node, MapNode) and len(node.pairs) == 1:
        ((verb, (_, keys)),) = node.pairs.items()
        is_step = verb not in keys_of(type(value))
        yield from _flaws(value, keys if is_step else node, f"{label}.{verb}" if is_step else label)
    elif isinstance(value, Struct) or dataclasses.is_dataclass(value):
        yield from _flaws(value, node, label)


def plain_section(section: Any) -> dict[str, Any]:
    """Return a section as plain data; keys that are None by default are left out when None."""
    form: type = type(section)
    values = ((key, getattr(section, key.attribute)) for key in keys_of(form).values())
    return {
        key.name: written_value(value, key.hint)
        for key, value in values
        if not (value is None and key.default is None)
    }


def written_value(value: Any, hint: Any) -> Any:
    """Return a value of a key as plain data."""
    if isinstance(hint, Parsed):
        return hint.encode(value)  # type: ignore[attr-defined]
    if isinstance(value, Struct) or dataclasses.is_dataclass(value):
        return plain_section(value)
    arguments = [hint for hint in typing.get_args(hint) if hint is not type(None)]
    if value is None or not arguments or _origin(hint) is Literal:
        return value
    if isinstance(value, tuple | list) and _origin(hint) is tuple:
        return [written_value(item, arguments[0]) for item in value]
    if isinstance(value, Mapping) and _origin(hint) in (dict, Mapping):
        return {key: written_value(item, arguments[1]) for key, item in value.items()}
    if is_alternative(hint):
        return written_value(value, _alternative(value, arguments))
    return value


def is_alternative(hint: Any) -> bool:
    """Return whether a hint is a union, or one with marks."""
    return _origin(hint) in (Annotated, typing.Union, types.UnionType)


def _origin(hint: Any) -> Any:
    return Annotated if hasattr(hint, "__metadata__") else typing.get_origin(hint)


def _alternative(value: Any, hints: list[Any]) -> Any:
    """Return the hint of a value among those of a union."""
    shape = tuple if isinstance(value, tuple | list) else Mapping
    fitting = (h for h in hints if isinstance(h, Parsed) or _origin(h) in (shape, Annotated))
    return next(fitting, hints[0])


@cache
def json_schema(form: type) -> dict[str, Any]:
    """Return the closed JSON Schema of a section, draft-07; sections inside it are written out."""
    struct = struct_of(form)
    (top,), parts = msgspec.json.schema_components(
        [struct], schema_hook=_parsed_schema, ref_template="{name}"
    )
    orders: dict[frozenset[Any], tuple[Any, ...]] = {}
    _collect_orders(struct, orders)
    return _written_out(top, parts, orders)


def _parsed_schema(kind: Any) -> dict[str, Any]:
    return dict(kind.schema())


def _collect_orders(hint: Any, orders: dict[frozenset[Any], tuple[Any, ...]]) -> None:
    """Collect the order in which options were declared: msgspec sorts them."""
    if _origin(hint) is Literal:
        orders[frozenset(typing.get_args(hint))] = typing.get_args(hint)
    elif isinstance(hint, type) and issubclass(hint, Struct):
        for field in msgspec.structs.fields(hint):
            _collect_orders(field.type, orders)
    else:
        for inner in typing.get_args(hint):
            _collect_orders(inner, orders)


def _written_out(
    schema: dict[str, Any],
    parts: Mapping[str, dict[str, Any]],
    orders: Mapping[frozenset[Any], tuple[Any, ...]],
) -> dict[str, Any]:
    def inner(value: Any) -> Any:
        return _written_out(value, parts, orders) if isinstance(value, dict) else value

    if schema.get("$ref") in parts:
        part = {k: v for k, v in parts[schema["$ref"]].items() if k not in ("title", "description")}
        schema = {**schema, **part}
        del schema["$ref"]
    result_schema = {key: inner(value) for key, value in schema.items() if key != "default"}
    if "properties" in schema:
        result_schema["properties"] = {
            name: inner(option_schema) for name, option_schema in schema["properties"].items()
        }
    if result_schema.get("required") == []:
        del result_schema["required"]
    if "prefixItems" in result_schema:
        result_schema["items"] = inner(result_schema.pop("prefixItems")[0])
    if result_schema.get("type") == "integer":
        result_schema.setdefault("maximum", MAX_INTEGER)
    if "propertyNames" in result_schema:
        result_schema["propertyNames"]["type"] = "string"
    if result_schema.get("type") == "object":
        result_schema.setdefault("additionalProperties", {})
    if "pattern" in result_schema:
        result_schema["pattern"] = result_schema["pattern"].removesuffix("(?!\n)")
    if "enum" in result_schema:
        result_schema["enum"] = list(
            orders.get(frozenset(result_schema["enum"]), result_schema["enum"])
        )
    options = [inner(option) for option in result_schema.pop("anyOf", ())]
    about = (
        {"description": result_schema.pop("description")} if "description" in result_schema else {}
    )
    return {**about, **result_schema, **(_joined(options) if options else {})}


def _joined(options: list[dict[str, Any]]) -> dict[str, Any]:
    """Return alternatives as one schema where that is possible: it says more of a wrong value."""
    flat = [inner_option for option in options for inner_option in option.get("anyOf", [option])]
    non_null = [option for option in flat if option != {"type": "null"}]
    if len(non_null) == 1 and len(flat) > 1:
        if isinstance(non_null[0].get("type"), str):
            return {**non_null[0], "type": [non_null[0]["type"], "null"]}
        if "enum" in non_null[0]:
            return {**non_null[0], "enum": [*non_null[0]["enum"], None]}
    return {"anyOf": [*non_null, {"type": "null"}] if len(non_null) < len(flat) else non_null}
