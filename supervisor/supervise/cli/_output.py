"""Output of commands (tables, plain lines for pipes, JSON), and access to a run's records."""

from __future__ import annotations

import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from .. import system
from ..core.model import formats
from ..core.model.decisions import json_document
from ..core.model.events import Event
from ..core.model.formats import printable
from ..core.model.policy import ChannelKey
from ..store import files, journal
from ..store.audit import Audit
from ..store.journal import Journal
from ..store.recorder import Recorder
from ..store.run_directory import RunDir

if TYPE_CHECKING:
    from ..runtime.logs import JobOutput


def echo(*lines: str, err: bool = False, **style: Any) -> None:
    """Print lines, with blanks for what does not print: text of others is neither code nor lines.

    A terminal gets them wrapped. Commands print with this, `echo_json`, `echo_source` and
    `print_table` alone. `style` is for `click.style`.
    """
    stream = sys.stderr if err else sys.stdout
    width = system.terminal_columns(stream)
    for line in lines:
        for text in system.wrap(printable(line).rstrip(), width):
            click.echo(click.style(text, **style) if style else text, err=err)


def echo_source(*lines: str) -> None:
    """Print what may be copied into a file, as it is."""
    for line in lines:
        click.echo(printable(line).rstrip())


def echo_json(value: Any, **form: Any) -> None:
    """Print data as one JSON document; `form` is for `json.dumps`."""
    click.echo(json_document(value, **form))


def print_table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> None:
    """Print rows in columns; on a terminal, what is too wide is wrapped between words."""
    cells = [[printable(cell) for cell in row] for row in rows]
    width = system.terminal_columns(sys.stdout)
    lines = [*([list(header)] if header else []), *cells]
    widths = [max(len(row[column]) for row in lines) for column in range(len(lines[0]))]
    own_lines = _narrow(lines, widths, width) if width else set()
    for row in lines:
        pieces = [
            textwrap.wrap(cell, size, **WHOLE_WORDS) if len(cell) > size else [cell]
            for cell, size in zip(row, widths, strict=True)
        ]
        shown = [column for column in range(len(row)) if column not in own_lines]
        for texts in itertools.zip_longest(*(pieces[column] for column in shown), fillvalue=""):
            cut = [text.ljust(widths[n]) for n, text in zip(shown, texts, strict=True)]
            click.echo("  ".join(cut).rstrip())
        for column in sorted(own_lines):
            for piece in system.wrap(f"  {row[column]}".rstrip(), width):
                click.echo(piece)


PROSE = 20  # columns; what is shorter is a number with its unit, a state, a name
WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def _narrow(lines: Sequence[Sequence[str]], widths: list[int], width: int) -> set[int]:
    """Make columns of words narrower until a row fits; return those that need a line of their own.

    A column is not narrower than its longest word, so no name is broken; nor is a short text.
    """
    least = [
        max((*(len(word) for row in lines for word in row[column].split()), min(size, PROSE)))
        for column, size in enumerate(widths)
    ]
    own_lines: set[int] = set()

    def excess() -> int:
        shown = [size for column, size in enumerate(widths) if column not in own_lines]
        return sum(shown) + 2 * (len(shown) - 1) - width

    while excess() > 0 and len(own_lines) < len(widths) - 1:
        room = [size - small for size, small in zip(widths, least, strict=True)]
        column = max(set(range(len(widths))) - own_lines, key=lambda column: room[column])
        if room[column] > 0:
            widths[column] -= min(room[column], excess())
        else:
            own_lines.add(max(set(range(1, len(widths))) - own_lines, key=widths.__getitem__))
    return own_lines


@contextmanager
def reserve_stdout(outputs: Iterable[Path | None]) -> Iterator[None]:
    """Print on stderr where one of these outputs is stdout, whose reader gets that alone."""
    if any(path is not None and files.descriptor_of(path) == 1 for path in outputs):
        with redirect_stdout(sys.stderr):
            yield
    else:
        yield


PrintLine = Callable[[str], None]
OpenRecords = Callable[[RunDir, PrintLine], Recorder]


def line_printer(*, quiet: bool) -> PrintLine:
    """Return a function that prints a line on stderr, or drops it; it never blocks."""

    def print_line(line: str) -> None:
        if not quiet:
            width = system.terminal_columns(sys.stderr)
            texts = [
                text for part in line.split("\n") for text in system.wrap(printable(part), width)
            ]
            text = "".join(f"{text}\n" for text in texts)
            sys.stderr.write(text)  # no flush, which may block: see `_streams`

    return print_line


def channels_of(
    notify: Mapping[str, Mapping[str, ChannelKey]], *, quiet: bool
) -> dict[str, Mapping[str, ChannelKey]]:
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
    audit = Audit.open(run.audit_path, run.id, at_ns=system.monotonic_ns(), wall=system.wall_time())
    opened = Journal.open(run.journal_path)
    return Recorder(opened, audit, lambda: (system.monotonic_ns(), system.wall_time()), print_line)


def format_number(value: object) -> str:
    """Return a number with four digits, "-" for none; JSON has non-finite ones as text."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_span(seconds: float) -> str:
    """Return a time with its two largest units: `2 d 3 h`, `5 min 10 s`, `0.4 s`."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    remaining, parts = round(seconds), list[str]()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, remaining = divmod(remaining, size)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
        if len(parts) == 2:
            break
    return " ".join(filter(None, parts))


def format_age(since: object, now: datetime) -> str:
    """Return how long ago an ISO-8601 time is: `3 h ago`; "-" where it is none."""
    seconds = seconds_since(since, now)
    return "-" if seconds is None else f"{formats.format_age(seconds)} ago"


def seconds_since(since: object, now: datetime) -> float | None:
    """Return the seconds since an ISO-8601 time, None where it is none."""
    try:
        return (now - datetime.fromisoformat(str(since))).total_seconds()
    except (ValueError, TypeError):
        return None


def format_rate(per_s: float, noun: str) -> str:
    """Return `12.5 steps/s`, and of a slow one `8.3 s/step`."""
    if per_s < 1.0:
        return f"{1.0 / per_s:.3g} s/{noun}"
    return f"{format_count(per_s)} {noun}s/s"


def format_count(value: float) -> str:
    """Return `950`, `12.5k`, `3.41M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


class Report(Protocol):
    """Takes how many parts are done, of how many, and a note behind them."""

    def __call__(self, done: int, total: int, note: str = "", /) -> None: ...


Part = TypeVar("Part")
EVENTS_SHOWN = 256  # between two reports of progress


def show_parts_done(parts: Sequence[Part], label: str) -> Iterator[Part]:
    """Yield the parts of a work, and show how many are done."""
    with progress_line(label) as report:
        for count, part in enumerate(parts):
            report(count, len(parts))
            yield part


def show_events_read(
    events: Iterable[tuple[int, Event]], directory: Path
) -> Iterator[tuple[int, Event]]:
    """Yield the events of the journal in a directory, and show how many were read."""
    if not _draws_progress():
        yield from events
        return
    with progress_line("events of the journal") as report:
        total = journal.count_events(directory)
        for number, event in events:
            if number % EVENTS_SHOWN == 0:
                report(number, total)
            yield number, event


def _draws_progress() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def progress_line(label: str, *, is_counted: bool = True) -> Iterator[Report]:
    """Yield a function that takes how many parts are done, of how many; it draws one line.

    Where parts are not counted, it shows the time that has passed.

    The line disappears at the end. It may be called from any thread.
    """
    if not _draws_progress():
        yield lambda done, total, note="": None
        return
    # Here, not above: it is not needed in a pipe.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    counts = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) if is_counted else ()
    columns = (TextColumn(label), *counts, TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    console = Console(file=sys.stderr, highlight=False)
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(label, total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)
