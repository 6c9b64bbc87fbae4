"""Rollback in process is bit-exact: a job that went back ends as one that never left.

Every job under `jobs/` is a real script that knows nothing of savepoints. It is run twice: straight
through, and with rollbacks on the way; final weights (sha256), the loss of every step and the
script's own counters must be equal.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROBE = HERE.parents[1] / "probes" / "supervise_probe"
START = """
import sys
path, name = sys.argv[1:3]
with open(path) as file:
    code = compile(file.read(), name, "exec")
exec(code, {"__name__": "__main__"})
"""


class Jobs:
    """Runs scripts in forks of one process that has torch imported."""

    def __init__(self, folder):
        self.folder = folder
        self.numbers = itertools.count()
        self.straight = {}
        driver = [str(HERE / "savepoint_driver.py"), str(PROBE / "savepoint_driver.py")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROBE.parent)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *driver],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, script, *argv, **plan):
        """Returns (what the script printed, the events at its boundaries)."""
        out = self.folder / str(next(self.numbers))
        path = HERE / "jobs" / script
        if "\n" in script:
            path = out.with_suffix(".py")
            path.write_text(script)
        job = {"script": str(path), "argv": argv, "plan": plan, "out": str(out)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "0\n"
        events = out.with_suffix(".events").read_text().splitlines()
        return json.loads(out.read_text()), [json.loads(line) for line in events]

    def untouched(self, script, *argv):
        """The result of a run without a single savepoint."""
        if (script, argv) not in self.straight:
            self.straight[script, argv] = self.run(script, *argv)[0]
        return self.straight[script, argv]

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    jobs = Jobs(tmp_path_factory.mktemp("jobs"))
    yield jobs
    jobs.close()


def back(at, before, rng="restore"):
    return {"at": at, "before": before, "rng": rng}


def refusals(events):
    return [event["refused"] for event in events if "refused" in event]


def restored(events):
    return [event["restored"] for event in events if "restored" in event]


@pytest.mark.parametrize(
    "script",
    [
        ("module_loop.py", "adamw"),
        ("module_loop.py", "fused"),
        ("module_loop.py", "sgd"),
        ("module_loop.py", "tensor_lr"),
        ("module_loop.py", "lbfgs"),
        ("main_function.py",),
        ("helper_step.py", "lambda", "in_place"),
        ("helper_step.py", "plateau", "in_place"),
        ("helper_step.py", "cycle", "seldom"),
        ("helper_step.py", "sequential", "seldom"),
        ("scaler.py",),
    ],
    ids="-".join,
)
def test_a_job_that_went_back_ends_as_one_that_never_left(jobs, script):
    """Two rollbacks, the second to the same savepoint, leave no trace in the result."""
    plan = {"every": 5, "keep": 3, "rollbacks": [back(18, 14), back(22, 14)]}
    result, events = jobs.run(*script, **plan)
    assert [r["step"] for r in restored(events)] == [10, 10]
    assert all(r["not_restored"] == [] for r in restored(events))
    assert result == jobs.untouched(*script)


def test_every_kind_of_variable_comes_back(jobs):
    """Counters, containers, objects, closures, globals of helper modules, plain tensors, flags."""
    plan = {"every": 4, "keep": 3, "rollbacks": [back(19, 14), back(17, 14)]}
    result, events = jobs.run("variables.py", **plan)
    assert [r["step"] for r in restored(events)] == [12, 12]
    assert all(r["not_restored"] == [] for r in restored(events))
    assert result == jobs.untouched("variables.py")
