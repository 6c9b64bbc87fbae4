"""What the commands print: tables for people, one plain line per row for pipes, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from ..store import audit


def printable(text: str) -> str:
    """Return `text` without control characters: a job's output must not control the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def document(value: Any) -> str:
    """Return data as JSON that any terminal and any file can hold."""
    text = json.dumps(audit.encode(value), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair: escaped


def print_table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> None:
    """Print rows: wrapped columns on a terminal, else aligned, one line per row."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(cells, header)
        return
    lines = [*([header] if header else []), *cells]
    widths = [max(len(row[column]) for row in lines) for column in range(len(lines[0]) - 1)]
    for row in lines:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*padded, row[-1]]).rstrip())


def _print_rich(cells: Sequence[Sequence[str]], header: Sequence[str]) -> None:
    # Here, not above: most commands print no table.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=bool(header), header_style="bold")
    for name in header or cells[0]:
        table.add_column(name if header else "", overflow="fold")
    if not header:
        table.columns[0].style = "bold"
    for row in cells:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)
