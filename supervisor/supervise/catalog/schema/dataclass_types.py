"""From type hints to kinds, and from a mapping in YAML to a dataclass.

The fields of a dataclass are its YAML keys (a trailing underscore is dropped: `for_` is `for`).
Objects are closed: a key that no field has is a mistake, with a did-you-mean.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping as AbstractMapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Annotated, Any, Literal

from ..document.diagnostics import Place, Problems, did_you_mean, near_miss, quoted
from ..document.nodes import Mapping, Node
from .compound_types import Fields, ListOf, MapOf, OneOf
from .field_types import BAD, Anything, AtLeast, Choice, Doc, FieldType, Flag, Number, Pattern, Text

SURE = 0.75  # likeness from which on a misspelt key is read as the one that is like it

# Spellings that people bring along from elsewhere and difflib does not find.
ALIASES = {
    "severity": "sev",
    "runbook": "run",
    "name": "id",
    "condition": "when",
    "per_steps": "per",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a mapping: a field of a dataclass."""

    name: str
    attribute: str
    kind: FieldType
    required: bool
    default: Any
    about: str  # one line for people, from `Doc`


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
        kind, about = kind_of(hints[field.name]), _about(hints[field.name])
        keys[name] = Key(name, field.name, kind, required, None if required else default, about)
    return keys


def kind_of(hint: Any) -> FieldType:
    """Return the kind of a type hint.

    A dict among the marks of an `Annotated` names the keys of a dict and their hints, as in
    `Annotated[dict[str, float], {"min": Seconds, "factor": float}]`.

    Raises:
        TypeError: no kind fits it; the hint is a bug of the dataclass.
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
            return Fields(tuple((name, kind_of(inner)) for name, inner in keys.items()))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return Flag()
    if hint is int or hint is float:
        unit = next((mark for mark in marks if mark in ("seconds", "steps")), "")
        least = [mark.value for mark in marks if isinstance(mark, AtLeast)]
        return Number(hint is int, unit, max(least) if least else 0 if unit else None)
    if hint is str:
        return Text(next((mark for mark in marks if isinstance(mark, Pattern)), None))
    if hint is Any:
        return Anything()
    if origin is Literal:
        return Choice(args)
    if origin in (typing.Union, types.UnionType):
        kinds = tuple(kind_of(arg) for arg in args if arg is not type(None))
        return OneOf(kinds, type(None) in args)
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        return ListOf(kind_of(args[0]), len(args))
    if origin in (tuple, list, AbstractSequence):
        return ListOf(kind_of(args[0]))
    if origin in (dict, AbstractMapping):
        name = kind_of(args[0])
        return MapOf(kind_of(args[1]), name if isinstance(name, Text) else Text())
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return Record(hint)
    raise TypeError(f"no kind of YAML value fits the type hint {hint!r}")


def _about(hint: Any) -> str:
    marks = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return next((mark.text for mark in marks if isinstance(mark, Doc)), "")


@dataclass(frozen=True, slots=True)
class Record(FieldType):
    """A mapping whose keys are the fields of a dataclass."""

    form: type

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        return build(self.form, node, problems, what)

    def fits(self, node: Node) -> bool:
        return isinstance(node, Mapping)

    def holds(self, value: Any) -> bool:
        return isinstance(value, self.form)

    def write(self, value: Any) -> Any:
        return written(value)

    def schema(self) -> dict[str, Any]:
        return record_schema(self.form)

    def words(self) -> str:
        return f"a mapping with {quoted(keys_of(self.form))}"


def build(
    form: type,
    node: Node,
    problems: Problems,
    what: str,
    *,
    defaults: AbstractMapping[str, Any] | None = None,
    overridden: AbstractMapping[str, Place] | None = None,
    lenient: bool = False,
) -> Any:
    """Make a dataclass from a mapping, or return BAD after noting every mistake in it.

    Args:
        defaults: values for keys that the mapping leaves out, before the fields' own defaults.
        overridden: where keys were overridden; a value that does not fit the others is reported
            there, since that is the line to change.
        lenient: after noting mistakes go on with the defaults, so that more can be found; a key
            without one that is missing or wrong is None then. A misspelt key is read as the
            one that was probably meant, and added to the node as that.
    """
    if not isinstance(node, Mapping):
        return Record(form).refuse(node, problems, what)
    keys = keys_of(form)
    values, wrong = {}, False
    near_misses: set[str] = set()
    for name, (at, value) in list(node.pairs.items()):
        if name not in keys:
            # Over what a pack has written, a policy may have meant a key that is there already.
            spelt, taken = ALIASES.get(name, name), overridden or node.pairs
            free = [key for key in keys if key not in taken]
            hint = did_you_mean(spelt, free)
            problems.add(at, f"{what or 'the file'} has no key {name!r}", hint)
            near_misses.update(key for key in keys if hint == f"did you mean {key!r}?")
            wrong = True
            meant = near_miss(spelt, free, SURE) if lenient else None
            if meant is None:
                continue
            node.pairs[meant] = at, value  # the other checks look for it there
            name = meant
        read = keys[name].kind.read(value, problems, f"{what}.{name}" if what else name)
        if read is BAD:
            wrong = True
            if lenient:
                read = keys[name].default
        values[keys[name].attribute] = read
    for key in keys.values():
        if key.name in node.pairs:
            continue
        if defaults is not None and key.name in defaults:
            values[key.attribute] = defaults[key.name]
        elif key.required:
            wrong = True
            values[key.attribute] = None
            if key.name not in near_misses:  # the misspelt key is the mistake; say it once
                problems.add(node, f"{what or 'the file'} needs the key {key.name!r}")
    if wrong:
        return form(**values) if lenient else BAD
    return _checked(form(**values), node, problems, what, overridden)


def _checked(
    made: Any,
    node: Mapping,
    problems: Problems,
    what: str,
    overridden: AbstractMapping[str, Place] | None,
) -> Any:
    """Return what was made of a mapping, or BAD when its values do not fit each other."""
    flaws = made.check() if hasattr(made, "check") else []
    for attribute, message in flaws:
        name = attribute.rstrip("_")
        place: Place = node.place(name)
        if overridden:
            place = overridden.get(name) or next(iter(overridden.values()))
        problems.add(place, f"{what}.{name}: {message}" if what else f"{name}: {message}")
    return BAD if flaws else made


def written(value: Any) -> dict[str, Any]:
    """Return a dataclass as plain data, every key that says something spelt out."""
    form: type = type(value)
    keys = keys_of(form)
    found = {key.name: (key, getattr(value, key.attribute)) for key in keys.values()}
    return {
        name: key.kind.write(held)
        for name, (key, held) in found.items()
        if not (held is None and key.default is None)
    }


def record_schema(form: type, extra: AbstractMapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the closed JSON Schema of a dataclass; `extra` are properties beyond its fields."""
    properties: dict[str, Any] = dict(extra or {})
    for key in keys_of(form).values():
        properties[key.name] = key.kind.schema()
        if key.about:
            properties[key.name] = {"description": key.about, **properties[key.name]}
    required = [key.name for key in keys_of(form).values() if key.required]
    found: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return {**found, "required": [*(extra or ()), *required]} if required or extra else found
