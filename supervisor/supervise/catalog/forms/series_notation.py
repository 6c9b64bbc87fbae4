"""The notation of series in scenarios, as a kind of value: what `2.4x300 5.0-0.1x20 _x5` may be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..document.diagnostics import Problems
from ..document.nodes import Node, Scalar, inside
from ..schema.field_types import BAD, FieldType

NUMBER = r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
# value, what each step adds (+ or -) or multiplies by (*), for how many steps
PIECE = re.compile(
    rf"(?:(_|nan|[+-]?inf)|({NUMBER})(?:([+*-])((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?))?)"
    r"(?:x([0-9]{1,6}))?"
)
_PLAIN_PIECE = PIECE.pattern.replace("(?:", "(").replace("(", "(?:")  # nothing captured
_SERIES = rf"\s*{_PLAIN_PIECE}(?:\s+{_PLAIN_PIECE})*\s*"


@dataclass(frozen=True, slots=True)
class SeriesKind(FieldType):
    """`2.4x300 5.0-0.1x20 _x5 nan`; the piece that is wrong is pointed at."""

    def read(self, node: Node, problems: Problems, what: str) -> Any:
        text = node.value if isinstance(node, Scalar) else None
        if not isinstance(node, Scalar) or not isinstance(text, str):
            hint = "put quotes around it" if isinstance(node, Scalar) and node.text else None
            return self.refuse(node, problems, what, hint)
        wrong = [piece for piece in re.finditer(r"\S+", text) if not PIECE.fullmatch(piece[0])]
        for piece in wrong:
            hint = "value, then perhaps +step or *factor, then perhaps xCOUNT"
            message = f"{what} should be {self.words()}; {piece[0][:40]!r} is no piece of one"
            problems.add(inside(node, piece.start()), message, hint)
        if not wrong and not text.strip():
            return self.refuse(node, problems, what)
        return BAD if wrong else text

    def holds(self, value: Any) -> bool:
        return isinstance(value, str)

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{_SERIES}$"}

    def words(self) -> str:
        return "a series such as '2.4x300 5.0-0.1x20'"


def count(text: str) -> int:
    """Return how many samples a series holds."""
    return sum(int(piece[5] or 1) for piece in PIECE.finditer(text))
