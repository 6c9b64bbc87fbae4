"""Run training scripts under the real probe and read what the supervisor would read."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from supervise.core.model import Frame, Notice
from supervise.runtime import Segment

from .waiting import wait_until

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "probes" / "supervise_probe"

# All are errors, but for what Lightning says on a machine that has Slurm.
WARNINGS = ("-W", "error", "-W", "ignore:The `srun` command is available")

PREAMBLE = """
import json, math, os, time
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(0)


def emit(**values):
    print(json.dumps(values) + chr(10), end="", flush=True)  # one write: threads emit, too


def norm(tensors):
    return math.sqrt(sum(float((t.detach().double() ** 2).sum()) for t in tensors))


def barrier(name):
    open(name + ".reached", "w").close()
    while not os.path.exists(name):
        time.sleep(0.002)


def finish(*models):
    import hashlib

    digest = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            digest.update(value.numpy().tobytes())
    emit(sha=digest.hexdigest())
"""


class Job:
    """One training process, running or over."""

    def __init__(self, folder, pid=None):
        self.folder = folder
        self.pid = pid
        self.code = None
        self.frames = []
        self.notices = []
        self.acks = {}
        self._names = ()
        self._segment = None
        self._read = 0  # segments
        self._keys = 0

    def segment(self):
        """Wait for the segment and return it."""
        if self._segment is None:
            new = wait_until(lambda: self._segments()[self._read :], "a segment", every_s=0.002)
            self._segment = Segment.open(new[0], time.monotonic_ns)
            self._read += 1
        return self._segment

    def poll(self):
        """Read what the probe has written since the last call."""
        segment = self.segment()
        # Before the look: then nothing comes behind it. Who was given a segment reads that one.
        newer = self._segments()[self._read :] if self._read else []
        self._take(segment)
        if newer:
            segment.close()
            self._segment = None
            self.poll()

    def _segments(self):
        """Paths, oldest first: each training of a process has one. Its children's are not read."""
        found = sorted((self.folder / "shm").glob("rank-*.seg"))
        whose = found[0].name.split(".")[:2] if found else []
        mine = [path for path in found if path.name.split(".")[:2] == whose]
        return sorted(mine, key=lambda path: (len(path.name), path.name))

    def _take(self, segment):
        for event in segment.poll():
            if isinstance(event, Frame):
                values = zip(segment._names, event.values, strict=True)
                row = {name: value for name, value in values if value is not None}
                self.frames.append({"step": event.step, "attempt": event.attempt, **row})
            elif isinstance(event, Notice):
                self.notices.append(event)
        self.acks.update({ack.key: ack for ack in segment.acks()})

    def send(self, verb, **args):
        """Send a command; returns its key."""
        self._keys += 1
        self.segment().send(f"k{self._keys}", verb, args)
        return f"k{self._keys}"

    def answer(self, key):
        """Wait for the ack of a command that was sent, and return it."""

        def acknowledged():
            self.poll()
            return key in self.acks

        wait_until(acknowledged, f"the ack of {key}", every_s=0.002)
        return self.acks[key]

    def reached(self, name="go"):
        """Wait until the script stands at a barrier; all frames up to there are in."""
        reached = self.folder / f"{name}.reached"
        wait_until(lambda: reached.exists() or self._is_over(), f"barrier {name}", every_s=0.002)
        assert reached.exists(), f"it ended before barrier {name}: {self.err}"
        self.poll()

    def _is_over(self):
        """Whether the server has only to collect it."""
        return ") Z " in Path(f"/proc/{self.pid}/stat").read_text()

    def go(self, name="go"):
        """Let the script pass a barrier."""
        (self.folder / name).touch()

    def order(self, verb, barrier="go", **args):
        """Send a command while the script stands at a barrier; return the answer."""
        self.reached(barrier)
        key = self.send(verb, **args)
        self.go(barrier)
        return self.answer(key)

    @property
    def output(self):
        """The rows that the script emitted."""
        return [json.loads(line) for line in (self.folder / "out").read_text().splitlines()]

    @property
    def err(self):
        return (self.folder / "err").read_text()

    @property
    def marks(self):
        """The small files in the run directory, by name without the pid."""
        found = sorted((self.folder / "probe").iterdir())
        return {path.name.split(".", 1)[0]: path.read_text() for path in found}

    def column(self, name):
        """One metric over all frames; None where it is absent."""
        return [frame.get(name) for frame in self.frames]

    def kinds(self):
        return [notice.kind for notice in self.notices]


class JobServer:
    """Forks jobs from one process that has torch loaded: see job_server.py.

    Args:
        make_folder: makes the folder of a job.
        injected: with the probe on PYTHONPATH.
        environ: more variables of the server and its jobs.
        libraries: modules that the server imports next to torch.
        preamble: stands before every script, behind `PREAMBLE`.
    """

    def __init__(self, make_folder, *, injected=True, environ=(), libraries=(), preamble=""):
        self.make_folder = make_folder
        self.preamble = PREAMBLE + preamble
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **dict(environ)}
        environ.pop("PYTHONPATH", None)
        if injected:
            environ.update(job_environment(self.make_folder()))
        self.process = subprocess.Popen(
            [sys.executable, *WARNINGS, str(HERE / "job_server.py"), *libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self.pid = 0  # of a job that was not waited for

    def start(self, script, environ=(), **config):
        """Start a script (its text, behind the preamble) with these fields in its probe.json."""
        if self.pid:  # a test failed before its end
            os.kill(self.pid, signal.SIGKILL)
            self._exit_code()
        folder = self.make_folder()
        path = folder / "train.py"
        path.write_text(self.preamble + textwrap.dedent(script))
        order = {"script": str(path), "folder": str(folder), "environ": dict(environ)}
        order["config"] = job_environment(folder, **config)["SUPERVISE_PROBE"]
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self.pid = int(self.process.stdout.readline())
        return Job(folder, pid=self.pid)

    def _exit_code(self):
        self.process.stdin.write("wait\n")
        self.process.stdin.flush()
        self.pid = 0
        return int(self.process.stdout.readline())

    def wait(self, job, code=0):
        """Wait for the end of a job, and read all that it left."""
        job.code = self._exit_code()
        assert job.code == code, job.err
        if list((job.folder / "shm").glob("rank-*.seg")):
            job.poll()
        return job

    def run(self, script, code=0, **config):
        """Run a script to its end."""
        return self.wait(self.start(script, **config), code)

    def ordered(self, script, *commands, barrier="go", code=0, **config):
        """Run a script to its end; give commands, each (verb, arguments), at its barrier.

        Returns (job, the answer of each).
        """
        job = self.start(script, **config)
        job.reached(barrier)
        keys = [job.send(verb, **args) for verb, args in commands]
        job.go(barrier)
        answers = [job.answer(key) for key in keys]
        return self.wait(job, code), *answers

    def straight(self, script, *barriers, **config):
        """Run a script to its end without a stop at its barriers."""
        job = self.start(script, **config)
        for barrier in barriers or ("go",):
            job.go(barrier)
        return self.wait(job)

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def rank_jobs(folder):
    """Return one job per segment in a job's folder, in order of rank, all frames read."""
    found = []
    for path in (folder / "shm").glob("rank-*.seg"):
        each = Job(folder)
        each._segment = Segment.open(path, time.monotonic_ns)
        each.poll()
        found.append(each)
    return sorted(found, key=lambda job: (job._segment.rank, job._segment.created_ns))


def check_frames(frames, rows, rel=1e-6):
    """Assert that each frame holds every value that the script computed of its step."""
    assert len(frames) == len(rows)
    for frame, row in zip(frames, rows, strict=True):
        for name, value in row.items():
            assert name in frame, (name, frame["step"])
            expected = pytest.approx(value, rel=rel, abs=1e-9, nan_ok=True)
            assert frame[name] == expected, (name, frame["step"])


def job_environment(folder, **config):
    """Write the files that a supervisor writes for a job; return the environment of the job."""
    for name in ("shm", "probe"):
        (folder / name).mkdir(exist_ok=True)
    content = {
        "run": "r1",
        "package": str(PACKAGE),
        "shm": str(folder / "shm"),
        "marks": str(folder / "probe"),
        "slots": 256,
        **config,
    }
    (folder / "probe.json").write_text(json.dumps(content))
    return {
        "PYTHONPATH": str(PACKAGE / "inject"),
        "SUPERVISE_PROBE": str(folder / "probe.json"),
        "OMP_NUM_THREADS": "1",
    }


def launch(folder, script=None, *argv, config=(), environ=(), code=0):
    """Run Python itself with the probe on its path: `script` (its text), or `argv`."""
    if script is not None:
        (folder / "train.py").write_text(script)
        argv = (*argv, "train.py")
    job = Job(folder)
    wanted = {**os.environ, **job_environment(folder, **dict(config)), **dict(environ)}
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        ended = subprocess.run(
            [sys.executable, *argv], cwd=folder, env=wanted, stdout=out, stderr=err
        )
    job.code = ended.returncode
    assert job.code == code, job.err
    if list((folder / "shm").glob("rank-*.seg")):
        job.poll()
    return job
