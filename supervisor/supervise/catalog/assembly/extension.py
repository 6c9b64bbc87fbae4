"""`extends`: a policy that is written as its difference from another one.

Mappings are merged, anything else replaces what the base has, and the lists in `ADDED` add to the
base's. Nodes keep their file, so that each mistake is reported where it was written.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Mapping as AbstractMapping
from dataclasses import replace
from pathlib import Path

from ...errors import InputError
from ..document import yaml_reader, yaml_writer
from ..document.diagnostics import Problems, Source, did_you_mean
from ..document.nodes import Mapping, Node, Scalar, Sequence
from ..inventory import bases, shipped
from . import pack
from .pack import Entry, Parts

ADDED = ("use", "rules", "inhibit", "planned", "remove")
OWN = ("version", "policy", "summary", "extends", "cites")  # a base's say nothing about the policy


def chain(root: Mapping, path: Path, problems: Problems) -> list[tuple[Mapping, Path]]:
    """Return a policy and its file, then those of its base, of the base of that, and so on.

    Raises:
        PolicyErrors: a base is missing, cannot be read, or extends the policy itself.
    """
    found = [(root, path)]
    seen = [path.resolve()]
    while isinstance(named := root.get("extends"), Scalar) and isinstance(named.value, str):
        base = None
        try:
            path = bases.locate(path, named.text)
            if path.resolve() in seen:
                names = [each.name for each in (*seen[seen.index(path.resolve()) :], path)]
                problems.add(named, f"policies extend each other: {' -> '.join(names)}")
            else:
                base = yaml_reader.read(path, shipped.label(path), problems)
        except InputError as error:
            problems.add(named, str(error), error.hint)
        if base is None:
            problems.stop()
        assert base is not None
        seen.append(path.resolve())
        root = base
        found.append((root, path))
    return found


def fold(roots: Collection[Mapping], problems: Problems) -> tuple[Mapping, set[str]]:
    """Return one policy from a chain, and the names that were removed from a base."""
    base, *others = reversed([*roots])
    removed: set[str] = set()
    for own in others:
        base = _extended(_without(base, _removed(own), removed), own, problems)
    return base, removed


def with_channels(
    root: Mapping, notify: AbstractMapping[str, AbstractMapping[str, str]], problems: Problems
) -> Mapping:
    """Return a policy with more keys under `notify`."""
    text = yaml_writer.dump({"notify": notify})
    added = yaml_reader.parse(Source("--notify", text), problems)
    assert added is not None
    return Mapping(root.source, root.line, root.col, pack.merged(root, added).pairs)


def remove(root: Mapping, parts: Parts, removed: Collection[str], problems: Problems) -> None:
    """Take out the rules of packs that `remove` names.

    Args:
        removed: names that it took out of a base already.
    """
    rules, dropped = {entry.name for entry in parts.rules}, set[str]()
    packs = {name.rpartition(".")[0] for name in rules} - {""}
    section = root.get("remove")
    for node in section.items if isinstance(section, Sequence) else ():
        name = node.text if isinstance(node, Scalar) else ""
        if name in rules:
            dropped.add(name)
        elif name not in removed and not parts.may_exist(name, "rules"):
            known = did_you_mean(name, rules | packs)
            problems.add(
                node, f"remove: no rule and no pack of a base has the name {name!r}", known
            )
    parts.rules = [entry for entry in parts.rules if entry.name not in dropped]
    lost = (dropped | {*removed}) - {entry.name for entry in parts.rules}
    parts.inhibit = [kept for entry in parts.inhibit if (kept := _muting(entry, lost))]


def _muting(entry: Entry, lost: Collection[str]) -> Entry | None:
    """Return an inhibition less the rules that are left out; None if it says nothing then."""

    def is_lost(node: Node | None) -> bool:
        name = entry.scope.get(_text(node), _text(node))
        return name in lost or name.rpartition(".")[0] in lost

    node = entry.node
    if not isinstance(node, Mapping) or not isinstance(mute := node.get("mute"), Sequence):
        return entry
    kept = [each for each in mute.items if not is_lost(each)]
    if is_lost(node.get("by_rule")) or (mute.items and not kept):
        return None
    pairs = node.pairs | {
        "mute": (node.pairs["mute"][0], Sequence(mute.source, mute.line, mute.col, kept))
    }
    return replace(entry, node=Mapping(node.source, node.line, node.col, pairs))


def _removed(root: Mapping) -> set[str]:
    section = root.get("remove")
    items = section.items if isinstance(section, Sequence) else []
    return {node.text for node in items if isinstance(node, Scalar)}


def _without(base: Mapping, names: Collection[str], removed: set[str]) -> Mapping:
    """Return a base less its packs, rules and detectors of these names, and their overrides."""
    pairs = dict(base.pairs)
    for key, name_of in (("use", _text), ("rules", pack.id_of)):
        section = base.get(key)
        if isinstance(section, Sequence):
            removed.update(name for node in section.items if (name := name_of(node)) in names)
            kept = [node for node in section.items if name_of(node) not in names]
            place = section.source, section.line, section.col
            pairs[key] = (pairs[key][0], Sequence(*place, kept))
    for key in ("detectors", "override"):
        section = base.get(key)
        if isinstance(section, Mapping):
            found = {n for n in section.pairs if n in names or n.rpartition(".")[0] in names}
            removed.update(found if key == "detectors" else ())
            pairs[key] = (pairs[key][0], section.without(*found))
    return Mapping(base.source, base.line, base.col, pairs)


def _text(node: Node | None) -> str:
    return node.text if isinstance(node, Scalar) else ""


def _extended(base: Mapping, own: Mapping, problems: Problems) -> Mapping:
    pairs = {key: pair for key, pair in base.pairs.items() if key not in OWN}
    for key, (at, value) in own.pairs.items():
        old = base.get(key) if key in pairs else None
        place = value.source, value.line, value.col
        if key in ADDED and isinstance(old, Sequence):
            if not isinstance(value, Sequence):
                problems.add(value, f"{key} should be a list, not {value.shape}")
                continue
            had = {_text(node) for node in old.items} if key == "use" else ()
            new = [node for node in value.items if not had or _text(node) not in had]
            value = Sequence(*place, [*old.items, *new])
        elif isinstance(old, Mapping) and isinstance(value, Mapping):
            if key == "detectors":
                twice = [name for name in value.pairs if name in old.pairs]
                for name in twice:
                    problems.add(
                        value.pairs[name][0],
                        f"the base has a detector {name!r} already",
                        f"override: {{{name}: ...}} changes it",
                    )
                value = value.without(*twice)
            value = Mapping(*place, pack.merged(old, value).pairs)
        pairs[key] = (at, value)
    return Mapping(own.source, own.line, own.col, pairs)
