"""YAML text to a tree of nodes with positions; surprising features of YAML are refused.

PyYAML only cuts the text into events; what a scalar means is decided in `nodes` (YAML 1.2), and
this file refuses duplicate keys, anchors, aliases, merge keys, tags, directives, several documents,
deep nesting and large files. Each mistake gets one sentence at `file:line:col`; none gets a
traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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

from ...errors import InputError
from .diagnostics import Location, Problems, Source
from .nodes import Mapping, Node, Scalar, Sequence

MAX_BYTES = 256 * 1024
MAX_DEPTH = 24

# libyaml is ten times faster than the parser in Python, and not everywhere.
PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_FORBIDDEN = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
CONTROL = "a policy cannot contain the control character {!r}"

Event = Any  # PyYAML's events share no typed base that knows marks and tags


def read(path: Path, label: str, problems: Problems) -> Mapping | None:
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
        before = raw[: error.start].decode("utf-8-sig", "replace")
        line, col = before.count("\n") + 1, len(before) - before.rfind("\n")
        source = Source(label, raw.decode("utf-8", "replace"))
        problems.add(
            Location(source, line, col), "this is not UTF-8 text", "save the file as UTF-8"
        )
        return None
    return parse(Source(label, text), problems)


def parse(source: Source, problems: Problems, parser: Any = PARSER) -> Mapping | None:
    """Parse text whose top level must be a mapping; None when problems were noted instead."""
    bad = _FORBIDDEN.search(source.text)
    if bad:
        before = source.text[: bad.start()]
        spot = Location(source, before.count("\n") + 1, len(before) - before.rfind("\n"))
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
    if not isinstance(root, Mapping):
        problems.add(root, f"a file must be a mapping of keys to values, not {root.shape}")
        return None
    return root


class _UnreadableError(Exception):
    """The rest of the file cannot be read; the problem is noted."""


class _Builder:
    """Builds the tree from events, without recursion: depth is data, not stack."""

    def __init__(self, source: Source, problems: Problems) -> None:
        self.source = source
        self.problems = problems
        self.root: Node | None = None
        self.open: list[Mapping | Sequence] = []
        self.keys: list[Scalar | None] = []  # per open container: the key that waits for its value

    def build(self, events: Iterator[Event]) -> Node | None:
        documents = 0
        for event in events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse(event, "a second document starts here; a file holds one")
                if event.version or event.tags:
                    self._refuse(event, "directives (%YAML, %TAG) are not allowed")
            elif isinstance(event, AliasEvent):
                self._refuse(event, f"the alias *{event.anchor} is not allowed", "write it out")
            elif isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent):
                self._start(event)
            elif isinstance(event, SequenceEndEvent | MappingEndEvent):
                self.open.pop()
                self.keys.pop()
        return self.root

    def _start(self, event: Event) -> None:
        if event.anchor is not None:
            self._refuse(event, f"the anchor &{event.anchor} is not allowed", "write it out")
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(event, f"the tag {tag} is not allowed", "leave it out; quote what is text")
        line, col = event.start_mark.line + 1, event.start_mark.column + 1
        parent = self.open[-1] if self.open else None
        waiting = self.keys[-1] if self.keys else None
        is_key = isinstance(parent, Mapping) and waiting is None
        if isinstance(event, ScalarEvent):
            if bad := _FORBIDDEN.search(event.value):  # it came as an escape: "\\0"
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
        node: Mapping | Sequence
        if isinstance(event, MappingStartEvent):
            node = Mapping(self.source, line, col, {})
        else:
            node = Sequence(self.source, line, col, [])
        self._attach(node, parent, waiting)
        self.open.append(node)
        self.keys.append(None)

    def _attach(self, node: Node, parent: Mapping | Sequence | None, key: Scalar | None) -> None:
        if parent is None:
            self.root = node
        elif isinstance(parent, Sequence):
            parent.items.append(node)
        elif key is not None:
            self.keys[-1] = None
            if key.text == "<<" and key.plain:
                self.problems.add(key, "merge keys (<<) are not allowed", "write it out")
            elif key.text in parent.pairs:
                first = parent.pairs[key.text][0]
                self.problems.add(key, f"duplicate key {key.text!r}; first in line {first.line}")
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
