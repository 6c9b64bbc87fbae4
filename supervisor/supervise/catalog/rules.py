"""Detectors and rules, put together: names resolved, inputs first, `when` compiled.

The `when` language: detector names joined by `and`, `or`, `not` and parentheses.

    expr = term {"or" term}    term = factor {"and" factor}    factor = "not" factor | atom
    atom = NAME | "(" expr ")"                                 NAME may hold dots: pack.detector

There is no arithmetic: numbers live in detectors, where they are checked and named. Readings are
three-valued, so and = min, or = max, not = 2 - x. Not Python's `ast`: it would take `a < b < c`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from operator import itemgetter
from typing import Any, NamedTuple

from ..core.model.decisions import SEVERITIES
from ..core.model.interfaces import Detector
from ..core.model.policy import HOLD, OFF, RUN_PHASES, Inhibit, Rule, detectors_behind
from . import discover
from .diagnostics import Problems, did_you_mean
from .pack import Entry, Parts
from .schema import BAD, keys_of, read_section
from .sections import Baseline, WrittenRule, read_detector, read_valid_keys
from .yaml_document import MapNode, Node, Scalar, first_text, position_inside

MAX_LENGTH = 500
MAX_DEPTH = 32
WORDS = ("and", "or", "not")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")

_TOKEN = re.compile(rf"\s*(?:({NAME.pattern})|([()])|(\S))")

When = Callable[[Sequence[int]], int]
Tree = tuple["str | Tree", ...]  # ("name", n) | ("not", tree) | ("and", tree, ...) | ("or", ...)


class ExpressionError(Exception):
    """The text is no expression; `at` is the zero-based position of the mistake."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.at = position


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed `when`.

    Attributes:
        text: as it was written.
        names: the detectors it reads, in order of first use.
        places: `(name, zero-based position in text)` of every use.
    """

    text: str
    tree: Tree
    places: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in self.places))

    def with_names(self, names: Mapping[str, str]) -> Expression:
        """Return it with other names: a pack's own `jump` becomes `loss_spike.jump`."""
        parts, end = [], 0
        for name, position in self.places:
            parts += [self.text[end:position], names.get(name, name)]
            end = position + len(name)
        text = "".join(parts) + self.text[end:]
        return parse_expression(text, limit=len(text))

    def compile(self, index: Mapping[str, int]) -> When:
        """Return a function of the codes of all detectors; `index` says where each one is."""
        return _closure(self.tree, index)


def parse_expression(text: str, *, limit: int = MAX_LENGTH) -> Expression:
    """Parse a `when`.

    Raises:
        ExpressionError: with the position of the mistake.
    """
    if len(text) > limit:
        raise ExpressionError(f"longer than {limit} characters; split the rule", limit)
    parser = _Parser(text)
    tree = parser.either(0)
    if parser.word:
        raise ExpressionError(f"{parser.word!r} is not expected here", parser.at)
    return Expression(text, tree, tuple(parser.places))


class _Parser:
    """Recursive descent with one token of look-ahead; depth is bounded by MAX_DEPTH."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.next = 0
        self.places: list[tuple[str, int]] = []
        self.word, self.at = "", 0
        self._advance()

    def _advance(self) -> None:
        match = _TOKEN.match(self.text, self.next)
        if match is None:
            self.word, self.at = "", len(self.text)
            return
        group = match.lastindex or 0
        self.word, self.at, self.next = match.group(group), match.start(group), match.end()
        if group == 3:
            raise ExpressionError(
                f"{self.word!r} has no meaning here: only detector names, and, or, not, ( )",
                self.at,
            )

    def either(self, depth: int) -> Tree:
        return self._chain("or", self.conjunction, depth)

    def conjunction(self, depth: int) -> Tree:
        return self._chain("and", self.factor, depth)

    def _chain(self, word: str, part: Callable[[int], Tree], depth: int) -> Tree:
        parts = [part(depth)]
        while self.word == word:
            self._advance()
            parts.append(part(depth))
        return parts[0] if len(parts) == 1 else (word, *parts)

    def factor(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"nested deeper than {MAX_DEPTH} levels", self.at)
        word, position = self.word, self.at
        if word == "not":
            self._advance()
            return ("not", self.factor(depth + 1))
        if word == "(":
            self._advance()
            tree = self.either(depth + 1)
            if self.word != ")":
                raise ExpressionError("this parenthesis is never closed", position)
            self._advance()
            return tree
        if not word:
            raise ExpressionError("a detector name is missing here", position)
        if word == ")" or word in WORDS:
            raise ExpressionError(f"a detector name is missing before {word!r}", position)
        self.places.append((word, position))
        self._advance()
        return ("name", word)


def _closure(tree: Tree, index: Mapping[str, int]) -> When:
    kind, parts = tree[0], tree[1:]
    if kind == "name":
        assert isinstance(parts[0], str)
        return itemgetter(index[parts[0]])
    inner = [_closure(part, index) for part in parts if not isinstance(part, str)]
    if kind == "not":
        (only,) = inner
        return lambda codes: 2 - only(codes)
    if len(inner) == 2:  # the common case, without a loop: this runs for every rule on every step
        a, b = inner
        if kind == "and":
            return lambda codes: x if (x := a(codes)) < (y := b(codes)) else y
        return lambda codes: x if (x := a(codes)) > (y := b(codes)) else y
    if kind == "and":
        return lambda codes: min([part(codes) for part in inner])
    return lambda codes: max([part(codes) for part in inner])


LOSSES = frozenset(("train_loss_raw", "train_loss", "train_loss_ema", "train_ppl"))
NOT_OF_HEIGHT = ("nonfinite", "equal", "threshold")  # kinds


def demote_loss_rule(rule: Rule, detectors: Mapping[str, Detector]) -> Rule:
    """Return a rule that judges the height of a loss by its past as one that only notifies."""
    behind = (detectors[name] for name in detectors_behind(detectors, rule.uses))
    judges = (d for d in behind if discover.yaml_name_of(d) not in NOT_OF_HEIGHT)
    if not any(LOSSES.intersection(detector.metrics) for detector in judges):
        return rule
    phases = {phase: severity for phase, severity in rule.phases.items() if severity == OFF}
    return replace(rule, severity="SEV2", runbook=None, phases=phases)


def build_detectors(
    parts: Parts, baseline: Baseline, problems: Problems
) -> tuple[dict[str, Detector], set[str]]:
    """Build all detectors, inputs before the detectors that read them.

    Returns:
        The detectors, and the names of those that could not be built (their problems are noted).
    """
    defaults = {"window": baseline.window, "min": baseline.least}
    built: dict[str, Detector] = {}
    partly: dict[str, Detector] = {}
    broken: set[str] = set()
    for name, entry in parts.detectors.items():
        if name.rpartition(".")[2] in (*WORDS, HOLD):
            problems.add(entry.node, f"{name!r} is a reserved word")
        detector = read_detector(
            entry.node, problems, name, baseline=defaults, overridden=entry.overridden
        )
        if detector is BAD:
            broken.add(name)
            detector = read_valid_keys(entry.node)
            if detector is not BAD:
                partly[name] = _qualified(detector, entry.scope)
        else:
            built[name] = _qualified(detector, entry.scope)
    for name, detector in (built | partly).items():
        entry = parts.detectors[name]
        for read in detector.detectors:
            if read not in parts.detectors and not parts.may_exist(read, "detectors", entry.node):
                near = did_you_mean(read, _usable(entry.scope, parts.detectors))
                message = f"{name} reads an unknown detector {read!r}"
                problems.add(first_text(entry.node, read), message, near)
    return _ordered(built, parts, problems), broken


def _qualified(detector: Detector, scope: Mapping[str, str]) -> Detector:
    """Replace a pack's short names in the fields that name detectors."""
    for key in keys_of(type(detector)).values():
        value = getattr(detector, key.attribute)
        if isinstance(value, str):
            renamed: Any = scope.get(value, value)
        elif isinstance(value, tuple):
            renamed = tuple(scope.get(v, v) if isinstance(v, str) else v for v in value)
        else:
            continue
        if renamed != value:
            candidate = replace(detector, **{key.attribute: renamed})
            # Another field may hold the same text; only this one names a detector.
            if candidate.detectors != detector.detectors:
                detector = candidate
    return detector


def _ordered(
    built: Mapping[str, Detector], parts: Parts, problems: Problems
) -> dict[str, Detector]:
    graph = {name: [n for n in det.detectors if n in built] for name, det in built.items()}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        cycle: list[str] = error.args[1]
        text = " -> ".join(reversed(cycle))
        problems.add(parts.detectors[cycle[0]].node, f"detectors read each other: {text}")
        return dict(built)
    return {name: built[name] for name in order}


class BuiltRule(NamedTuple):
    """A rule that was built, and what it was built from."""

    rule: Rule
    form: WrittenRule
    entry: Entry


class Written(NamedTuple):
    """A rule as it was read.

    Attributes:
        form: a key that is missing or wrong is None in it.
        when: None where it, or a detector that it names, is wrong.
    """

    form: WrittenRule
    entry: Entry
    condition: Expression | None
    is_whole: bool


def read_rules(
    parts: Parts, detectors: Iterable[str], broken: Iterable[str], problems: Problems
) -> list[Written]:
    """Read all rules, also those with mistakes: what is right of them is of use to other checks.

    Args:
        broken: names that exist but could not be built; a rule that uses one is not `whole`.
    """
    drafts: list[Written] = []
    previous: dict[str, Node] = {}
    absent = set(broken)
    names = {*detectors, *absent}
    for entry in parts.rules:
        label = f"rule {entry.name}".rstrip()
        count = problems.count
        form: WrittenRule = read_section(
            WrittenRule, entry.node, problems, label, overridden=entry.overridden, lenient=True
        )
        if form is BAD:
            continue
        is_whole = problems.count == count
        assert isinstance(entry.node, MapNode)
        if entry.name in previous and entry.name:
            earlier = previous[entry.name]
            problems.add(
                entry.node.locate("id"),
                f"there is a rule {entry.name!r} already",
                f"first in {earlier.source.label}:{earlier.line}",
            )
        previous.setdefault(entry.name, entry.node)
        condition = None
        if form.when is not None:
            condition = _expression(form.when, entry, names, parts, problems)
        is_whole = is_whole and condition is not None and not absent.intersection(condition.names)
        drafts.append(Written(form, entry, condition, is_whole))
    return drafts


def bind_rules(
    drafts: Iterable[Written], detectors: Mapping[str, Detector], objective: str
) -> list[BuiltRule]:
    """Make the rules that are whole, with `when` compiled for codes in the order of `detectors`."""
    index = {name: i for i, name in enumerate(detectors)}
    built_rules = [
        BuiltRule(_rule(form, condition, index, entry), form, entry)
        for form, entry, condition, is_whole in drafts
        if is_whole and condition is not None
    ]
    if objective != "none":
        return built_rules
    return [built._replace(rule=demote_loss_rule(built.rule, detectors)) for built in built_rules]


def _rule(
    form: WrittenRule, expression: Expression, index: Mapping[str, int], entry: Entry
) -> Rule:
    node = entry.node
    return Rule(
        id=entry.name,
        when=expression.compile(index),
        text=expression.text,
        uses=expression.names,
        severity=form.sev,
        runbook=form.run,
        for_steps=form.for_,
        keep_steps=form.keep,
        unit=form.unit,
        cooldown_steps=form.cooldown,
        unknown=form.unknown,
        mode=form.mode,
        phases={name: sev for name in RUN_PHASES if (sev := getattr(form.phases, name, None))},
        location=f"{node.source.label}:{node.line}:{node.col}",
        see=form.see or (form.run if form.run not in (None, HOLD) else None) or form.sev.lower(),
        title=form.title,
    )


def _expression(
    text: str, entry: Entry, names: set[str], parts: Parts, problems: Problems
) -> Expression | None:
    assert isinstance(entry.node, MapNode)
    node = entry.node.get("when")
    assert isinstance(node, Scalar)
    try:
        expression = parse_expression(text)
        unknown = False
        for name, position in expression.places:
            if entry.scope.get(name, name) not in names:
                unknown = True
                if parts.may_exist(name, "detectors", entry.node, node):
                    continue
                hint = did_you_mean(name, _usable(entry.scope, names))
                problems.add(position_inside(node, position), f"unknown detector {name!r}", hint)
        return None if unknown else expression.with_names(entry.scope)
    except ExpressionError as error:
        problems.add(position_inside(node, error.at), f"rule {entry.name}: {error}")
        return None


def _usable(scope: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return the names of detectors that a file with this scope may write."""
    short = {long: name for name, long in scope.items()}
    return [short.get(name, name) for name in names]


def _weight(form: WrittenRule, phase: str) -> int:
    """Return how little a rule counts in a phase: 0 is SEV0, 3 is off."""
    severity = None if form.phases is None else getattr(form.phases, phase)
    return (*SEVERITIES, OFF).index(severity or form.sev)


def _weights(form: WrittenRule) -> list[int]:
    return [_weight(form, phase) for phase in RUN_PHASES]


def _refusal(muting: Written | None, muted: Written | None) -> str:
    """Say why a rule cannot mute another one, "" when it can."""
    if muting is None or muted is None or not (muting.form.sev and muted.form.sev):
        return ""
    for phase in RUN_PHASES:
        severity, second = _weight(muting.form, phase), _weight(muted.form, phase)
        if severity > second:
            is_fixed = not (muting.form.phases or muted.form.phases)
            return "which is more severe" if is_fixed else f"which is more severe in phase {phase}"
    return "which has a runbook" if muted.form.run and not muting.form.run else ""


def build_inhibitions(parts: Parts, rules: Iterable[Written], problems: Problems) -> list[Inhibit]:
    """Build all inhibitions.

    What an override made void is none of the file's mistakes, and is left out.
    """
    drafts = {rule.entry.name: rule for rule in rules}
    names = {entry.name for entry in parts.rules}  # also those with mistakes
    inhibits: list[Inhibit] = []
    edges: dict[str, dict[str, Node]] = {}
    for entry in parts.inhibit:
        count = problems.count
        form: Inhibit = read_section(Inhibit, entry.node, problems, "inhibit", lenient=True)
        if form is BAD:
            continue
        is_whole, muted = problems.count == count, form.mute or ()
        assert isinstance(entry.node, MapNode)
        if is_whole and (form.by_rule is None) == (not form.by_state):
            problems.add(entry.node, "inhibit needs one of 'by_rule' and 'by_state'")
        if is_whole and not muted:
            problems.add(entry.node, "inhibit mutes nothing")
        muting = entry.scope.get(form.by_rule, form.by_rule) if form.by_rule else None
        mute = tuple(entry.scope.get(name, name) for name in muted)
        for name, short in [(muting, form.by_rule), *zip(mute, muted, strict=True)]:
            if name is None or name in names or parts.may_exist(name, "rules", entry.node):
                continue
            location = first_text(entry.node, short or "")
            problems.add(location, f"inhibit: unknown rule {short!r}", did_you_mean(name, names))
        void = set()
        for name, short in zip(mute, muted, strict=True):
            location = first_text(entry.node.locate("mute"), short)
            target, source = drafts.get(name), drafts.get(muting or "")
            refusal = _refusal(source, target)
            if target is not None and target.form.sev and not min(_weights(target.form)):
                problems.add(location, f"{name} is SEV0, which cannot be muted")
            elif refusal and (
                (target and target.entry.overridden) or (source and source.entry.overridden)
            ):
                void.add(name)
            elif refusal:
                problems.add(location, f"{muting} cannot mute {name}, {refusal}")
            if name == muting:
                problems.add(location, f"{name} would mute itself")
            elif muting is not None:
                edges.setdefault(muting, {})[name] = location
        if muted_names := tuple(name for name in mute if name not in void):
            inhibits.append(Inhibit(muted_names, muting, form.by_state))
    graph = {name: list(targets) for name, targets in edges.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        location = edges[cycle[1]][cycle[0]]
        problems.add(location, f"rules mute each other: {' -> '.join(reversed(cycle))}")
    return inhibits
