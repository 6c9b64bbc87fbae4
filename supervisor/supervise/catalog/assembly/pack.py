"""Packs: detectors and rules that policies use, and a policy's overrides of them.

Outside its file the parts of a pack have its name as a prefix: `loss_spike.jump`. Overrides are
merged before validation, so a mistake in one is reported in the policy that makes it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass, field
from pathlib import Path

from ..document import yaml_reader
from ..document.diagnostics import Place, Problems, did_you_mean, near_miss
from ..document.nodes import Mapping, Node, Scalar, Sequence
from ..forms.file_forms import WORD, PackFile, PolicyFile
from ..inventory import shipped
from ..schema.dataclass_types import read_form

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
    scope: AbstractMapping[str, str]
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
        root: Mapping,
        form: PackFile | PolicyFile,
        scope: AbstractMapping[str, str],
        problems: Problems,
    ) -> None:
        """Add the parts of one file; see `unreadable`."""
        for key, kind in (("detectors", Mapping), ("rules", Sequence)):
            if key in root.pairs and not isinstance(root.get(key), kind):
                self.unreadable.add((root.source.label, key))
        for short, node in (form.detectors or {}).items():
            name = scope.get(short, short)
            if name in self.detectors:
                problems.add(node, f"there is a detector {name!r} already")
            else:
                self.detectors[name] = Entry(name, node, scope)
        for node in form.rules or ():
            short = id_of(node)
            self.rules.append(Entry(scope.get(short, short), node, scope))
            if not short:  # its name is not known
                self.unreadable.add((root.source.label, "rules"))
        self.inhibit += [Entry("", node, scope) for node in form.inhibit]


def id_of(node: Node) -> str:
    ident = node.get("id") if isinstance(node, Mapping) else None
    return ident.text if isinstance(ident, Scalar) else ""


def find(name: str, folders: Iterable[Path]) -> Path | None:
    """Return the file of a pack: beside the policy and its bases first, else a shipped one."""
    own = (folder / "packs" / f"{name}.yaml" for folder in folders)
    return next(filter(shipped.is_file, own), None) or shipped.find(PACKS, name)


def available(folders: Iterable[Path]) -> list[str]:
    """Return the names of all packs that `find` would find."""
    own = [path.stem for folder in folders for path in (folder / "packs").glob("*.yaml")]
    return sorted({*own, *shipped.names(PACKS)})


def use(names: Collection[Node], parts: Parts, problems: Problems) -> None:
    """Add the named packs to `parts`; for a misspelt name, the pack that was meant."""
    listed = [node.text for node in names if isinstance(node, Scalar)]
    seen: set[str] = set()
    for node in names:
        name = node.value if isinstance(node, Scalar) else None
        if not isinstance(name, str) or not re.fullmatch(WORD, name):
            parts.incomplete = True  # the problem is noted
            continue
        if name in seen:
            problems.add(node, f"the pack {name!r} is used twice")
            continue
        seen.add(name)
        path = find(name, parts.folders)
        if path is None:
            parts.incomplete = True
            known = available(parts.folders)
            problems.add(node, f"no pack {name!r}", did_you_mean(name, known))
            meant = near_miss(name, known)
            if meant is None or meant in seen or meant in listed:
                continue
            seen.add(meant)
            name, path = meant, find(meant, parts.folders)
            assert path is not None
        root = yaml_reader.read(path, shipped.label(path), problems)
        if root is None:
            parts.incomplete = True
        else:
            add(root, name, parts, problems)


def add(root: Mapping, name: str, parts: Parts, problems: Problems) -> PackFile:
    """Add the pack that a file of this name (without `.yaml`) holds; return its form."""
    form: PackFile = read_form(PackFile, root, problems, "", lenient=True)
    if form.pack not in (name, None):
        problems.add(root.place("pack"), f"pack {form.pack!r} is in a file named {name}.yaml")
    detectors, rules = form.detectors or {}, form.rules or ()
    ids = [id_of(node) for node in rules]
    for node in rules:
        if id_of(node) in detectors:
            problems.add(node, f"a detector is named {id_of(node)!r} too; overrides need one name")
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


def override(root: Mapping, form: PolicyFile, parts: Parts, problems: Problems) -> None:
    """Merge the policy's `override` into the entries it names."""
    entries = {**{entry.name: entry for entry in parts.rules if entry.name}, **parts.detectors}
    section = root.get("override")
    keys = section.pairs if isinstance(section, Mapping) else {}
    for name, change in form.override.items():
        own = keys[name][0].source  # what a file itself has is changed there
        packed = {name: e for name, e in entries.items() if e.node.source is not own}
        entry = packed.get(name)
        if entry is None:
            if parts.may_exist(name, ""):
                continue
            hint = did_you_mean(name, packed)
            problems.add(change, f"override of {name!r}: no pack in use has it", hint)
        elif not isinstance(change, Mapping):
            problems.add(change, f"override of {name!r} should be a mapping, not {change.shape}")
        elif isinstance(entry.node, Mapping):
            fixed = [key for key in UNCHANGEABLE if key in change.pairs]
            for key in fixed:
                problems.add(change.pairs[key][0], f"{key!r} cannot be overridden")
            change = change.without(*fixed)
            entry.overridden = {key: value for key, (_, value) in change.pairs.items()}
            entry.node = merged(entry.node, change)


def merged(base: Mapping, change: Mapping) -> Mapping:
    """Return `base` with the keys of `change`; mappings inside are merged, lists replaced."""
    pairs = dict(base.pairs)
    for key, (at, value) in change.pairs.items():
        old = base.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merged(old, value)
        pairs[key] = (at, value)
    return Mapping(base.source, base.line, base.col, pairs)
