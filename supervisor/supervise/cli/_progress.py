"""Progress of long work, on stderr, where that is a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Report = Callable[[int, int], None]
Part = TypeVar("Part")


def counted(parts: Sequence[Part], what: str) -> Iterator[Part]:
    """Yield the parts of a work, and show how many are done."""
    with progress(what) as report:
        for done, part in enumerate(parts):
            report(done, len(parts))
            yield part


@contextmanager
def progress(what: str) -> Iterator[Report]:
    """Yield a function that takes how many parts are done, of how many; it draws one line.

    The line disappears at the end. It may be called from any thread.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield lambda done, total: None
        return
    # Here, not above: it is not needed in a pipe.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr, highlight=False)
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
