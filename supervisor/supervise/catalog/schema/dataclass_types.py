"""From type hints to field types, and from a mapping in YAML to a dataclass.

The fields of a dataclass are its YAML keys (a trailing underscore is dropped: `for_` is `for`).
Objects are closed: a key that no field has is a mistake.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Annotated, Any, Literal

from ..diagnostics import Place, Problems, near_miss
from ..yaml_document import MapNode, Node, Scalar
from . import validation
from .field_types import (
    BAD,
    Anything,
    AtLeast,
    Choice,
    Doc,
    Fields,
    FieldType,
    Flag,
    ListOf,
    MapOf,
    Number,
    OneOf,
    Pattern,
    Text,
)

UNITS = ("seconds", "steps")  # marks of numbers
SURE = 0.75  # minimum similarity at which a misspelt key is read as the similar one


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a mapping: a field of a dataclass."""

    name: str
    attribute: str
    type: FieldType
    required: bool
    default: Any
    doc: str  # one line for people, from `Doc`


@cache
def keys_of(form: type) -> dict[str, Key]:
    """Return the keys of a dataclass by their YAML names, in field order."""
    hints = typing.get_type_hints(form, include_extras=True)
    keys = {}
    for field in dataclasses.fields(form):
        if not field.init:
            continue
        name = field.name.rstrip("_")
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        required = default is MISSING
        hint = hints[field.name]
        value = None if required else default
        marks = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
        docs = [mark.text for mark in marks if isinstance(mark, Doc)]
        docs += [mark for mark in marks if isinstance(mark, str) and mark not in UNITS]
        doc = next(iter(docs), "")
        keys[name] = Key(name, field.name, type_of(hint), required, value, doc)
    return keys


def type_of(hint: Any) -> FieldType:
    """Return the field type of a type hint.

    A dict among the marks of an `Annotated` names the keys of a dict and their hints, as in
    `Annotated[dict[str, float], {"min": Seconds, "factor": float}]`.

    Raises:
        TypeError: no field type fits it; the hint is a bug of the dataclass.
    """
    marks: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Annotated:
        hint, *rest = typing.get_args(hint)
        marks = tuple(rest)
        given = next((mark for mark in marks if isinstance(mark, FieldType)), None)
        if given is not None:
            return given
        keys = next((mark for mark in marks if isinstance(mark, dict)), None)
        if keys is not None:
            return Fields({name: type_of(inner) for name, inner in keys.items()})
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return Flag()
    if hint is int or hint is float:
        unit = next((mark for mark in marks if mark in UNITS), "")
        least = [mark.value for mark in marks if isinstance(mark, AtLeast)]
        return Number(hint is int, unit, max(least) if least else 0 if unit else None)
    if hint is str:
        return Text(next((mark for mark in marks if isinstance(mark, Pattern)), None))
    if hint is Any:
        return Anything()
    if origin is Literal:
        return Choice(args)
    if origin in (typing.Union, types.UnionType):
        options = tuple(type_of(arg) for arg in args if arg is not type(None))
        return OneOf(options, type(None) in args)
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        return ListOf(type_of(args[0]), len(args))
    if origin in (tuple, list, AbstractSequence):
        return ListOf(type_of(args[0]))
    if origin in (dict, Mapping):
        name = type_of(args[0])
        return MapOf(type_of(args[1]), name if isinstance(name, Text) else Text())
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return Record(hint)
    raise TypeError(f"no type of YAML value fits the type hint {hint!r}")


@dataclass(frozen=True, slots=True)
class Record(FieldType):
    """A mapping whose keys are the fields of a dataclass."""

    form: type

    def schema(self) -> dict[str, Any]:
        return record_schema(self.form)

    def _build(self, node: Node, problems: Problems, what: str) -> Any:
        return build(self.form, node, problems, what)

    def holds(self, value: Any) -> bool:
        return isinstance(value, self.form)

    def write(self, value: Any) -> Any:
        return written(value)


def read_form(
    form: type,
    node: Node,
    problems: Problems,
    what: str,
    *,
    defaults: Mapping[str, Any] | None = None,
    overridden: Mapping[str, Place] | None = None,
    lenient: bool = False,
) -> Any:
    """Validate a mapping and make a dataclass from it; BAD after noting every mistake in it.

    Args:
        what: the name of the mapping in messages; "" for a whole file.
        defaults: values for keys that the mapping leaves out, before the fields' own defaults.
        overridden: where keys were overridden; a value that contradicts the others is reported
            there, since that is the line to change.
        lenient: after noting mistakes go on with the defaults, so that more can be found; a key
            without one that is missing or wrong is None then. A misspelt key is read as the
            one that was probably meant, and added to the node as that.
    """
    before = problems.count
    mistakes(form, node, problems, what, overridden=overridden, rename=lenient)
    if not isinstance(node, MapNode) or (problems.count > before and not lenient):
        return BAD
    made = _fill(form, node, problems, what, defaults or {}, lenient)
    if made is BAD or problems.count > before:
        return made
    return _checked(made, node, problems, what, overridden)


def mistakes(
    form: type,
    node: Node,
    problems: Problems,
    what: str,
    *,
    overridden: Mapping[str, Place] | None = None,
    rename: bool = False,
) -> set[str]:
    """Note what is wrong with a mapping, and return the keys in which it is; see `read_form`."""
    if not isinstance(node, MapNode):
        return validation.check(_schema(form), node, problems, what)
    keys = keys_of(form)
    # Over what a pack has written, a policy may have meant a key that is there already.
    changed = list(overridden) if overridden else None
    meant = validation.unknown_keys(node, keys, problems, what, taken=changed)
    taken = changed or list(node.pairs)
    unknown = [key for key in node.pairs if key not in keys]
    for key in unknown if rename else ():
        free = [name for name in keys if name not in taken]
        sure = near_miss(validation.ALIASES.get(key, key), free, SURE)
        if sure is not None:
            node.pairs[sure] = node.pairs[key]  # other checks look for it there
    known = node.without(*unknown)
    return {*unknown, *validation.check(_schema(form), known, problems, what, excused=meant)}


def build(form: type, node: Node, problems: Problems, what: str) -> Any:
    """Make a dataclass from a mapping; BAD where it is broken, or when its values contradict."""
    if node.broken:
        return BAD
    if isinstance(node, Scalar):  # `pause:` with nothing behind the colon
        node = MapNode(node.source, node.line, node.col, {})
    assert isinstance(node, MapNode)
    made = _fill(form, node, problems, what, {}, False)
    return made if made is BAD else _checked(made, node, problems, what, None)


def _fill(
    form: type,
    node: MapNode,
    problems: Problems,
    what: str,
    values: Mapping[str, Any],
    lenient: bool,
) -> Any:
    """Return the dataclass with the values of a mapping, then `values`, then defaults."""
    found: dict[str, Any] = {}
    for key in keys_of(form).values():
        held = node.get(key.name)
        if held is not None:
            name = f"{what}.{key.name}" if what else key.name
            found[key.attribute] = key.type.build(held, problems, name)
            if found[key.attribute] is BAD and lenient:
                found[key.attribute] = key.default
        elif key.name in values or key.required:
            found[key.attribute] = values.get(key.name)
    return BAD if any(value is BAD for value in found.values()) else form(**found)


def _checked(
    made: Any,
    node: MapNode,
    problems: Problems,
    what: str,
    overridden: Mapping[str, Place] | None,
) -> Any:
    """Return what was made of a mapping, or BAD when its values contradict each other."""
    flaws = made.check() if hasattr(made, "check") else []
    for attribute, message in flaws:
        name = attribute.rstrip("_")
        place: Place = node.place(name)
        if overridden:
            place = overridden.get(name) or next(iter(overridden.values()))
        problems.add(place, f"{what}.{name}: {message}" if what else f"{name}: {message}")
    return BAD if flaws else made


def written(value: Any) -> dict[str, Any]:
    """Return a dataclass as plain data; keys that are None by default are left out when None."""
    form: type = type(value)
    keys = keys_of(form)
    found = {key.name: (key, getattr(value, key.attribute)) for key in keys.values()}
    return {
        name: key.type.write(held)
        for name, (key, held) in found.items()
        if not (held is None and key.default is None)
    }


def record_schema(form: type, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the closed JSON Schema of a dataclass; `extra` are properties beyond its fields."""
    properties: dict[str, Any] = dict(extra or {})
    for key in keys_of(form).values():
        properties[key.name] = key.type.schema()
        if key.doc:
            properties[key.name] = {"description": key.doc, **properties[key.name]}
    required = [key.name for key in keys_of(form).values() if key.required]
    found: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return {**found, "required": [*(extra or ()), *required]} if required or extra else found


_schema = cache(record_schema)
