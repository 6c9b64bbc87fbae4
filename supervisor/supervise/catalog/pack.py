"""Packs: detectors and rules that policies use, and a policy's overrides of them.

Outside its file the parts of a pack have its name as a prefix: `loss_spike.jump`. Overrides are
merged before validation, so a mistake in one is reported in the policy that makes it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..core.model.policy import WORD
from ..errors import InputError
from . import shipped, yaml_document
from .diagnostics import Place, Problems, Source, did_you_mean, near_miss
from .schema import read_section
from .sections import PackFile, PolicyFile
from .yaml_document import ListNode, MapNode, Node, Scalar, list_items, mapping_entries

UNCHANGEABLE = ("kind", "id")
PACKS = "policies/packs"


@dataclass(slots=True)
class Entry:
    """A detector, a rule or an inhibition that is not built yet.

    Attributes:
        name: as the policy knows it; "" where it has none.
        scope: short names of its file, and their full names.
        overridden: keys that a policy changed, and where.
    """

    name: str
    node: Node
    scope: Mapping[str, str]
    overridden: dict[str, Place] = field(default_factory=dict)


@dataclass(slots=True)
class Parts:
    """All detectors, rules and inhibitions of a policy and its packs, in order of appearance.

    Attributes:
        complete: names of the packs that were read without a missing part.
        incomplete: some pack could not be read.
        unreadable: (file, section) with a part whose name could not be read.
        folders: where packs and runbooks are looked for: beside the policy, then beside its bases.
    """

    detectors: dict[str, Entry] = field(default_factory=dict)
    rules: list[Entry] = field(default_factory=list)
    inhibit: list[Entry] = field(default_factory=list)
    complete: set[str] = field(default_factory=set)
    incomplete: bool = False
    unreadable: set[tuple[str, str]] = field(default_factory=set)
    folders: tuple[Path, ...] = ()

    def may_exist(self, name: str, section: str, *nodes: Node) -> bool:
        """Return whether an unknown name may belong to a part that could not be read.

        Then it is not reported. `nodes`: of the files that use the name.
        """
        head, dot, _ = name.rpartition(".")
        if self.incomplete and dot and head not in self.complete:
            return True
        return any((node.source.label, section) in self.unreadable for node in nodes)

    def add(
        self,
        root: MapNode,
        form: PackFile | PolicyFile,
        scope: Mapping[str, str],
        problems: Problems,
    ) -> None:
        """Add the parts of one file; see `unreadable`."""
        for key, kind in (("detectors", MapNode), ("rules", ListNode)):
            if key in root.pairs and not isinstance(root.get(key), kind):
                self.unreadable.add((root.source.label, key))
        for short, node in mapping_entries(root, "detectors").items() if form.detectors else ():
            name = scope.get(short, short)
            if name in self.detectors:
                problems.add(node, f"there is a detector {name!r} already")
            else:
                self.detectors[name] = Entry(name, node, scope)
        for node in list_items(root, "rules") if form.rules else ():
            short = node_id(node)
            self.rules.append(Entry(scope.get(short, short), node, scope))
            if not short:  # its name is not known
                self.unreadable.add((root.source.label, "rules"))
        self.inhibit += [
            Entry("", node, scope) for node in list_items(root, "inhibit") if form.inhibit
        ]


def node_id(node: Node) -> str:
    ident = node.get("id") if isinstance(node, MapNode) else None
    return ident.text if isinstance(ident, Scalar) else ""


def find_pack(name: str, folders: Iterable[Path]) -> Path | None:
    """Return the file of a pack: beside the policy and its bases first, else a shipped one."""
    paths = (folder / "packs" / f"{name}.yaml" for folder in folders)
    return next(filter(shipped.is_file, paths), None) or shipped.find_shipped(PACKS, name)


def available_packs(folders: Iterable[Path]) -> list[str]:
    """Return the names of all packs that `find_pack` would find."""
    stems = [path.stem for folder in folders for path in (folder / "packs").glob("*.yaml")]
    return sorted({*stems, *shipped.shipped_names(PACKS)})


def add_packs(names: Collection[Node], parts: Parts, problems: Problems) -> None:
    """Add the named packs to `parts`; for a misspelt name, the pack that was meant."""
    listed = [node.text for node in names if isinstance(node, Scalar)]
    used: set[str] = set()
    for node in names:
        name = node.value if isinstance(node, Scalar) else None
        if not isinstance(name, str) or not re.fullmatch(WORD, name):
            parts.incomplete = True  # the problem is noted
            continue
        if name in used:
            problems.add(node, f"the pack {name!r} is used twice")
            continue
        used.add(name)
        path = find_pack(name, parts.folders)
        if path is None:
            parts.incomplete = True
            packs = available_packs(parts.folders)
            problems.add(node, f"no pack {name!r}", did_you_mean(name, packs))
            suggestion = near_miss(name, packs)
            if suggestion is None or suggestion in used or suggestion in listed:
                continue
            used.add(suggestion)
            name, path = suggestion, find_pack(suggestion, parts.folders)
            assert path is not None
        root = yaml_document.read_mapping(path, shipped.display_path(path), problems)
        if root is None:
            parts.incomplete = True
        else:
            add_pack(root, name, parts, problems)


def add_pack(root: MapNode, name: str, parts: Parts, problems: Problems) -> PackFile:
    """Add the pack that a file of this name (without `.yaml`) holds; return its form."""
    form: PackFile = read_section(PackFile, root, problems, "", lenient=True)
    if form.pack not in (name, None):
        problems.add(root.locate("pack"), f"pack {form.pack!r} is in a file named {name}.yaml")
    detectors = form.detectors or {}
    rules = list_items(root, "rules") if form.rules else []
    ids = [node_id(node) for node in rules]
    for node in rules:
        if node_id(node) in detectors:
            problems.add(
                node, f"a detector is named {node_id(node)!r} too; overrides need one name"
            )
    scope = {short: f"{name}.{short}" for short in (*detectors, *ids) if short}
    parts.add(root, form, scope, problems)
    sections = ("detectors", "rules")
    absent = {(root.source.label, key) for key in sections if key not in root.pairs}
    parts.unreadable |= absent
    if absent or any((root.source.label, key) in parts.unreadable for key in sections):
        parts.incomplete = True
    else:
        parts.complete.add(name)
    return form


def apply_overrides(root: MapNode, form: PolicyFile, parts: Parts, problems: Problems) -> None:
    """Merge the policy's `override` into the entries it names."""
    entries = {**{entry.name: entry for entry in parts.rules if entry.name}, **parts.detectors}
    section = root.get("override")
    keys = section.pairs if isinstance(section, MapNode) else {}
    for name in form.override:
        change, source = (
            keys[name][1],
            keys[name][0].source,
        )  # what a file itself has is changed there
        packed = {name: e for name, e in entries.items() if e.node.source is not source}
        entry = packed.get(name)
        if entry is None:
            if parts.may_exist(name, ""):
                continue
            hint = did_you_mean(name, packed)
            problems.add(change, f"override of {name!r}: no pack in use has it", hint)
        elif not isinstance(change, MapNode):
            problems.add(change, f"override of {name!r} should be a mapping, not {change.shape}")
        elif isinstance(entry.node, MapNode):
            fixed = [key for key in UNCHANGEABLE if key in change.pairs]
            for key in fixed:
                problems.add(change.pairs[key][0], f"{key!r} cannot be overridden")
            change = change.without(*fixed)
            entry.overridden = {key: value for key, (_, value) in change.pairs.items()}
            entry.node = merge_entry(entry.node, change)


def merge_entry(base: MapNode, change: MapNode) -> MapNode:
    """Return `base` with the keys of `change`; mappings inside are merged, lists replaced."""
    pairs = dict(base.pairs)
    for key, (key_node, value) in change.pairs.items():
        old = base.get(key)
        if isinstance(old, MapNode) and isinstance(value, MapNode):
            value = merge_entry(old, value)
        pairs[key] = (key_node, value)
    return MapNode(base.source, base.line, base.col, pairs)


ADDED = ("use", "rules", "inhibit", "planned", "remove")
OWN = ("version", "policy", "summary", "extends", "cites")  # a base's say nothing about the policy


def base_chain(root: MapNode, path: Path, problems: Problems) -> list[tuple[MapNode, Path]]:
    """Return a policy and its file, then those of its base, of the base of that, and so on.

    Raises:
        PolicyErrors: a base is missing, cannot be read, or extends the policy itself.
    """
    files = [(root, path)]
    paths = [path.resolve()]
    while isinstance(named := root.get("extends"), Scalar) and isinstance(named.value, str):
        base = None
        try:
            path = shipped.locate_base(path, named.text)
            if path.resolve() in paths:
                names = [base.name for base in (*paths[paths.index(path.resolve()) :], path)]
                problems.add(named, f"policies extend each other: {' -> '.join(names)}")
            else:
                base = yaml_document.read_mapping(path, shipped.display_path(path), problems)
        except InputError as error:
            problems.add(named, str(error), error.hint)
        if base is None:
            problems.raise_if_any()
        assert base is not None
        paths.append(path.resolve())
        root = base
        files.append((root, path))
    return files


def merge_policy_chain(roots: Collection[MapNode], problems: Problems) -> tuple[MapNode, set[str]]:
    """Return one policy from a chain, and the names that were removed from a base."""
    base, *extensions = reversed([*roots])
    removed: set[str] = set()
    for extension in extensions:
        base = _extended(_without(base, _removed(extension), removed), extension, problems)
    return base, removed


def add_channels(
    root: MapNode, notify: Mapping[str, Mapping[str, str]], problems: Problems
) -> MapNode:
    """Return a policy with more keys under `notify`."""
    text = yaml_document.dump_yaml({"notify": notify})
    added = yaml_document.parse_yaml(Source("--notify", text), problems)
    assert added is not None
    return MapNode(root.source, root.line, root.col, merge_entry(root, added).pairs)


def remove_rules(root: MapNode, parts: Parts, removed: Collection[str], problems: Problems) -> None:
    """Take out the rules of packs that `remove` names.

    Args:
        removed: names that it took out of a base already.
    """
    rules, dropped = {entry.name for entry in parts.rules}, set[str]()
    packs = {name.rpartition(".")[0] for name in rules} - {""}
    section = root.get("remove")
    for node in section.items if isinstance(section, ListNode) else ():
        name = node.text if isinstance(node, Scalar) else ""
        if name in rules:
            dropped.add(name)
        elif name not in removed and not parts.may_exist(name, "rules"):
            hint = did_you_mean(name, rules | packs)
            problems.add(node, f"remove: no rule and no pack of a base has the name {name!r}", hint)
    parts.rules = [entry for entry in parts.rules if entry.name not in dropped]
    lost = (dropped | {*removed}) - {entry.name for entry in parts.rules}
    parts.inhibit = [remaining for entry in parts.inhibit if (remaining := _muting(entry, lost))]


def _muting(entry: Entry, lost: Collection[str]) -> Entry | None:
    """Return an inhibition less the rules that are left out; None if it says nothing then."""

    def is_lost(node: Node | None) -> bool:
        name = entry.scope.get(_text(node), _text(node))
        return name in lost or name.rpartition(".")[0] in lost

    node = entry.node
    if not isinstance(node, MapNode) or not isinstance(mute := node.get("mute"), ListNode):
        return entry
    muted = [item for item in mute.items if not is_lost(item)]
    if is_lost(node.get("by_rule")) or (mute.items and not muted):
        return None
    pairs = node.pairs | {
        "mute": (node.pairs["mute"][0], ListNode(mute.source, mute.line, mute.col, muted))
    }
    return replace(entry, node=MapNode(node.source, node.line, node.col, pairs))


def _removed(root: MapNode) -> set[str]:
    section = root.get("remove")
    items = section.items if isinstance(section, ListNode) else []
    return {node.text for node in items if isinstance(node, Scalar)}


def _without(base: MapNode, names: Collection[str], removed: set[str]) -> MapNode:
    """Return a base less its packs, rules and detectors of these names, and their overrides."""
    pairs = dict(base.pairs)
    for key, name_of in (("use", _text), ("rules", node_id)):
        section = base.get(key)
        if isinstance(section, ListNode):
            removed.update(name for node in section.items if (name := name_of(node)) in names)
            nodes = [node for node in section.items if name_of(node) not in names]
            position = section.source, section.line, section.col
            pairs[key] = (pairs[key][0], ListNode(*position, nodes))
    for key in ("detectors", "override"):
        section = base.get(key)
        if isinstance(section, MapNode):
            dropped = {n for n in section.pairs if n in names or n.rpartition(".")[0] in names}
            removed.update(dropped if key == "detectors" else ())
            pairs[key] = (pairs[key][0], section.without(*dropped))
    return MapNode(base.source, base.line, base.col, pairs)


def _text(node: Node | None) -> str:
    return node.text if isinstance(node, Scalar) else ""


def _extended(base: MapNode, extension: MapNode, problems: Problems) -> MapNode:
    pairs = {key: pair for key, pair in base.pairs.items() if key not in OWN}
    for key, (key_node, value) in extension.pairs.items():
        old = base.get(key) if key in pairs else None
        position = value.source, value.line, value.col
        if key in ADDED and isinstance(old, ListNode):
            if not isinstance(value, ListNode):
                problems.add(value, f"{key} should be a list, not {value.shape}")
                continue
            had = {_text(node) for node in old.items} if key == "use" else ()
            new = [node for node in value.items if not had or _text(node) not in had]
            value = ListNode(*position, [*old.items, *new])
        elif isinstance(old, MapNode) and isinstance(value, MapNode):
            if key == "detectors":
                twice = [name for name in value.pairs if name in old.pairs]
                for name in twice:
                    problems.add(
                        value.pairs[name][0],
                        f"the base has a detector {name!r} already",
                        f"override: {{{name}: ...}} changes it",
                    )
                value = value.without(*twice)
            value = MapNode(*position, merge_entry(old, value).pairs)
        pairs[key] = (key_node, value)
    return MapNode(extension.source, extension.line, extension.col, pairs)
