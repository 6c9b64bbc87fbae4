"""Run scripts under the savepoint driver, in forks of one process that has torch loaded.

A script costs 0.1 s this way, not an import of torch.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROBE = HERE.parents[1] / "probes" / "supervise_probe"
START = """
import sys
path, name = sys.argv[1:3]
with open(path) as file:
    code = compile(file.read(), name, "exec")
exec(code, {"__name__": "__main__"})
"""


class SavepointJobs:
    """Runs the text of scripts. One plan per run, see the driver."""

    def __init__(self, folder):
        self.folder = folder
        self.numbers = itertools.count()
        driver = [str(HERE / "savepoint_driver.py"), str(PROBE / "savepoint_driver.py")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROBE.parent)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *driver],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, script, **plan):
        """Returns (what the script printed as JSON, the events at its boundaries)."""
        out = self.folder / f"job{next(self.numbers)}"
        path = out.with_suffix(".py")
        path.write_text(script)
        job = {"script": str(path), "argv": [], "plan": plan, "out": str(out)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "0\n"
        events = out.with_suffix(".events").read_text().splitlines()
        return json.loads(out.read_text()), [json.loads(line) for line in events]

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def rollback(at, before):
    """Return the plan of a rollback behind step `at`."""
    return {"at": at, "before": before}


def of_kind(events, kind):
    """Return the contents of the events of a kind: taken, restored, refused, busy."""
    return [event[kind] for event in events if kind in event]
