"""`supervise run` or `supervise adopt`, under a supervisor that is killed in the middle of it.

    python mortal.py run DEATH POLICY RUN DRILL COMMAND...
    python mortal.py adopt DEATH RUN

DEATH says when: `record 17` right after the 17th record that it wrote to the audit log;
`commit rollback` after the first record of that kind whose reason or action holds that word;
`event Finished` when such an event is in the journal, and nothing that follows from it is.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from supervise import system
from supervise.catalog import load_policy, parse_drill
from supervise.cli import adopt, run
from supervise.store import Audit, Journal, Recorder


def now():
    return system.monotonic_ns(), system.wall()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(Recorder):
    """Writes as `Recorder` does, and is gone when it is time."""

    def __init__(self, what, word, *args):
        super().__init__(*args)
        self._what, self._word = what, word
        self._records = 0

    def event(self, event, **how):
        number = super().event(event, **how)
        if self._what == "event" and type(event).__name__ == self._word:
            die()
        return number

    def decision(self, decision, event, at_ns):
        seq = super().decision(decision, event, at_ns)
        action = str(decision.data.get("action", ""))
        self._wrote(decision.kind, decision.reason + action)
        return seq

    def note(self, kind, step, reason, data):
        super().note(kind, step, reason, data)
        self._wrote(kind, reason)

    def _wrote(self, kind, text):
        self._records += 1
        numbered = self._what == "record" and self._records == int(self._word)
        if numbered or (self._what == kind and self._word in text):
            die()


def main() -> int:
    command, death, *rest = sys.argv[1:]
    what, _, word = death.partition(" ")

    def record(run, tell):
        audit = Audit.open(run.audit_path, run.id, at_ns=system.monotonic_ns(), wall=system.wall())
        journal = Journal.open(run.journal_path)
        return Mortal(
            what, word, journal, audit, lambda: (system.monotonic_ns(), system.wall()), tell
        )

    def tell(line):
        print(line, file=sys.stderr, flush=True)

    if command == "adopt":
        return adopt.adopt(Path(rest[0]), tell, record)
    policy, directory, drill, *argv = rest
    return run.supervise(
        argv,
        load_policy(policy),
        (policy, None, {}),
        Path(directory),
        [parse_drill(drill)],
        tell,
        record,
    )


sys.exit(main())
