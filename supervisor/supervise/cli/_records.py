"""What opens the records of a run, and what shows lines to the person at the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ..inputs import clock
from ..store.audit import Audit
from ..store.journal import Journal
from ..store.recorder import Recorder
from ..store.run_directory import RunDir

Tell = Callable[[str], None]
Record = Callable[[RunDir, Tell], Recorder]


def teller(*, quiet: bool) -> Tell:
    """Return what shows a line to the person at the terminal, if there is one; it never waits."""

    def tell(line: str) -> None:
        if not quiet:
            sys.stderr.write(f"{line}\n")  # no flush, which may wait: see `_streams`

    return tell


def record(run: RunDir, tell: Tell) -> Recorder:
    """Open the records of a run as their only writer. Raises StoreError."""
    audit = Audit.open(run.audit_path, run.id, at_ns=clock.monotonic_ns(), wall=clock.wall())
    journal = Journal.open(run.journal_path)
    return Recorder(journal, audit, lambda: (clock.monotonic_ns(), clock.wall()), tell)
