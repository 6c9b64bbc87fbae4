"""YAML text as a tree of nodes that know their line and column, and plain data as YAML text.

Scalars follow YAML 1.2 (core schema): `1e-3` is a number, `012` is 12, `10:30` and `on` are text,
only `true` and `false` are booleans, nothing is a date. Duplicate keys, anchors, aliases, merge
keys, tags, directives, several documents, deep nesting and large files are refused. Each mistake
gets one sentence at `file:line:col`; none gets a traceback.

The resolved text of a policy is complete, self-contained and always the same bytes: it is kept in
the run directory, loads to the same policy, and `sha256sum policy.yaml` gives the digest. It has
its own emitter, since the bytes must not change with the version of PyYAML."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from ..errors import InputError
from .diagnostics import Location, Problems, Source

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
    """Anything in the tree; `line` and `col` are one-based and point at its first character."""

    source: Source = field(repr=False)
    line: int
    col: int

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
        return resolve_scalar(self.text) if self.plain else self.text

    @property
    def shape(self) -> str:
        value = self.value
        if value is None:
            return "nothing"
        if isinstance(value, bool):
            return f"the boolean {self.text}"
        return f"the text {self.text[:40]!r}" if isinstance(value, str) else f"the number {value}"


@dataclass(eq=False, slots=True)
class ListNode(Node):
    """A list."""

    items: list[Node]

    @property
    def shape(self) -> str:
        return "a list"


@dataclass(eq=False, slots=True)
class MapNode(Node):
    """Keys and values, in the order in which they were written; keys are text and unique."""

    pairs: dict[str, tuple[Scalar, Node]]

    @property
    def shape(self) -> str:
        return "a mapping"

    def get(self, key: str) -> Node | None:
        """Return the value of a key, or None."""
        pair = self.pairs.get(key)
        return pair[1] if pair else None

    def locate(self, key: str) -> Node:
        """Return the place of a key: its value, or the whole mapping if the key is absent."""
        pair = self.pairs.get(key)
        return pair[1] if pair else self

    def without(self, *keys: str) -> MapNode:
        """Return the same mapping less some keys."""
        pairs = {key: pair for key, pair in self.pairs.items() if key not in keys}
        return MapNode(self.source, self.line, self.col, pairs)


def list_items(root: MapNode, key: str) -> list[Node]:
    """Return the nodes of a list under a key; none where there is no list."""
    section = root.get(key)
    return section.items if isinstance(section, ListNode) else []


def mapping_entries(root: MapNode, key: str) -> dict[str, Node]:
    """Return the nodes of a mapping under a key, by name; none where there is no mapping."""
    section = root.get(key)
    pairs = section.pairs if isinstance(section, MapNode) else {}
    return {name: node for name, (_, node) in pairs.items()}


def resolve_scalar(text: str) -> Any:
    """Return the value of plain text under the YAML 1.2 core schema."""
    initial = text[:1]
    if initial and initial not in "0123456789+-.~nNtTfF":
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
        if isinstance(here, ListNode):
            todo += here.items
        elif isinstance(here, MapNode):
            todo += [value for _, value in here.pairs.values()]
    return node


def scalar_texts(node: Node) -> Iterator[str]:
    """Yield the text of every scalar below `node`, without keys."""
    if isinstance(node, Scalar):
        yield node.text
    elif isinstance(node, ListNode):
        for item in node.items:
            yield from scalar_texts(item)
    elif isinstance(node, MapNode):
        for _, value in node.pairs.values():
            yield from scalar_texts(value)


def position_inside(node: Scalar, index: int) -> Location:
    """Return the place of character `at` of a scalar's text in its file.

    Text may be folded over lines, so text and file are compared character by character; blanks
    may differ.
    """
    source, line, col = node.source, node.line, node.col
    if node.block:
        line, col = line + 1, 1
    elif not node.plain:
        col += 1
    matched = 0
    while matched < index and line <= len(source.lines):
        text = source.line(line)
        if col > len(text):
            line, col = line + 1, 1
        elif node.text[matched].isspace():
            matched += 1
            col += 1 if text[col - 1].isspace() else 0
        else:
            matched += 1 if text[col - 1] == node.text[matched] else 0
            col += 1
    text = source.line(line)
    while index < len(node.text) and col <= len(text) and text[col - 1] != node.text[index]:
        col += 1
    return Location(source, line, col)


def plain_yaml(node: Node) -> Any:
    """Return the tree as dicts, lists and values, as JSON Schema validators expect it."""
    if isinstance(node, MapNode):
        return {key: plain_yaml(value) for key, (_, value) in node.pairs.items()}
    if isinstance(node, ListNode):
        return [plain_yaml(item) for item in node.items]
    assert isinstance(node, Scalar)
    return node.value


MAX_BYTES = 256 * 1024
MAX_DEPTH = 24

# libyaml is ten times faster than the parser in Python, and not everywhere.
PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_FORBIDDEN = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
CONTROL = "a policy cannot contain the control character {!r}"

Event = Any  # PyYAML's events share no typed base that knows marks and tags


def read_mapping(path: Path, label: str, problems: Problems) -> MapNode | None:
    """Read a file whose top level must be a mapping; None when problems were noted instead.

    Raises:
        InputError: it cannot be read at all.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    if len(raw) > MAX_BYTES:
        spot = Location(Source(label, ""), 1, 1)
        problems.add(spot, f"the file is larger than {MAX_BYTES // 1024} kB", "is this a policy?")
        return None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        head = raw[: error.start].decode("utf-8-sig", "replace")
        line, col = head.count("\n") + 1, len(head) - head.rfind("\n")
        source = Source(label, raw.decode("utf-8", "replace"))
        problems.add(
            Location(source, line, col), "this is not UTF-8 text", "save the file as UTF-8"
        )
        return None
    return parse_yaml(Source(label, text), problems)


def parse_yaml(source: Source, problems: Problems, parser: Any = PARSER) -> MapNode | None:
    """Parse text whose top level must be a mapping; None when problems were noted instead."""
    bad = _FORBIDDEN.search(source.text)
    if bad:
        head = source.text[: bad.start()]
        spot = Location(source, head.count("\n") + 1, len(head) - head.rfind("\n"))
        problems.add(spot, CONTROL.format(bad.group()))
        return None
    already = problems.count
    try:
        root = _Builder(source, problems).build(yaml.parse(source.text, Loader=parser))
    except yaml.MarkedYAMLError as error:
        _syntax(error, source, problems)
        return None
    except (yaml.YAMLError, ValueError) as error:  # the parser in Python: an escape beyond Unicode
        problems.add(Location(source, 1, 1), f"not YAML: {error}")
        return None
    except _UnreadableError:
        return None
    if root is None:
        if problems.count == already:
            problems.add(Location(source, 1, 1), "the file is empty", "see policies/README.md")
        return None
    if not isinstance(root, MapNode):
        problems.add(root, f"a file must be a mapping of keys to values, not {root.shape}")
        return None
    return root


_STARTS = (ScalarEvent, SequenceStartEvent, MappingStartEvent)
_ENDS = (SequenceEndEvent, MappingEndEvent)


class _UnreadableError(Exception):
    """The rest of the file cannot be read; the problem is noted."""


class _Builder:
    """Builds the tree from events, without recursion: depth is data, not stack."""

    def __init__(self, source: Source, problems: Problems) -> None:
        self.source = source
        self.problems = problems
        self.root: Node | None = None
        self.open: list[MapNode | ListNode] = []
        self.keys: list[Scalar | None] = []  # per open container: the key that waits for its value

    def build(self, events: Iterator[Event]) -> Node | None:
        documents = 0
        for event in events:
            if isinstance(event, _STARTS):
                self._start(event)
            elif isinstance(event, _ENDS):
                self.open.pop()
                self.keys.pop()
            elif isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse(event, "a second document starts here; a file holds one")
                if event.version or event.tags:
                    self._refuse(event, "directives (%YAML, %TAG) are not allowed")
            elif isinstance(event, AliasEvent):
                self._refuse(event, f"the alias *{event.anchor} is not allowed", "write it out")
        return self.root

    def _start(self, event: Event) -> None:
        if event.anchor is not None:
            self._refuse(event, f"the anchor &{event.anchor} is not allowed", "write it out")
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(event, f"the tag {tag} is not allowed", "leave it out; quote what is text")
        mark = event.start_mark
        line, col = mark.line + 1, mark.column + 1
        parent = self.open[-1] if self.open else None
        waiting = self.keys[-1] if self.keys else None
        is_key = isinstance(parent, MapNode) and waiting is None
        if isinstance(event, ScalarEvent):
            # It came as an escape: "\\0".
            if event.style == '"' and (bad := _FORBIDDEN.search(event.value)):
                self._refuse(event, CONTROL.format(bad.group()))
            scalar = Scalar(
                self.source, line, col, event.value, not event.style, event.style in ("|", ">")
            )
            if is_key:
                self.keys[-1] = scalar
            else:
                self._attach(scalar, parent, waiting)
            return
        if is_key:
            self._refuse(event, "a key must be plain text")
        if len(self.open) >= MAX_DEPTH:
            self._refuse(event, f"nested deeper than {MAX_DEPTH} levels")
        node: MapNode | ListNode
        if isinstance(event, MappingStartEvent):
            node = MapNode(self.source, line, col, {})
        else:
            node = ListNode(self.source, line, col, [])
        self._attach(node, parent, waiting)
        self.open.append(node)
        self.keys.append(None)

    def _attach(self, node: Node, parent: MapNode | ListNode | None, key: Scalar | None) -> None:
        if parent is None:
            self.root = node
        elif isinstance(parent, ListNode):
            parent.items.append(node)
        elif key is not None:
            self.keys[-1] = None
            if key.text == "<<" and key.plain:
                self.problems.add(key, "merge keys (<<) are not allowed", "write it out")
            elif key.text in parent.pairs:
                earlier = parent.pairs[key.text][0]
                self.problems.add(key, f"duplicate key {key.text!r}; first in line {earlier.line}")
            else:
                parent.pairs[key.text] = (key, node)

    def _refuse(self, event: Event, message: str, hint: str | None = None) -> None:
        mark = event.start_mark
        self.problems.add(Location(self.source, mark.line + 1, mark.column + 1), message, hint)
        raise _UnreadableError


def _syntax(error: yaml.MarkedYAMLError, source: Source, problems: Problems) -> None:
    """Note a syntax error, with a hint that says what to do."""
    mark = error.problem_mark or error.context_mark
    line, col = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    # At the end of the file the mark is behind the last line: point at the end of the text.
    if line > len(source.lines):
        line = max(1, len(source.lines))
        col = len(source.line(line)) + 1
    text = source.line(line)
    problem = error.problem or "cannot be read"
    message, hint = f"not YAML: {problem}", None
    if "\t" in text[: len(text) - len(text.lstrip())] or text[col - 1 : col] == "\t":
        message, hint = "tabs are not allowed here", "indent with spaces"
        col = text.index("\t") + 1
    elif text[col - 1 : col] in ("`", "@"):
        hint = f"put quotes around text that begins with {text[col - 1]}"
    elif "mapping values are not allowed" in problem:
        hint = "put quotes around text that holds ': ', or check the indentation"
    elif error.context:
        message = f"not YAML: {error.context}, {problem}"
    problems.add(Location(source, line, col), message, hint)


WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*( [A-Za-z0-9_./()-]+)*|[0-9]+(\.[0-9]+)?(ms|s|m|h)")
_RAW = re.compile(  # no control character, no direction of text
    "[^ -~\xa0-\u200a\u2010-\u2027\u202f-\u205f\u2070-\ud7ff\ue000-\ufefe\uff00-\ufff8\ufffc-\ufffd"
    "\U00010000-\U000dffff]"
)


def dump_yaml(document: Mapping[str, Any]) -> str:
    """Return a document of mappings, lists, text, numbers, booleans and None as YAML."""
    lines: list[str] = []
    for key, value in document.items():
        _block(f"{_scalar(key)}:", value, 0, lines)
    return "\n".join(lines) + "\n"


def policy_digest(text: str) -> str:
    """Return `sha256:<hex>` of a resolved policy."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _block(head: str, value: Any, indent: int, lines: list[str]) -> None:
    """Write `head value` on one line where it fits and is no deep structure, else as a block."""
    pad = " " * indent
    flow = f"{pad}{head} {inline_yaml(value)}"
    deep = indent == 0 and isinstance(value, dict | list | tuple) and len(value) > 0
    if not isinstance(value, dict | list | tuple) or not value or (len(flow) <= WIDTH and not deep):
        lines.append(flow)
    elif isinstance(value, dict):
        lines.append(pad + head)
        for key, inner in value.items():
            _block(f"{_scalar(key)}:", inner, indent + 2, lines)
    else:
        lines.append(pad + head)
        for inner in value:
            _item(inner, indent + 2, lines)


def _item(value: Any, indent: int, lines: list[str]) -> None:
    flow = f"{' ' * indent}- {inline_yaml(value)}"
    if len(flow) <= WIDTH or not isinstance(value, dict) or not value:
        lines.append(flow)
        return
    inner: list[str] = []
    for key, item in value.items():
        _block(f"{_scalar(key)}:", item, indent + 2, inner)
    lines.append(f"{' ' * indent}- {inner[0].lstrip()}")
    lines += inner[1:]


def inline_yaml(value: Any) -> str:
    """Return a value on one line, in flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(k)}: {inline_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(inline_yaml(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return _text(value)


@lru_cache(maxsize=4096)  # a policy is written from few words
def _text(value: str) -> str:
    if _PLAIN.fullmatch(value) and isinstance(resolve_scalar(value), str) and value not in _LEGACY:
        return value
    return _RAW.sub(_escaped, json.dumps(value, ensure_ascii=False))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# Text under YAML 1.2, booleans under YAML 1.1.
_LEGACY = frozenset(
    word
    for base in ("y", "n", "yes", "no", "on", "off")
    for word in (base, base.upper(), base.capitalize())
)
