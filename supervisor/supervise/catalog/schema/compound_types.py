"""Kinds of values that hold others: lists, mappings with free names, alternatives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..document.diagnostics import Problems, did_you_mean
from ..document.nodes import Mapping, Node, Scalar, Sequence
from .field_types import BAD, FieldType, Text

ANY_NAME = Text()


@dataclass(frozen=True, slots=True)
class ListOf(FieldType):
    """A list of one kind, of any or of a fixed length; becomes a tuple."""

    item: FieldType
    length: int | None = None

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        if not isinstance(node, Sequence):
            return self.refuse(node, problems, what)
        if self.length is not None and len(node.items) != self.length:
            problems.add(node, f"{what} should hold {self.length} items, not {len(node.items)}")
            return BAD
        read = [self.item.read(item, problems, f"{what}[{i}]") for i, item in enumerate(node.items)]
        return BAD if any(value is BAD for value in read) else tuple(read)

    def fits(self, node: Node) -> bool:
        return isinstance(node, Sequence)

    def holds(self, value: Any) -> bool:
        return isinstance(value, tuple | list)

    def write(self, value: Any) -> Any:
        return [self.item.write(item) for item in value]

    def schema(self) -> dict[str, Any]:
        size = {} if self.length is None else {"minItems": self.length, "maxItems": self.length}
        return {"type": "array", "items": self.item.schema(), **size}

    def words(self) -> str:
        size = f"a list of {self.length}" if self.length else "a list"
        return f"{size}, each item {self.item.words()}"


@dataclass(frozen=True, slots=True)
class MapOf(FieldType):
    """Names of the writer's choice, each with one kind of value."""

    value: FieldType
    key: Text = ANY_NAME

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        if not isinstance(node, Mapping):
            return self.refuse(node, problems, what)
        read: dict[str, Any] = {}
        for key, (at, value) in node.pairs.items():
            pattern = self.key.pattern
            if pattern is not None and not re.fullmatch(pattern.regex, key):
                problems.add(at, f"a name in {what} should be {pattern.words}, not {key[:40]!r}")
            read[key] = self.value.read(value, problems, f"{what}.{key}")
        return BAD if any(value is BAD for value in read.values()) else read

    def fits(self, node: Node) -> bool:
        return isinstance(node, Mapping)

    def holds(self, value: Any) -> bool:
        return isinstance(value, dict)

    def write(self, value: Any) -> Any:
        return {key: self.value.write(item) for key, item in value.items()}

    def schema(self) -> dict[str, Any]:
        names = {} if self.key.pattern is None else {"propertyNames": self.key.schema()}
        return {"type": "object", "additionalProperties": self.value.schema(), **names}

    def words(self) -> str:
        return f"a mapping from names to {self.value.words()}"


@dataclass(frozen=True, slots=True)
class Fields(FieldType):
    """A closed mapping that stays a dict: certain keys, each with its own kind, none required."""

    kinds: tuple[tuple[str, FieldType], ...]

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        if not isinstance(node, Mapping):
            return self.refuse(node, problems, what)
        known = dict(self.kinds)
        read: dict[str, Any] = {}
        for key, (at, value) in node.pairs.items():
            if key in known:
                read[key] = known[key].read(value, problems, f"{what}.{key}")
            else:
                problems.add(at, f"{what} has no key {key!r}", did_you_mean(key, known))
                read[key] = BAD
        return BAD if any(value is BAD for value in read.values()) else read

    def fits(self, node: Node) -> bool:
        return isinstance(node, Mapping)

    def holds(self, value: Any) -> bool:
        return isinstance(value, dict)

    def write(self, value: Any) -> Any:
        known = dict(self.kinds)
        return {key: known[key].write(item) for key, item in value.items()}

    def schema(self) -> dict[str, Any]:
        properties = {name: kind.schema() for name, kind in self.kinds}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def words(self) -> str:
        return "{" + ", ".join(f"{name}: {kind.words()}" for name, kind in self.kinds) + "}"


@dataclass(frozen=True, slots=True)
class OneOf(FieldType):
    """Any of several kinds; `null` where None is among them."""

    kinds: tuple[FieldType, ...]
    nullable: bool = False

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        if self.nullable and isinstance(node, Scalar) and node.value is None:
            return None
        fitting = [kind for kind in self.kinds if kind.fits(node)]
        if len(fitting) == 1:
            return fitting[0].read(node, problems, what)
        for kind in fitting:
            value = kind.read(node, Problems(), what)
            if value is not BAD:
                return value
        return self.refuse(node, problems, what)

    def fits(self, node: Node) -> bool:
        return any(kind.fits(node) for kind in self.kinds)

    def write(self, value: Any) -> Any:
        if value is None:
            return None
        return next(kind for kind in self.kinds if kind.holds(value)).write(value)

    def schema(self) -> dict[str, Any]:
        options = [kind.schema() for kind in self.kinds]
        if self.nullable and len(options) == 1 and isinstance(options[0].get("type"), str):
            # One schema with two types: a validator then says what is wrong with the value.
            return {**options[0], "type": [options[0]["type"], "null"]}
        options += [{"type": "null"}] if self.nullable else []
        return options[0] if len(options) == 1 else {"anyOf": options}

    def words(self) -> str:
        return " or ".join(kind.words() for kind in self.kinds)
