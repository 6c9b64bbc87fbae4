"""Mutants of a policy: one number, comparator or operator changed, or one inhibition removed.

Only values written in the file under test are changed: defaults are tested with the detector, packs
by their own scenarios. A mutant that fails the checks of its detector is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

from ..catalog.assembly import freeze, rules
from ..catalog.assembly.expression import Expression, Tree, parse
from ..catalog.document.diagnostics import Problems, Source
from ..catalog.document.nodes import Mapping, Node, Scalar, Sequence
from ..catalog.scenario_subject import Subject
from ..catalog.schema.dataclass_types import keys_of
from ..core.model.interfaces import Detector
from ..core.model.policy import Policy, Rule

TURNED = {"gt": "lt", "lt": "gt", "gte": "lte", "lte": "gte"}
SIDES = {"high": "low", "low": "high"}
RULE_KEYS = {"for": "for_steps", "keep": "keep_steps", "cooldown": "cooldown_steps"}

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One policy with one change.

    Attributes:
        where: file:line:col of what was changed. what: the change, in a few words.
        build: makes the policy. metrics: only a scenario with one of these can detect it; empty:
            any
            scenario can.
    """

    where: str
    what: str
    build: Callable[[], Policy]
    metrics: frozenset[str] = frozenset()


def mutants(subject: Subject) -> list[Mutant]:
    """Return all mutants of the file that the scenarios of a subject must detect."""
    return [
        *_detectors(subject),
        *_rules(subject),
        *_inhibitions(subject),
        *_sections(subject),
        *_runbooks(subject),
    ]


def _where(node: Node) -> str:
    return f"{node.source.label}:{node.line}:{node.col}"


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────


def numbers(node: Node, value: Any, own: Source, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield where in `value` a number came from the file `own`, and its node."""
    if isinstance(node, Scalar):
        if isinstance(value, int | float) and not isinstance(value, bool) and node.source is own:
            yield path, node
    elif isinstance(node, Mapping):
        form: type = type(value)
        known = keys_of(form) if is_dataclass(form) else {}
        for key, (_, inner) in node.pairs.items():
            if key in known:
                name = known[key].attribute
                yield from numbers(inner, getattr(value, name), own, (*path, name))
            elif isinstance(value, AbstractMapping) and key in value:
                yield from numbers(inner, value[key], own, (*path, key))
    elif isinstance(node, Sequence) and isinstance(value, tuple | list):
        for i, (inner, held) in enumerate(zip(node.items, value, strict=False)):
            yield from numbers(inner, held, own, (*path, i))


def at(value: Any, path: Path) -> Any:
    """Return the value at a path."""
    for key in path:
        value = getattr(value, key) if is_dataclass(value) else value[key]
    return value


def put(value: Any, path: Path, new: Any) -> Any:
    """Return a copy of `value` with another value at a path."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{key: put(getattr(value, key), rest, new)})
    if isinstance(value, AbstractMapping):
        return {**value, key: put(value[key], rest, new)}
    return type(value)(put(v, rest, new) if i == key else v for i, v in enumerate(value))


def others(number: float) -> list[float]:
    """Return the number doubled and halved, without itself and 0."""
    if isinstance(number, int):
        return [n for n in (number * 2, number // 2) if n not in (number, 0)]
    return [n for n in (number * 2.0, number / 2.0) if n != number]


def _change_text(path: Path, old: Any, new: Any) -> str:
    return f"{'.'.join(str(part).rstrip('_') for part in path)}: {old} -> {new}"


# ── detectors ─────────────────────────────────────────────────────────────────────────────────────


def _detectors(subject: Subject) -> Iterator[Mutant]:
    policy = subject.policy
    for name, entry in subject.draft.parts.detectors.items():
        detector = policy.detectors[name]
        metrics = _reads(policy, name)
        for node, what, changed in _changes(detector, entry.node, subject.own):
            if not changed.check():
                found = {**policy.detectors, name: changed}
                yield Mutant(
                    _where(node), f"{name}.{what}", _with(policy, detectors=found), metrics
                )


def _reads(policy: Policy, name: str) -> frozenset[str]:
    """Return the metrics that can change a detector's answer; empty when the clock can."""
    found: set[str] = set()
    todo = [name]
    while todo:
        detector = policy.detectors[todo.pop()]
        if detector.reads == "clock":
            return frozenset()
        found.update(detector.metrics)
        todo += detector.detectors
    return frozenset(found)


def _with(policy: Policy, **changes: Any) -> Callable[[], Policy]:
    return partial(replace, policy, **changes)


def _changes(detector: Detector, node: Node, own: Source) -> Iterator[tuple[Node, str, Detector]]:
    """Yield `(node, what, detector)` for every change of one number or comparator."""
    for path, place in numbers(node, detector, own):
        old = at(detector, path)
        for new in others(old):
            changed = put(detector, path, new)
            clear = getattr(detector, "clear", None)
            if changed.check() and clear is not None and path != ("clear",):
                # `clear` must stay on the safe side of the bound: scale it as well.
                changed = put(changed, ("clear",), clear * new / old)
            yield place, _change_text(path, old, new), changed
    keys = keys_of(type(detector))
    for key, (_, place) in node.pairs.items() if isinstance(node, Mapping) else ():
        head, _, last = key.rpartition("_")
        turned = "_".join(filter(None, (head, TURNED.get(last, ""))))
        if key not in keys or place.source is not own:
            continue
        value = getattr(detector, keys[key].attribute)
        if last in TURNED and turned in keys and value is not None:
            changes: dict[str, Any] = {keys[key].attribute: None, keys[turned].attribute: value}
            changed = replace(detector, **changes)
            if changed.check() and "clear" in keys:
                changed = put(changed, ("clear",), None)
            yield place, f"{key} -> {turned}", changed
        elif key == "side" and value in SIDES:
            yield place, f"side: {value} -> {SIDES[value]}", put(detector, ("side",), SIDES[value])


# ── rules and inhibitions ─────────────────────────────────────────────────────────────────────────


def _rules(subject: Subject) -> Iterator[Mutant]:
    policy, index = subject.policy, {n: i for i, n in enumerate(subject.policy.detectors)}
    for i, made in enumerate(subject.draft.rules):
        node = made.entry.node
        if not isinstance(node, Mapping):
            continue
        for key, name in RULE_KEYS.items():
            place = node.get(key)
            if place is None or place.source is not subject.own:
                continue
            if key == "cooldown" and subject.names.scope:  # a pack alone performs no actions
                continue
            old = getattr(made.rule, name)
            for new in others(old):
                rule: Rule = put(made.rule, (name,), new)
                what = f"{rule.id}.{_change_text((key,), old, new)}"
                yield Mutant(_where(place), what, _with(policy, rules=_swap(policy, i, rule)))
        place = node.get("phases")
        if place is not None and place.source is subject.own:
            rule = replace(made.rule, phases={})
            swapped = _with(policy, rules=_swap(policy, i, rule))
            yield Mutant(_where(place), f"phases of {rule.id} removed", swapped)
        place = node.place("when")
        if place.source is subject.own:
            for tree in _trees(parse(made.rule.text, limit=len(made.rule.text)).tree):
                when = Expression(made.rule.text, tree, ()).compile(index)
                rule = replace(made.rule, when=when)
                what = f"{rule.id}.when: {_tree_text(tree)}"
                yield Mutant(_where(place), what, _with(policy, rules=_swap(policy, i, rule)))


def _swap(policy: Policy, i: int, rule: Rule) -> tuple[Rule, ...]:
    return (*policy.rules[:i], rule, *policy.rules[i + 1 :])


def _trees(tree: Tree) -> Iterator[Tree]:
    """Yield the tree with one `and` become `or`, or the other way round."""
    kind, parts = tree[0], tree[1:]
    if kind in ("and", "or"):
        yield ("or" if kind == "and" else "and", *parts)
    for i, part in enumerate(parts):
        if not isinstance(part, str):
            for inner in _trees(part):
                yield (kind, *parts[:i], inner, *parts[i + 1 :])


def _tree_text(tree: Tree | str) -> str:
    if isinstance(tree, str):
        return tree
    kind, parts = tree[0], [_tree_text(part) for part in tree[1:]]
    if kind == "name":
        return parts[0]
    return f"not {parts[0]}" if kind == "not" else "(" + f" {kind} ".join(parts) + ")"


def _inhibitions(subject: Subject) -> Iterator[Mutant]:
    policy = subject.policy
    for i, entry in enumerate(subject.draft.parts.inhibit):
        if entry.node.source is subject.own:
            left = (*policy.inhibit[:i], *policy.inhibit[i + 1 :])
            what = f"inhibit of {', '.join(policy.inhibit[i].mute)} removed"
            yield Mutant(_where(entry.node), what, _with(policy, inhibit=left))


# ── the rest of a policy ──────────────────────────────────────────────────────────────────────────

# Changed above, part by part; or done by the probe, which no scenario covers.
_ELSEWHERE = ("detectors", "rules", "inhibit", "runbooks", "override", "notify", "safeguards")


def _sections(subject: Subject) -> Iterator[Mutant]:
    """Budgets, ladder, savepoints, baseline: what stands at the top of a policy."""
    draft = subject.draft
    root, form = draft.root, draft.form
    if root.source is not subject.own or not isinstance(root, Mapping) or subject.names.scope:
        return
    for path, node in numbers(root.without(*_ELSEWHERE), form, subject.own):
        for new in others(at(form, path)):
            changed = put(form, path, new)
            part = at(changed, path[:1])
            remade = replace(draft, form=changed)
            if path[0] == "baseline":  # the detectors hold it
                found, broken = rules.detectors(draft.parts, changed.baseline, Problems())
                if broken:
                    continue
                remade = replace(remade, detectors={name: found[name] for name in draft.detectors})
            if not (hasattr(part, "check") and part.check()):
                what = _change_text(path, at(form, path), new)
                yield Mutant(_where(node), what, partial(freeze.policy, remade))


def _runbooks(subject: Subject) -> Iterator[Mutant]:
    """Numbers in the steps of runbooks defined in the policy."""
    for name, opened in subject.draft.runbooks.items():
        if opened.node.source is not subject.own:
            continue
        for i, step in enumerate(opened.form.steps):
            for path, node in numbers(_keys(opened.place(i)), step, subject.own):
                for new in others(at(step, path)):
                    changed = put(step, path, new)
                    if changed.check():
                        continue
                    form = put(opened.form, ("steps", i), changed)
                    books = {**subject.draft.runbooks, name: replace(opened, form=form)}
                    what = f"runbook {name}: {_change_text(path, at(step, path), new)}"
                    draft = replace(subject.draft, runbooks=books)
                    yield Mutant(_where(node), what, partial(freeze.policy, draft))


def _keys(step: Node) -> Node:
    """Return the keys of a step: below its verb, or, for `verify:`, the step itself."""
    if isinstance(step, Mapping) and len(step.pairs) == 1:
        ((_, inner),) = step.pairs.values()
        return inner if isinstance(inner, Mapping) else step
    return step
