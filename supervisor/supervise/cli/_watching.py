"""What `run` and `adopt` share: the pen that writes a run's records, and its last minutes."""

from __future__ import annotations

from collections.abc import Callable

import click

from ..app import App, closed
from ..inputs import clock
from ..job import shm
from ..job.process import Process
from ..job.signals import Forwarder
from ..outputs.outbox import Outbox
from ..report import receipt
from ..store.audit import Audit
from ..store.journal import Journal
from ..store.recorder import Recorder
from ..store.rundir import RunDir

Tell = Callable[[str], None]
Record = Callable[[RunDir, Tell], Recorder]


def teller(*, quiet: bool) -> Tell:
    """Return what shows a line to the person at the terminal, if there is one."""

    def tell(line: str) -> None:
        try:
            if not quiet:
                click.echo(line, err=True)
        except (OSError, ValueError):  # nobody reads stderr any more; the run goes on
            pass

    return tell


def record(run: RunDir, tell: Tell) -> Recorder:
    """Open the records of a run as their only writer. Raises StoreError."""
    audit = Audit.open(run.audit_path, run.id, at_ns=clock.monotonic_ns(), wall=clock.wall())
    journal = Journal.open(run.journal_path)
    return Recorder(journal, audit, lambda: (clock.monotonic_ns(), clock.wall()), tell)


def watch(app: App, process: Process, outbox: Outbox, forwarder: Forwarder, tell: Tell) -> int:
    """Watch the job to its end, and say what came of it; return the exit code to pass on."""
    run, directory = app.settings.run, app.settings.shm
    code = app.run(process, outbox)
    forwarder.restore()
    try:
        app.close(outbox, code)
        closed(run, outbox.look())
        shm.remove(directory)
        for line in receipt.closing(run):
            tell(line)
    except Exception as error:
        tell(f"supervise: {type(error).__name__}: {error}")
    return code
