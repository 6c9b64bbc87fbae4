"""Kinds of values: one object per type hint that reads YAML, writes it back and describes itself.

The hints on a dataclass are the only schema there is. `dataclass_types.kind_of` turns a hint into a
`FieldType`; from it come the loader (`read`), the resolved policy (`write`), the JSON Schema
(`schema`) and the tables of the READMEs (`words`), so that these four cannot disagree.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final

from ..document.diagnostics import Problems, did_you_mean, quoted
from ..document.nodes import Node, Scalar, plain

BAD: Final[Any] = object()  # what `read` returns when it noted a problem

DURATION = r"[0-9]+(\.[0-9]+)?(ms|s|m|h)"
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
MOST = 2**53  # whole numbers beyond it are not exact in JSON
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Doc:
    """Marker for hints: one line that says what a key means."""

    text: str


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Marker for number hints: the least value that makes sense."""

    value: float


@dataclass(frozen=True, slots=True)
class Pattern:
    """Marker for text hints: what the text must look like, as a pattern and in words."""

    regex: str
    words: str


class FieldType(ABC):
    """How one sort of value is read, written and described."""

    @abstractmethod
    def read(self, node: Node, problems: Problems, what: str) -> Any:
        """Return the value of `node`, or BAD after noting why not. `what` names it for people."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema, draft-07."""

    @abstractmethod
    def words(self) -> str:
        """Return what people call it: "a number", "a time such as 30s"."""

    def fits(self, node: Node) -> bool:
        """Return whether the node has the right shape at all (a scalar, a list, a mapping)."""
        return isinstance(node, Scalar)

    def holds(self, value: Any) -> bool:
        """Return whether a value that was read could have been read by this kind."""
        return True

    def write(self, value: Any) -> Any:
        """Return the value as plain data that reads back as the same value."""
        return value

    def refuse(self, node: Node, problems: Problems, what: str, hint: str | None = None) -> Any:
        """Note that the node is not this kind of value."""
        problems.add(node, f"{what} should be {self.words()}, not {node.shape}", hint)
        return BAD


@dataclass(frozen=True, slots=True)
class Number(FieldType):
    """A finite number: whole or not, bare or with a unit of time."""

    whole: bool
    unit: str = ""
    least: float | None = None

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, str):
            return self._from_text(node, value, problems, what)
        if value is None or isinstance(value, bool):
            return self.refuse(node, problems, what)
        if self.unit == "seconds":
            problems.add(node, f"{what} is a time and needs a unit", f"write {value}s, {value}m")
            return BAD
        return self._checked(node, value, problems, what)

    def _from_text(self, node: Node, text: str, problems: Problems, what: str) -> Any:
        match = _DURATION.fullmatch(text)
        if self.unit == "seconds":
            if match is None:
                return self.refuse(node, problems, what, "30s, 5m, 2h or 500ms, without spaces")
            return self._checked(
                node, float(match.group(1)) * _SECONDS[match.group(2)], problems, what
            )
        hint = None
        if match is not None:
            hint = "a bare number counts steps" if self.unit == "steps" else "it has no unit"
        elif re.fullmatch(r"[-+]?[0-9][0-9_,]*", text):
            hint = "write the digits only" if len(text) < 19 else "that is too large"
        return self.refuse(node, problems, what, hint)

    def _checked(self, node: Node, value: float, problems: Problems, what: str) -> Any:
        if not math.isfinite(value):
            problems.add(node, f"{what} should be a finite number, not {value}")
            return BAD
        if self.whole and value != int(value):
            return self.refuse(node, problems, what)
        if self.whole and abs(value) > MOST:
            problems.add(node, f"{what} is too large: {value:g}")
            return BAD
        if self.least is not None and value < self.least:
            problems.add(node, f"{what} should be at least {self.least:g}, not {value:g}")
            return BAD
        return int(value) if self.whole else float(value)

    def holds(self, value: Any) -> bool:
        return type(value) is (int if self.whole else float)

    def write(self, value: Any) -> Any:
        if self.unit != "seconds":
            return value
        if value == int(value):
            return f"{value:.0f}s"
        text = repr(value)
        return f"{value:.12f}s" if "e" in text else f"{text}s"

    def schema(self) -> dict[str, Any]:
        if self.unit == "seconds":
            return {"type": "string", "pattern": f"^{DURATION}$"}
        limits = {} if self.least is None else {"minimum": self.least}
        if self.whole:
            return {"type": "integer", **limits, "maximum": MOST}
        return {"type": "number", **limits}

    def words(self) -> str:
        if self.unit == "seconds":
            return "a time such as 30s"
        if self.unit == "steps":
            return "a number of steps"
        return "a whole number" if self.whole else "a number"


@dataclass(frozen=True, slots=True)
class Flag(FieldType):
    """true or false."""

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        if isinstance(node, Scalar) and isinstance(node.value, bool):
            return node.value
        return self.refuse(node, problems, what, "only true and false are booleans")

    def holds(self, value: Any) -> bool:
        return isinstance(value, bool)

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def words(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Text(FieldType):
    """Text, perhaps of a certain form."""

    pattern: Pattern | None = None

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        value = node.value if isinstance(node, Scalar) else None
        if not isinstance(value, str):
            hint = "put quotes around it" if isinstance(node, Scalar) and node.text else None
            return self.refuse(node, problems, what, hint)
        if self.pattern is not None and not re.fullmatch(self.pattern.regex, value):
            return self.refuse(node, problems, what)
        return value

    def holds(self, value: Any) -> bool:
        return isinstance(value, str)

    def schema(self) -> dict[str, Any]:
        form = {} if self.pattern is None else {"pattern": f"^({self.pattern.regex})$"}
        return {"type": "string", **form}

    def words(self) -> str:
        return self.pattern.words if self.pattern else "text"


@dataclass(frozen=True, slots=True)
class Choice(FieldType):
    """One of a few words."""

    options: tuple[str, ...]

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        value = node.value if isinstance(node, Scalar) else None
        if value in self.options and isinstance(value, str):
            return value
        hint = did_you_mean(value, self.options) if isinstance(value, str) else None
        return self.refuse(node, problems, what, hint if hint and "did you" in hint else None)

    def holds(self, value: Any) -> bool:
        return value in self.options

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.options)}

    def words(self) -> str:
        return f"one of {quoted(self.options)}" if len(self.options) > 1 else repr(self.options[0])


@dataclass(frozen=True, slots=True)
class Anything(FieldType):
    """Data that nobody here interprets."""

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        return plain(node)

    def fits(self, node: Node) -> bool:
        return True

    def schema(self) -> dict[str, Any]:
        return {}

    def words(self) -> str:
        return "anything"
