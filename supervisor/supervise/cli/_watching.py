"""What `run` and `adopt` share: the pen that writes a run's records, and its last minutes."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable

from ..app import App, Foreground, closed
from ..errors import SuperviseError
from ..inputs import clock
from ..job import shared_memory
from ..job.process import Process
from ..job.signals import Forwarder
from ..outputs.outbox import Outbox
from ..report import receipt
from ..store.audit import Audit
from ..store.journal import Journal
from ..store.recorder import Recorder
from ..store.run_directory import RunDir
from ._streams import leave

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


def watch(app: App, process: Process, outbox: Outbox, forwarder: Forwarder, tell: Tell) -> int:
    """Watch the job to its end, and say what came of it; return the exit code to pass on."""
    run, directory = app.settings.run, app.settings.shm
    lines: list[str] = []

    def look_back() -> None:
        lines[:] = receipt.closing(run)

    def work() -> int:
        code = app.run(process, outbox)
        lines[:] = [f"supervise: exit code {code}"]
        steps: tuple[Callable[[], None], ...] = (
            lambda: app.close(outbox, code),
            lambda: closed(run, outbox.look()),
            lambda: shared_memory.remove(directory),
            look_back,
        )
        for step in steps:
            try:
                step()
            except SuperviseError as error:
                tell(f"supervise: {error}")
            except Exception as error:
                tell(f"supervise: {type(error).__name__}: {error}")
        for line in lines:
            tell(line)
        return code

    # The handlers stay: a signal that comes now must not cost the last record or the exit code.
    atexit.register(forwarder.ignore)
    code, done = Foreground(app, process, outbox, forwarder).attend(work)
    if not done:
        leave(code)  # a thread hangs: nobody may wait for it
    return code
