"""Packs: detectors and rules to be used by policies, and the overrides a policy puts on them.

Outside its file everything of a pack has its name in front: `loss_spike.jump`. Inside it the short
names do. Overrides are merged before anything is checked, so a mistake in one is reported in the
policy that made it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import load, shipped
from .forms import PackFile, PolicyFile
from .kinds import BAD
from .nodes import Mapping, Node, Scalar
from .problems import Place, Problems, did_you_mean
from .record import build

UNCHANGEABLE = ("kind", "id")
PACKS = "policies/packs"


@dataclass(slots=True)
class Entry:
    """A detector, a rule or an inhibition that is not built yet.

    Attributes:
        name: as the policy knows it; "" where it has none.
        scope: short names that its file may use, and what they stand for.
        overridden: keys that a policy changed, and where.
    """

    name: str
    node: Node
    scope: AbstractMapping[str, str]
    overridden: dict[str, Place] = field(default_factory=dict)


@dataclass(slots=True)
class Parts:
    """All detectors, rules and inhibitions of a policy and its packs, in order of appearance."""

    detectors: dict[str, Entry] = field(default_factory=dict)
    rules: list[Entry] = field(default_factory=list)
    inhibit: list[Entry] = field(default_factory=list)

    def add(
        self,
        root: Mapping,
        form: PackFile | PolicyFile,
        scope: AbstractMapping[str, str],
        problems: Problems,
    ) -> None:
        """Add what one file defines."""
        for short, node in form.detectors.items():
            name = scope.get(short, short)
            if name in self.detectors:
                problems.add(node, f"there is a detector {name!r} already")
            else:
                self.detectors[name] = Entry(name, node, scope)
        for node in form.rules:
            short = _id_of(node)
            self.rules.append(Entry(scope.get(short, short), node, scope))
        self.inhibit += [Entry("", node, scope) for node in form.inhibit]


def _id_of(node: Node) -> str:
    ident = node.get("id") if isinstance(node, Mapping) else None
    return ident.text if isinstance(ident, Scalar) else ""


def find(name: str, beside: Path | None) -> Path | None:
    """Return the file of a pack: beside the policy first, else a shipped one."""
    if beside is not None and (own := beside / "packs" / f"{name}.yaml").is_file():
        return own
    return shipped.find(PACKS, name)


def available(beside: Path | None) -> list[str]:
    """Return the names of all packs that `find` would find."""
    own = [] if beside is None else [path.stem for path in (beside / "packs").glob("*.yaml")]
    return sorted({*own, *shipped.names(PACKS)})


def use(names: Iterable[Node], beside: Path | None, parts: Parts, problems: Problems) -> None:
    """Add the named packs to `parts`."""
    seen: set[str] = set()
    for node in names:
        assert isinstance(node, Scalar)
        name = node.text
        if name in seen:
            problems.add(node, f"the pack {name!r} is used twice")
            continue
        seen.add(name)
        path = find(name, beside)
        if path is None:
            problems.add(node, f"no pack {name!r}", did_you_mean(name, available(beside)))
            continue
        root = load.read(path, shipped.label(path), problems)
        if root is not None:
            add(root, name, parts, problems)


def add(root: Mapping, name: str, parts: Parts, problems: Problems) -> Any:
    """Add the pack that a file of this name (without `.yaml`) holds; return its form, or BAD."""
    form: PackFile = build(PackFile, root, problems, "")
    if form is BAD:
        return BAD
    if form.pack != name:
        problems.add(root.place("pack"), f"pack {form.pack!r} stands in a file named {name}.yaml")
    ids = [_id_of(node) for node in form.rules]
    for node in form.rules:
        if _id_of(node) in form.detectors:
            problems.add(node, f"a detector is named {_id_of(node)!r} too; overrides need one name")
    scope = {short: f"{name}.{short}" for short in (*form.detectors, *ids) if short}
    parts.add(root, form, scope, problems)
    return form


def override(root: Mapping, form: PolicyFile, parts: Parts, problems: Problems) -> None:
    """Merge the policy's `override` into the entries it names."""
    entries = {**{entry.name: entry for entry in parts.rules if entry.name}, **parts.detectors}
    packed = {name: e for name, e in entries.items() if e.node.source is not root.source}
    for name, change in form.override.items():
        entry = packed.get(name)
        if entry is None:
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
