"""Rewrite the text of a policy from former names to today's: its comments and its form stay.

Names are replaced where they are written. A part that lost its name is cut out: whole lines of a
block, an item with its comma of a `[list]` or `{mapping}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from .former_names import FORMER

Node = Any  # of PyYAML, whose nodes know where they end; its classes have no types
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


class Migration(NamedTuple):
    """A policy as it should be written today, and remarks, with their lines in the old one."""

    text: str
    notes: list[tuple[int, str]]  # what changed in behaviour, or has to be done by hand
    lost: list[tuple[int, str]]  # what no longer acts


def migrate(text: str) -> Migration:
    """Return a policy, which is YAML, with today's names; the same text if it has them all."""
    editor = _Editor(text)
    editor.policy(yaml.compose(text, Loader=yaml.SafeLoader))
    for start, end, new in sorted(editor.edits, reverse=True):
        text = text[:start] + new + text[end:]
    return Migration(text, editor.notes, editor.lost)


class _Editor:
    """Collects edits of one text, from the parts to what holds them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.edits: list[tuple[int, int, str]] = []
        self.notes: list[tuple[int, str]] = []
        self.lost: list[tuple[int, str]] = []

    def policy(self, root: Node) -> None:
        stay, keys = [], {_text(key) for key, _ in _pairs(root)}
        for key, value in _pairs(root):
            if former := FORMER.get(_text(key)):
                self._rename(key, former.now or key.value)
            kept = self._kept(_text(key), value)
            if kept:
                self._cut(value, kept)
            if kept or kept is None or not value.value:
                stay.append(key)
            if key.value == "use" and "extends" not in keys:
                self._report_unused(value)
        if stay:
            self._cut(root, stay)

    def _kept(self, section: str, value: Node) -> list[Node] | None:
        """Rename what a section names; return its parts that stay, None for any other section."""
        if section in ("use", "remove"):
            return self._names(_items(value), section)
        if section == "override":
            return self._overrides(value)
        if section == "inhibit":
            return [each for each in _items(value) if self._inhibits(each)]
        if section in ("rules", "detectors"):
            self._expressions(value)
        return None

    def _names(self, items: list[Node], section: str) -> list[Node]:
        """Rename the items of `use`, `remove` or `mute`; return those that stay, each once."""
        kept, seen = [], set()
        for item in items:
            former = FORMER.get(_text(item))
            if former and (former.part or not former.now):
                self._note(item, f"{section}: {item.value} is left out; {former.answer}")
                continue
            name = former.now if former else _text(item)
            if name not in seen or not name:
                seen.add(name)
                kept.append(item)
                self._rename(item, name)
        return kept

    def _overrides(self, section: Node) -> list[Node]:
        kept, seen = [], {_text(key) for key, _ in _pairs(section)} - {*FORMER}
        for key, value in _pairs(section):
            former = FORMER.get(_text(key))
            if former and (not former.now or former.now in seen):
                also = ", which has an override already" if former.now else ""
                self._note(key, f"override: {key.value} is left out; {former.answer}{also}")
                run = next((_text(v) for k, v in _pairs(value) if _text(k) == "run"), former.ran)
                if run:
                    self.lost.append((key.start_mark.line + 1, f"{key.value} ran {run}"))
                continue
            if former:
                seen.add(former.now)
                self._rename(key, former.now)
            if former and former.part:
                self._note(key, f"override: {former.now} tells more than {key.value} did")
            kept.append(key)
        return kept

    def _inhibits(self, entry: Node) -> bool:
        """Rename the rules of an inhibition; return whether it still says something."""
        parts: dict[str, Node] = {_text(key): value for key, value in _pairs(entry)}
        by, mute = parts.get("by_rule"), parts.get("mute")
        former = FORMER.get(_text(by))
        if former and (former.part or not former.now):
            self._note(by, f"inhibit: {_text(by)} mutes nothing; {former.answer}")
            return False
        kept = self._names(_items(mute), "mute")
        if kept:
            self._cut(mute, kept)
        if former and kept:
            self._rename(by, former.now)
        return bool(kept) or not _items(mute)

    def _expressions(self, node: Node) -> None:
        """Rename what rules and detectors of the file itself read; what is gone needs a person."""
        for leaf in _leaves(node):
            at = leaf.start_mark.index
            for name in _NAME.findall(leaf.value):
                at = self.text.find(name, at)
                former = FORMER.get(name)
                if former and former.now and not former.part:
                    self.edits.append((at, at + len(name), former.now))
                elif former:
                    self._note(leaf, f"change {name} by hand: {former.answer}")
                at += len(name)

    def _report_unused(self, use: Node) -> None:
        """Tell of rules that acted, and whose successor is in a pack that is not used."""
        used = {_text(item) for item in _items(use)}
        for old, former in FORMER.items():
            pack, needs = old.partition(".")[0], former.now.partition(".")[0]
            if former.ran and pack in used and needs not in used:
                what = f"rules of {pack} ran {former.ran}; add {needs} to use for that"
                self.lost.append((use.start_mark.line + 1, what))
                return

    def _note(self, node: Node, what: str) -> None:
        self.notes.append((node.start_mark.line + 1, what))

    def _rename(self, node: Node, name: str) -> None:
        if _text(node) != name:
            at = self.text.index(node.value, node.start_mark.index)  # behind a quote
            self.edits.append((at, at + len(node.value), name))

    def _cut(self, holder: Node, kept: list[Node]) -> None:
        """Remove the items of a list, or the keys of a mapping, that are not in `kept`."""
        parts = _pairs(holder) or [(each, each) for each in _items(holder)]
        stays = [any(first is node for node in kept) for first, _ in parts]
        for i, (first, last) in enumerate(parts):
            start, end = first.start_mark.index, _end(last)
            if stays[i]:
                continue
            if not holder.flow_style:
                start = self.text.rfind("\n", 0, start) + 1
                end = (self.text + "\n").index("\n", end) + 1
            elif any(stays[i:]):  # with the comma behind it
                end = parts[i + 1][0].start_mark.index
            else:
                start = _end(parts[i - 1][1])
            self.edits.append((start, end, ""))


def _text(node: Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""


def _items(node: Node) -> list[Node]:
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _pairs(node: Node) -> list[tuple[Node, Node]]:
    return list(node.value) if isinstance(node, yaml.MappingNode) else []


def _leaves(node: Node) -> Iterator[Node]:
    """Yield every scalar value below a node; keys are none."""
    if isinstance(node, yaml.ScalarNode):
        yield node
    for child in (*_items(node), *(value for _, value in _pairs(node))):
        yield from _leaves(child)


def _end(node: Node) -> int:
    """Return where the text of a node ends: a block's own mark is behind the comments after it."""
    children = [*_items(node), *(each for pair in _pairs(node) for each in pair)]
    if children and not node.flow_style:
        return _end(children[-1])
    return int(node.end_mark.index)
