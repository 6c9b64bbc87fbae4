"""HTML pages by jinja2: no script, nothing from elsewhere; a phone, a desktop, paper.

Texts of a job may hold anything: every value is escaped, and a character that does not print, such
as one that reverses the direction of the text, becomes a space.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, **values: Any) -> str:
    """Return the page of a template, `NAME.html.j2`, with these values."""
    return _environment().get_template(f"{template}.html.j2").render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # 30 ms, for pages only

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )


def printable(value: Any) -> Any:
    """Return text without control characters, anything else as it is."""
    if type(value) is not str:  # markup of a template is of a subclass
        return value
    return "".join(c if c.isprintable() or c == "\n" else " " for c in value)
