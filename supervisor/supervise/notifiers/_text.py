"""Fitting text from a job into the limits of a channel."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_SHARES = (1.0, 0.5, 0.25, 0.12, 0.06)  # of the limits of each field


def clean(text: str) -> str:
    """Return `text` on one line, without control or direction characters (no escape sequences)."""
    return "".join(c if c.isprintable() else " " for c in text)


def clip(text: str, limit: int) -> str:
    """Return at most `limit` characters, the last one an ellipsis if any were cut."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def fit(payload: Callable[[float], Any], max_bytes: int) -> bytes:
    """Return the JSON of `payload(share)` for the largest share of its limits that fits.

    A lone surrogate becomes its JSON escape.
    """
    for share in _SHARES:
        text = json.dumps(payload(share), ensure_ascii=False)
        content = text.encode("utf-8", "backslashreplace")
        if len(content) <= max_bytes:
            break
    return content
