"""Output of commands (tables, plain lines for pipes, JSON), and access to a run's records."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from .. import system
from ..core.model.decisions import plain
from ..store import files
from ..store.audit import Audit
from ..store.journal import Journal
from ..store.recorder import Recorder
from ..store.run_directory import RunDir

if TYPE_CHECKING:
    from ..runtime.logs import JobOutput


def printable(text: str) -> str:
    """Return `text` without control characters: a job's output must not control the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def document(value: Any) -> str:
    """Return data as JSON that any terminal and any file can hold."""
    return escaped(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def escaped(text: str) -> str:
    """Return JSON with escapes for what no terminal shows, and for half of a surrogate pair."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


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


PrintLine = Callable[[str], None]
OpenRecords = Callable[[RunDir, PrintLine], Recorder]


def line_printer(*, quiet: bool) -> PrintLine:
    """Return a function that prints a line on stderr, or drops it; it never blocks."""

    def print_line(line: str) -> None:
        if not quiet:
            shown = "\n".join(map(printable, line.split("\n")))
            sys.stderr.write(f"{shown}\n")  # no flush, which may block: see `_streams`

    return print_line


def channels_of(
    notify: Mapping[str, Mapping[str, Any]], *, quiet: bool
) -> dict[str, Mapping[str, Any]]:
    """Return the channels of a run: those of its policy, and the console.

    Args:
        quiet: the console gets what wakes a person up, and nothing else.
    """
    console = dict(notify.get("console") or {}) | ({"min_sev": "SEV0"} if quiet else {})
    return {**notify, "console": console}


def keep_output(run: RunDir, print_line: PrintLine, *, adopted: bool = False) -> JobOutput | None:
    """Return what keeps the output of a job about to start, None where that cannot be.

    Args:
        adopted: one runs already, with a relay of its own; it is about later starts.
    """
    from ..runtime.logs import JobOutput  # most runs keep none

    try:
        files.make_directory(run.output_path.parent)
        output = JobOutput(run.output_path)
        output.start()
    except OSError as error:
        print_line(f"supervise: --logs: the output of the job is not kept: {error.strerror}")
        return None
    if not output.outputs and not adopted:
        print_line("supervise: --logs: stdout and stderr go into files, and are kept there")
    return output


def open_records(run: RunDir, print_line: PrintLine) -> Recorder:
    """Open the records of a run as their only writer. Raises StoreError."""
    audit = Audit.open(run.audit_path, run.id, at_ns=system.monotonic_ns(), wall=system.wall())
    journal = Journal.open(run.journal_path)
    return Recorder(journal, audit, lambda: (system.monotonic_ns(), system.wall()), print_line)
