"""`supervise run` or `supervise adopt`, with a disk that hangs or a death in the middle of it.

    python driver.py run TROUBLE POLICY RUN DRILL COMMAND...
    python driver.py adopt TROUBLE RUN

TROUBLE is `gate FIFO`: while that exists, whatever is to be recorded waits for it in the kernel,
with all signals blocked, as a thread that waits for a frozen file system; removing it and opening
it once for writing is the thaw. Or it says when the supervisor is killed: `record 17` right after
the 17th record that it wrote to the audit log; `commit rollback` after the first record of that
kind whose reason or action holds that word; `event Finished` when such an event is in the journal,
and nothing that follows from it is.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from supervise import system
from supervise.catalog import load_policy, parse_drill
from supervise.cli.adopt import adopt_run
from supervise.cli.run import start_and_watch
from supervise.store import Audit, Journal, Recorder


class Troubled(Recorder):
    """Writes as `Recorder` does, but for the trouble."""

    what = word = ""
    records = 0

    def record_event(self, event, **how):
        self._wait()
        number = super().record_event(event, **how)
        if self.what == "event" and type(event).__name__ == self.word:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    def record_decision(self, decision, event, at_ns):
        self._wait()
        seq = super().record_decision(decision, event, at_ns)
        self._wrote(decision.kind, decision.reason + str(decision.data.get("action", "")))
        return seq

    def note(self, kind, step, reason, data):
        self._wait()
        super().note(kind, step, reason, data)
        self._wrote(kind, reason)

    def _wrote(self, kind, text):
        self.records += 1
        numbered = self.what == "record" and self.records == int(self.word)
        if numbered or (self.what == kind and self.word in text):
            os.kill(os.getpid(), signal.SIGKILL)

    def _wait(self):
        if self.what == "gate" and Path(self.word).exists():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                os.close(os.open(self.word, os.O_RDONLY))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


def record(run, tell):
    now = lambda: (system.monotonic_ns(), system.wall_time())  # noqa: E731
    audit = Audit.open(run.audit_path, run.id, at_ns=now()[0], wall=now()[1])
    return Troubled(Journal.open(run.journal_path), audit, now, tell)


def tell(line):
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    command, trouble, *rest = sys.argv[1:]
    Troubled.what, _, Troubled.word = trouble.partition(" ")
    if command == "adopt":
        sys.exit(adopt_run(Path(rest[0]), tell, record))
    policy, directory, drill, *argv = rest
    drills, again = [parse_drill(drill)] if drill else [], (policy, None, {})
    sys.exit(
        start_and_watch(argv, load_policy(policy), again, Path(directory), drills, tell, record)
    )
