"""Problems of a file, each with its place: collected while reading, reported together, sorted.

A `Problem` is one sentence at one place. Reading continues after a problem, so that a person sees
every mistake at once; `Problems.stop` then raises them as one `PolicyErrors`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from ..core.model.formats import printable
from ..errors import PolicyError

SHOWN_WIDTH = 120  # characters of a source line that are shown around the caret
MAX_PROBLEMS = 200  # a file with more is probably no policy; reading it ends there
MAX_NAMES = 60  # names in a list of all known ones: more than there are runbooks


class Source:
    """The text of one file, and its name in messages."""

    def __init__(self, label: str, text: str) -> None:
        self.label = label
        self.text = text

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def line(self, number: int) -> str:
        """Return the line with this one-based number, "" when the file has no such line."""
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""


class Place(Protocol):
    """Anything with a place in a file; line and column are one-based."""

    @property
    def source(self) -> Source: ...
    @property
    def line(self) -> int: ...
    @property
    def col(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Location:
    """A place without a node: a syntax error, a name inside an expression."""

    source: Source
    line: int
    col: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake or warning."""

    source: Source = field(compare=False, repr=False)
    path: str
    line: int
    col: int
    message: str
    hint: str | None = None

    @property
    def location(self) -> str:
        return f"{self.path}:{self.line}:{self.col}"

    def __str__(self) -> str:
        return f"{self.location}: {self.message}" + (f" ({self.hint})" if self.hint else "")

    def render(self) -> str:
        """Return the sentence, the source line and a caret under the place."""
        text = self.source.line(self.line)
        start = max(0, self.col - SHOWN_WIDTH // 2) if len(text) > SHOWN_WIDTH else 0
        excerpt = printable(text[start : start + SHOWN_WIDTH])
        caret = " " * max(0, self.col - 1 - start) + "^"
        return f"{self}\n    {excerpt}\n    {caret}" if excerpt.strip() else str(self)


class PolicyErrors(PolicyError):  # noqa: N818, it holds several
    """Every mistake that was found; `str` is one line, `render` lists them all.

    Attributes:
        problems: sorted by file, line and column; never empty.
    """

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        problem, count = problems[0], len(problems) - 1
        tail = f" (and {count} more)" if count else ""
        super().__init__(problem.message + tail, where=problem.location, hint=problem.hint)
        self.problems = problems

    def render(self) -> str:
        """Return all problems, each with its source line and a caret."""
        return "\n".join(problem.render() for problem in self.problems)


class Problems:
    """Collects problems and warnings while files are read."""

    def __init__(self) -> None:
        self._found: list[Problem] = []
        self._warned: list[Problem] = []
        self._order: dict[str, int] = {}

    def add(self, location: Place, message: str, hint: str | None = None) -> None:
        """Note a mistake; reading continues.

        Raises:
            PolicyErrors: `MAX_PROBLEMS` were found; the rest is not read.
        """
        self._found.append(self._problem(location, message, hint))
        if len(self._found) >= MAX_PROBLEMS:
            text = f"{MAX_PROBLEMS} mistakes were found; the rest of the file was not read"
            self._found.append(self._problem(location, text, "is this a policy?"))
            self.raise_if_any()

    def warn(self, location: Place, message: str, hint: str | None = None) -> None:
        """Note a warning."""
        self._warned.append(self._problem(location, message, hint))

    def extend(self, problems: Iterable[Problem]) -> None:
        """Note mistakes that were found elsewhere."""
        for problem in problems:
            self._order.setdefault(problem.path, len(self._order))
            self._found.append(problem)

    @property
    def count(self) -> int:
        return len(self._found)

    @property
    def warnings(self) -> list[Problem]:
        return self._sorted(self._warned)

    def raise_if_any(self) -> None:
        """Raise what was found.

        Raises:
            PolicyErrors: if anything was.
        """
        if self._found:
            raise PolicyErrors(tuple(self._sorted(self._found)))

    def _problem(self, location: Place, message: str, hint: str | None) -> Problem:
        source = location.source
        self._order.setdefault(source.label, len(self._order))
        return Problem(source, source.label, location.line, location.col, message, hint)

    def _sorted(self, problems: list[Problem]) -> list[Problem]:
        unique = list(dict.fromkeys(problems))
        return sorted(unique, key=lambda p: (self._order[p.path], p.line, p.col, p.message))


def quote_names(names: Iterable[str], limit: int = 12) -> str:
    """Return "'a', 'b', 'c'" for a message, cut short when there are many."""
    listed = list(names)
    tail = ", ..." if len(listed) > limit else ""
    return ", ".join(repr(name) for name in listed[:limit]) + tail


def did_you_mean(wrong: str, candidates: Iterable[str], alike: float = 0.6) -> str | None:
    """Return "did you mean 'x'?" for a near miss, else the list of known names, else None.

    `alike`: the minimum similarity, 0 to 1, of a near miss.
    """
    names = sorted(candidates)  # the order of a set is arbitrary
    near = near_miss(wrong, names, alike)
    if near is not None:
        return f"did you mean {near!r}?"
    return f"known: {quote_names(names, MAX_NAMES)}" if names else None


def near_miss(wrong: str, candidates: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the name that was probably meant: a similar one, or one with a similar part."""
    names = sorted(candidates)
    near = difflib.get_close_matches(wrong, names, n=1, cutoff=alike)
    if not near:  # without the name of the pack
        tails = {name.rsplit(".", 1)[-1]: name for name in names}
        near = [tails[tail] for tail in difflib.get_close_matches(wrong, tails, n=1, cutoff=alike)]
    if not near:  # `rollback` for `rollback-and-rewarm`
        words = {word: name for name in reversed(names) for word in re.split("[-_]", name)}
        close = difflib.get_close_matches(wrong, words, n=1, cutoff=max(alike, 0.8))
        near = [words[word] for word in close]
    return near[0] if near else None
