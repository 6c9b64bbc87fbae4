"""JSON that fits: what the probe says must go into letters of fixed size, and always goes.

Knows nothing of segments; the limit comes from the caller.
"""

from __future__ import annotations

import json
from typing import Any, Collection, Optional

from ..wire import WireError


def to_json(document: Any, limit: int, *, whole: Optional[Collection[str]] = ()) -> bytes:
    """Encode `document` in at most `limit` bytes, with long strings and lists clipped if need be.

    Args:
        document: JSON-ready; what is not is written as its `str`.
        limit: bytes of UTF-8.
        whole: keys of a dict whose values must not be clipped; None: clip nothing.

    Raises:
        WireError: it is not JSON, or does not fit even when clipped.
    """
    sizes = ((0, 0),) if whole is None else ((0, 0), (240, 16), (80, 6), (24, 2))
    try:
        for chars, items in sizes:
            fitted = document
            if chars and isinstance(document, dict):
                fitted = {
                    key: value if key in (whole or ()) else _clip(value, chars, items)
                    for key, value in document.items()
                }
            text = json.dumps(fitted, ensure_ascii=False, separators=(",", ":"), default=str)
            raw = text.encode("utf-8", "replace")  # a lone surrogate must not stop a letter
            if len(raw) <= limit:
                return raw
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"cannot be written as JSON: {error}") from error
    raise WireError(f"takes {len(raw)} bytes, but there is room for {limit}")


def _clip(value: Any, chars: int, items: int) -> Any:
    if isinstance(value, str) and len(value) > chars:
        return value[: chars - 1] + "…"
    if isinstance(value, dict):
        return {key: _clip(inner, chars, items) for key, inner in value.items()}
    if isinstance(value, (list, tuple)) and len(value) > items:
        return [_clip(v, chars, items) for v in value[:items]] + [f"… {len(value) - items} more"]
    return value
