"""The `when` language: detector names joined by `and`, `or`, `not` and parentheses.

    expr = term {"or" term}    term = factor {"and" factor}    factor = "not" factor | atom
    atom = NAME | "(" expr ")"                                 NAME may hold dots: pack.detector

There is no arithmetic: numbers live in detectors, where they are checked and named. Readings are
three-valued, so and = min, or = max, not = 2 - x. Not Python's `ast`: it would take `a < b < c`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

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

    def renamed(self, names: Mapping[str, str]) -> Expression:
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
