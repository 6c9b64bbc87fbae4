"""Open the records of a run, and print lines on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ..inputs import clock
from ..store.audit import Audit
from ..store.journal import Journal
from ..store.recorder import Recorder
from ..store.run_directory import RunDir

PrintLine = Callable[[str], None]
OpenRecords = Callable[[RunDir, PrintLine], Recorder]


def line_printer(*, quiet: bool) -> PrintLine:
    """Return a function that prints a line on stderr, or drops it; it never blocks."""

    def print_line(line: str) -> None:
        if not quiet:
            sys.stderr.write(f"{line}\n")  # no flush, which may block: see `_streams`

    return print_line


def open_records(run: RunDir, print_line: PrintLine) -> Recorder:
    """Open the records of a run as their only writer. Raises StoreError."""
    audit = Audit.open(run.audit_path, run.id, at_ns=clock.monotonic_ns(), wall=clock.wall())
    journal = Journal.open(run.journal_path)
    return Recorder(journal, audit, lambda: (clock.monotonic_ns(), clock.wall()), print_line)
