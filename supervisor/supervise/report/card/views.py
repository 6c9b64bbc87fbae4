"""The files that an incident has: the document, and its views."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from . import html, markdown

DOCUMENT, SUMMARY, PAGE = "incident.json", "summary.md", "incident.html"


def files_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Return file name -> content."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False, indent=1) + "\n"
    return {
        DOCUMENT: text.encode("utf-8", "backslashreplace").decode(),
        SUMMARY: markdown.summary(document).encode("utf-8", "backslashreplace").decode(),
        PAGE: html.page(document).encode("utf-8", "backslashreplace").decode(),
    }
