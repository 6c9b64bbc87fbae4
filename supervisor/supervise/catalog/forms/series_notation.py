"""The notation of series in scenarios: what `2.4x300 5.0-0.1x20 _x5` may be."""

from __future__ import annotations

import re
from typing import Annotated

from ..schema.field_types import Pattern

NUMBER = r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
# value, what each step adds (+ or -) or multiplies by (*), for how many steps
PIECE = re.compile(
    rf"(?:(_|nan|[+-]?inf)|({NUMBER})(?:([+*-])((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?))?)"
    r"(?:x([0-9]{1,6}))?"
)
_PLAIN_PIECE = PIECE.pattern.replace("(?:", "(").replace("(", "(?:")  # nothing captured
_SERIES = rf"\s*{_PLAIN_PIECE}(?:\s+{_PLAIN_PIECE})*\s*"


Series = Annotated[str, Pattern(_SERIES, "a series such as '2.4x300 5.0-0.1x20'", _PLAIN_PIECE)]


def count(text: str) -> int:
    """Return how many samples a series holds."""
    return sum(int(piece[5] or 1) for piece in PIECE.finditer(text))
