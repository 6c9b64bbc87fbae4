"""Types of values: one object per type hint that builds a value, writes it and describes itself.

`dataclass_types.type_of` turns a type hint into a `FieldType`. From its JSON Schema (`schema`) come
the files that editors read, the validation of what is loaded (`validation`) and the tables of the
READMEs. `build` gets valid nodes only, so nothing is checked twice.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..diagnostics import Problems
from ..yaml_document import ListNode, MapNode, Node, Scalar, plain

BAD: Final[Any] = object()  # what `build` returns when it noted a problem

DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
MAX_INTEGER = 2**53  # whole numbers beyond it are not exact in JSON
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Doc:
    """Marker for hints: one line that describes a key."""

    text: str


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Marker for number hints: the smallest value that makes sense."""

    value: float


@dataclass(frozen=True, slots=True)
class Pattern:
    """Marker for text hints: a regular expression for the whole text, and a description.

    Attributes:
        token: a regular expression for each token, for text that is a list of tokens; a message
            then points at the wrong token.
    """

    regex: str
    description: str
    token: str = ""


class FieldType(ABC):
    """How one type of value is described, built and written."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema, draft-07."""

    def build(self, node: Node, problems: Problems, what: str) -> Any:
        """Return the value of a node; BAD where it is broken, or when values in it contradict."""
        return BAD if node.broken else self._build(node, problems, what)

    def _build(self, node: Node, problems: Problems, what: str) -> Any:
        return plain(node)

    def fits(self, node: Node) -> bool:
        """Return whether this is the alternative of a union that a valid node chose."""
        return isinstance(node, MapNode)

    def holds(self, value: Any) -> bool:
        """Return whether a value may have been built by this type."""
        return True

    def write(self, value: Any) -> Any:
        """Return the value as plain data that reads back as the same value."""
        return value


def _value(node: Node) -> Any:
    return node.value if isinstance(node, Scalar) else None


@dataclass(frozen=True, slots=True)
class Number(FieldType):
    """A finite number: whole or not, bare or (`unit` "seconds") a duration such as `30s`."""

    whole: bool
    unit: str = ""
    least: float | None = None

    def _build(self, node: Node, problems: Problems, what: str) -> Any:
        value = _value(node)
        if self.unit == "seconds":
            match = DURATION.fullmatch(value)
            assert match is not None
            return float(match[1]) * _SECONDS[match[2]]
        return int(value) if self.whole else float(value)

    def fits(self, node: Node) -> bool:
        value = _value(node)
        return isinstance(value, str if self.unit == "seconds" else int | float)

    def holds(self, value: Any) -> bool:
        return type(value) is (int if self.whole else float)

    def write(self, value: Any) -> Any:
        if self.unit != "seconds":
            return value
        if value == int(value):
            return f"{value:.0f}s"
        text = repr(value)
        return f"{value:.12f}s" if "e" in text else f"{text}s"

    def schema(self) -> dict[str, Any]:
        if self.unit == "seconds":
            return Text(Pattern(DURATION.pattern, "a time such as 30s")).schema()
        limits = {} if self.least is None else {"minimum": self.least}
        if self.whole:
            unit = {"x-unit": self.unit} if self.unit else {}
            return {"type": "integer", **limits, "maximum": MAX_INTEGER, **unit}
        return {"type": "number", **limits}


@dataclass(frozen=True, slots=True)
class Flag(FieldType):
    """true or false."""

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def fits(self, node: Node) -> bool:
        return isinstance(_value(node), bool)


@dataclass(frozen=True, slots=True)
class Text(FieldType):
    """Text, perhaps of a certain form."""

    pattern: Pattern | None = None

    def schema(self) -> dict[str, Any]:
        if self.pattern is None:
            return {"type": "string"}
        return {
            "type": "string",
            "pattern": f"^({self.pattern.regex})$",
            "patternErrorMessage": f"should be {self.pattern.description}",  # editors show it
            **({"x-token": self.pattern.token} if self.pattern.token else {}),
        }

    def fits(self, node: Node) -> bool:
        return isinstance(_value(node), str)

    def holds(self, value: Any) -> bool:
        return isinstance(value, str)


@dataclass(frozen=True, slots=True)
class Choice(FieldType):
    """One of a few texts."""

    options: tuple[str, ...]

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.options)}

    def fits(self, node: Node) -> bool:
        return _value(node) in self.options

    def holds(self, value: Any) -> bool:
        return value in self.options


@dataclass(frozen=True, slots=True)
class Anything(FieldType):
    """Data that is passed on as it is."""

    def schema(self) -> dict[str, Any]:
        return {}

    def fits(self, node: Node) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class ListOf(FieldType):
    """A list of one type, of any or of a fixed length; becomes a tuple."""

    item: FieldType
    length: int | None = None

    def schema(self) -> dict[str, Any]:
        size = {} if self.length is None else {"minItems": self.length, "maxItems": self.length}
        return {"type": "array", "items": self.item.schema(), **size}

    def _build(self, node: Node, problems: Problems, what: str) -> Any:
        assert isinstance(node, ListNode)
        built = [
            self.item.build(item, problems, f"{what}[{i}]") for i, item in enumerate(node.items)
        ]
        return BAD if any(value is BAD for value in built) else tuple(built)

    def fits(self, node: Node) -> bool:
        return isinstance(node, ListNode)

    def holds(self, value: Any) -> bool:
        return isinstance(value, tuple | list)

    def write(self, value: Any) -> Any:
        return [self.item.write(item) for item in value]


class _Keyed(FieldType):
    """A mapping whose values have types that depend on the key."""

    @abstractmethod
    def value_of(self, key: str) -> FieldType:
        """Return the type of a key's value."""

    def _build(self, node: Node, problems: Problems, what: str) -> Any:
        assert isinstance(node, MapNode)
        built = {
            key: self.value_of(key).build(value, problems, f"{what}.{key}")
            for key, (_, value) in node.pairs.items()
        }
        return BAD if any(value is BAD for value in built.values()) else built

    def write(self, value: Any) -> Any:
        return {key: self.value_of(key).write(item) for key, item in value.items()}


@dataclass(frozen=True, slots=True)
class MapOf(_Keyed):
    """Names of the writer's choice, each with the same type of value."""

    value: FieldType
    key: Text = Text()

    def value_of(self, key: str) -> FieldType:
        return self.value

    def schema(self) -> dict[str, Any]:
        names = {} if self.key.pattern is None else {"propertyNames": self.key.schema()}
        return {"type": "object", "additionalProperties": self.value.schema(), **names}


@dataclass(frozen=True, slots=True)
class Fields(_Keyed):
    """A closed mapping that stays a dict: certain keys, each with its own type, none required."""

    types: Mapping[str, FieldType]

    def value_of(self, key: str) -> FieldType:
        return self.types[key]

    def schema(self) -> dict[str, Any]:
        properties = {name: each.schema() for name, each in self.types.items()}
        return {"type": "object", "properties": properties, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class OneOf(FieldType):
    """Any of several types; `null` where None is among them."""

    types: tuple[FieldType, ...]
    nullable: bool = False

    def _build(self, node: Node, problems: Problems, what: str) -> Any:
        if self.nullable and isinstance(node, Scalar) and node.value is None:
            return None
        chosen = next(each for each in self.types if len(self.types) == 1 or each.fits(node))
        return chosen.build(node, problems, what)

    def write(self, value: Any) -> Any:
        if value is None:
            return None
        return next(each for each in self.types if each.holds(value)).write(value)

    def schema(self) -> dict[str, Any]:
        options = [each.schema() for each in self.types]
        only = options[0] if self.nullable and len(options) == 1 else {}
        # One schema with two types: a validator then says what is wrong with the value.
        if isinstance(only.get("type"), str):
            return {**only, "type": [only["type"], "null"]}
        if "enum" in only:
            return {**only, "enum": [*only["enum"], None]}
        options += [{"type": "null"}] if self.nullable else []
        return options[0] if len(options) == 1 else {"anyOf": options}


@dataclass(frozen=True, slots=True)
class Deferred(FieldType):
    """A part that is read when its surroundings are known: `build` returns its node.

    Packs give a part names and overrides change it, so it is validated after that. Its schema is
    the definition of this name, see `export.json_schema`.
    """

    name: str

    def schema(self) -> dict[str, Any]:
        return {"$ref": f"#/definitions/{self.name}"}

    def _build(self, node: Node, problems: Problems, what: str) -> Any:
        return node
