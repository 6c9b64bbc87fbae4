"""`supervise run` on a disk that hangs in the middle of it.

    python frozen.py POLICY RUN GATE COMMAND...

While GATE, a FIFO, exists, whatever is to be recorded waits for it in the kernel, with all signals
blocked: as uninterruptible as a thread that waits for a frozen file system. Removing GATE and
opening it once for writing is the thaw.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from supervise import system
from supervise.catalog import load_policy
from supervise.cli import run
from supervise.store import Audit, Journal, Recorder


class Freezing(Recorder):
    """Writes as `Recorder` does, unless the disk hangs."""

    gate: Path

    def event(self, event, **how):
        self._wait()
        return super().event(event, **how)

    def decision(self, *args):
        self._wait()
        return super().decision(*args)

    def note(self, *args):
        self._wait()
        super().note(*args)

    def _wait(self):
        if self.gate.exists():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                os.close(os.open(self.gate, os.O_RDONLY))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


def record(run, tell):
    audit = Audit.open(run.audit_path, run.id, at_ns=system.monotonic_ns(), wall=system.wall())
    now = lambda: (system.monotonic_ns(), system.wall())  # noqa: E731
    return Freezing(Journal.open(run.journal_path), audit, now, tell)


def tell(line):
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    policy, directory, gate, *argv = sys.argv[1:]
    Freezing.gate = Path(gate)
    again = (policy, None, {})
    sys.exit(run.supervise(argv, load_policy(policy), again, Path(directory), [], tell, record))
