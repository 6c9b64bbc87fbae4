"""Cutting text from a job down to what a medium can take."""

from __future__ import annotations


def clean(text: str) -> str:
    """Return `text` on one line, without control or direction characters (no escape sequences)."""
    return "".join(c if c.isprintable() else " " for c in text)


def clip(text: str, limit: int) -> str:
    """Return at most `limit` characters, the last one an ellipsis if any were cut."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def utf8(text: str) -> bytes:
    """Return JSON text as bytes; a lone surrogate becomes its JSON escape."""
    return text.encode("utf-8", "backslashreplace")
