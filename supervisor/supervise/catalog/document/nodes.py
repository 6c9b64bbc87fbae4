"""A parsed YAML file as a tree whose nodes know their line and column.

Scalars follow YAML 1.2 (core schema): `1e-3` is a number, `012` is 12, `10:30` and `on` are text,
only `true` and `false` are booleans, nothing is a date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .diagnostics import Location, Source

_INT = re.compile(r"[-+]?[0-9]{1,18}")
_BASED = re.compile(r"0o[0-7]{1,20}|0x[0-9a-fA-F]{1,15}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass(eq=False, slots=True)
class Node:
    """Anything in the tree; `line` and `col` are one-based and point at its first character.

    `broken`: it is not what it should be, as a noted problem says, and cannot be built.
    """

    source: Source = field(repr=False)
    line: int
    col: int
    broken: bool = field(default=False, init=False, repr=False)

    @property
    def shape(self) -> str:
        """Its description in messages."""
        return "nothing"


@dataclass(eq=False, slots=True)
class Scalar(Node):
    """One value. `text` is without quotes; only `plain` text is interpreted."""

    text: str
    plain: bool
    block: bool = False  # written with | or >: the text starts on the next line

    @property
    def value(self) -> Any:
        """The value under YAML 1.2: None, bool, int, float or str."""
        return resolve(self.text) if self.plain else self.text

    @property
    def shape(self) -> str:
        value = self.value
        if value is None:
            return "nothing"
        if isinstance(value, bool):
            return f"the boolean {self.text}"
        return f"the text {self.text[:40]!r}" if isinstance(value, str) else f"the number {value}"


@dataclass(eq=False, slots=True)
class Sequence(Node):
    """A list."""

    items: list[Node]

    @property
    def shape(self) -> str:
        return "a list"


@dataclass(eq=False, slots=True)
class Mapping(Node):
    """Keys and values, in the order in which they were written; keys are text and unique."""

    pairs: dict[str, tuple[Scalar, Node]]

    @property
    def shape(self) -> str:
        return "a mapping"

    def get(self, key: str) -> Node | None:
        """Return the value of a key, or None."""
        pair = self.pairs.get(key)
        return pair[1] if pair else None

    def place(self, key: str) -> Node:
        """Return the place of a key: its value, or the whole mapping if the key is absent."""
        pair = self.pairs.get(key)
        return pair[1] if pair else self

    def without(self, *keys: str) -> Mapping:
        """Return the same mapping less some keys."""
        kept = {key: pair for key, pair in self.pairs.items() if key not in keys}
        return Mapping(self.source, self.line, self.col, kept)


def resolve(text: str) -> Any:
    """Return the value of plain text under the YAML 1.2 core schema."""
    first = text[:1]
    if first and first not in "0123456789+-.~nNtTfF":
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def first_text(node: Node, text: str) -> Node:
    """Return the first scalar below `node` with this text, else the node itself."""
    todo = [node]
    while todo:
        here = todo.pop(0)
        if isinstance(here, Scalar) and here.text == text:
            return here
        if isinstance(here, Sequence):
            todo += here.items
        elif isinstance(here, Mapping):
            todo += [value for _, value in here.pairs.values()]
    return node


def texts(node: Node) -> Iterator[str]:
    """Yield the text of every scalar below `node`, without keys."""
    if isinstance(node, Scalar):
        yield node.text
    elif isinstance(node, Sequence):
        for item in node.items:
            yield from texts(item)
    elif isinstance(node, Mapping):
        for _, value in node.pairs.values():
            yield from texts(value)


def inside(node: Scalar, at: int) -> Location:
    """Return the place of character `at` of a scalar's text in its file.

    Text may be folded over lines, so text and file are compared character by character; blanks
    may differ.
    """
    source, line, col = node.source, node.line, node.col
    if node.block:
        line, col = line + 1, 1
    elif not node.plain:
        col += 1
    done = 0
    while done < at and line <= len(source.lines):
        text = source.line(line)
        if col > len(text):
            line, col = line + 1, 1
        elif node.text[done].isspace():
            done += 1
            col += 1 if text[col - 1].isspace() else 0
        else:
            done += 1 if text[col - 1] == node.text[done] else 0
            col += 1
    text = source.line(line)
    while at < len(node.text) and col <= len(text) and text[col - 1] != node.text[at]:
        col += 1
    return Location(source, line, col)


def plain(node: Node) -> Any:
    """Return the tree as dicts, lists and values, as JSON Schema validators expect it."""
    if isinstance(node, Mapping):
        return {key: plain(value) for key, (_, value) in node.pairs.items()}
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    assert isinstance(node, Scalar)
    return node.value
