"""`supervise watch`: a live view of a run in a terminal of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..errors import UsageError
from ..store.run_directory import RunDir
from ._output import echo
from ._runs import run_argument


@click.command(name="watch")
@run_argument
@click.option("--by", metavar="NAME", help="Operator's name for commands. Default: your login.")
def watch_command(run: Path, by: str | None) -> None:
    """Watch a run in a full-screen view, from another terminal.

    Verdict, loss, speed and time left, what can be done to the run, its open incident, the ranks by
    lag, and the newest events. It reads what `supervise status` reads, twice a second at most, and
    costs the job nothing. Keys: p pause, r resume, a acknowledge, s savepoint, each after a
    question; q quits, ? shows them. NO_COLOR is respected.

    \b
    Examples:
      supervise watch
      supervise watch runs/20260105-101112-7f3a9c

    Needs the package textual: pip install 'supervise-train[tui]'.

    Exit codes: 0; 64 no such run, no terminal, or no textual.
    """
    directory = RunDir.open(run)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        hint = f"supervise status {run}; supervise events -f {run}"
        raise UsageError("the live view needs a terminal", hint=hint)
    try:
        from ._live_view import LiveView
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise UsageError(
            "the live view needs the package 'textual'",
            hint="pip install 'supervise-train[tui]', or: supervise status; supervise events -f",
        ) from None
    view = LiveView(directory, by)
    view.run()
    echo(view.receipt)
