"""Real processes, a real terminal, real ranks, and a complete fake of the segments."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from supervise.core.model import Beat, Payload
from supervise.runtime import Control, PauseLease, Process, ReadCursor, Segments
from supervise_probe.ipc import fences
from tests.support.waiting import wait_until

PATIENCE_S = 60.0
RANK = str(Path(__file__).parents[1] / "support" / "fenced_rank.py")


@pytest.fixture
def wrapper():
    """The command line of a supervisor reduced to its job package."""
    return [sys.executable, str(Path(__file__).with_name("wrapper.py"))]


@pytest.fixture
def wrapped(wrapper):
    """A function that starts a command under the wrapper, with pipes on stdio."""
    started = []

    def start(*argv, **options):
        pipe = subprocess.PIPE
        options = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True} | options
        started.append(subprocess.Popen([*wrapper, *argv], **options))
        return started[-1]

    yield start
    for popen in started:
        runs = popen.poll() is None
        for process in psutil.Process(popen.pid).children(recursive=True) if runs else []:
            process.kill()
        popen.kill()
        popen.communicate()


@pytest.fixture
def job_pid():
    return lambda popen: int(re.match(r"pid (\d+)", popen.stderr.readline())[1])


@pytest.fixture
def start():
    started = []

    def begin(*argv):
        started.append(Process.start(argv, os.environ))
        return started[-1]

    yield begin
    for process in started:
        process.tree.end(signal.SIGKILL, 5.0)
        process.wait(60.0)


class Shell:
    """An interactive bash in a terminal of its own."""

    def __init__(self):
        self._fd, slave = pty.openpty()
        own_the_terminal = (
            "import fcntl, os, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
            "os.execvp('bash', ['bash', '--norc', '--noprofile', '-i'])"
        )
        environ = {**os.environ, "PS1": "ready> ", "TERM": "dumb", "HISTFILE": "/dev/null"}
        stdio = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        self.bash = subprocess.Popen([sys.executable, "-c", own_the_terminal], env=environ, **stdio)
        os.close(slave)
        self._seen = ""
        self.expect("ready> ")

    def type(self, text, *patterns):
        os.write(self._fd, text.encode())
        for pattern in patterns:
            self.expect(pattern)

    def expect(self, pattern):
        """Read until `pattern` appears; what comes after it is kept for the next call."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self._seen)):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._fd], [], [], left)[0]:
                raise AssertionError(f"no {pattern!r} on the terminal, but {self._seen!r}")
            self._seen += os.read(self._fd, 4096).decode(errors="replace")
        self._seen = self._seen[found.end() :]
        return found

    def resize(self, rows, columns):
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def foreground(self):
        return os.tcgetpgrp(self._fd)

    def close(self):
        for process in psutil.Process(self.bash.pid).children(recursive=True):
            process.kill()
        self.bash.kill()
        self.bash.wait()
        os.close(self._fd)


@pytest.fixture
def shell():
    session = Shell()
    yield session
    session.close()


class FakeRank:
    """A segment and the probe behind it, in memory.

    `answer` maps a verb to what the probe answers: a result, an error sentence, or None for
    silence. A known key gets the same ack again and is not carried out twice.
    """

    def __init__(self, rank=0, world_size=1, *, pid=4242, answer=(), silent_s=0.0):
        self.rank, self.world_size, self.pid, self.step = rank, world_size, pid, 7
        self.answer, self.silent_s, self.done = dict(answer), silent_s, {}
        self.letters, self.leases, self._outgoing = [], [], []

    def send(self, key, verb, args):
        self.letters.append((key, verb, dict(args)))
        if key not in self.done:
            said = self.answer.get(verb, lambda _: {})(args)
            if said is None:
                return
            ok = not isinstance(said, str)
            result, error = (said, None) if ok else ({}, said)
            self.done[key] = SimpleNamespace(
                key=key, verb=verb, step=7, ok=ok, result=Payload(result), error=error
            )
        self._outgoing.append(self.done[key])

    def acks(self):
        taken, self._outgoing = self._outgoing, []
        return taken

    def lease(self, until_ns):
        self.leases.append(until_ns)

    def beat(self):
        return Beat(self.rank, time.monotonic_ns() - int(self.silent_s * 1e9), "step")

    def status(self):
        return Payload({"tier": "T1"})

    def boundary(self):
        return self.step

    def step_ns(self):
        return 10**8

    def collective(self):
        return None


@pytest.fixture
def looping():
    ended = threading.Event()
    threads = []

    def run(control, poll, **observed):
        while not ended.is_set():
            control.process.poll()
            poll()
            control.run_pending_work(time.monotonic_ns(), **observed)
            time.sleep(0.002)

    def begin(control, poll=lambda: None, **observed):
        threads.append(threading.Thread(target=run, args=(control, poll), kwargs=observed))
        threads[-1].start()
        return control

    yield begin
    ended.set()
    for thread in threads:
        thread.join()


def edges():
    return [lambda *args: {"args": args[1:]}] * 2


@pytest.fixture
def control_of(start):
    """A function that makes the control over a command and fake ranks, and keeps these."""

    def make(*ranks, argv=("sleep", "60"), relaunch=None, held=None, **options):
        make.ranks = {rank.rank: rank for rank in ranks}
        segments = SimpleNamespace(
            ranks=make.ranks, directory=Path("nowhere"), defer_job_signals=lambda until_ns: None
        )
        collect, restart = edges()
        return Control(start(*argv), segments, collect, relaunch or restart, held, **options)

    return make


@pytest.fixture
def controlled(control_of, looping):
    """A function that makes a control with its main loop, which observes what `loop` says."""
    return lambda *ranks, loop=(), **options: looping(control_of(*ranks, **options), **dict(loop))


class Gang:
    """A job of several ranks and a control over it; `done` is what a rank has carried out."""

    def __init__(self, start, looping, folder, faults, world, held):
        self.shm, self._marks = folder / "shm", folder / "probe"
        for directory in (self.shm, self._marks):
            directory.mkdir()
        self._logs = [folder / f"log.{rank}" for rank in range(world)]
        self._looping, self._held = looping, held
        self.burst_s = 0.0  # how long the main loop judges what it has read
        argv = (RANK, str(folder), str(world), "0.002", json.dumps(faults))
        self._process = start(sys.executable, *argv)
        self.control, self._segments = self._supervise()
        wait_until(lambda: len(self._segments.ranks) == world)
        wait_until(lambda: min(self.steps().values()) > 5)

    def _supervise(self, taken=None):
        """Begin to supervise, behind what another supervisor has taken."""
        segments = Segments(self.shm, self._marks, time.monotonic_ns, taken)
        control = Control(self._process, segments, *edges(), self._held, PauseLease(0.4))
        if taken is not None:
            segments.poll()
            control.resume_after_crash(None, None)
        self._taken = cursor = ReadCursor()

        def poll():
            for event in segments.poll():
                cursor.advance_past(event)
            control.file_acks()
            for _ in range(2 if self.burst_s else 0):
                time.sleep(self.burst_s / 2)
                control.send_commands("")

        return self._looping(control, poll), segments

    def taken_over(self):
        time.sleep(0.1)  # the newest frames
        return self._supervise(self._taken)[0]

    def scale(self, value=0.5, key="k", deadline_s=20.0):
        args = {"value": value, "rewarm_steps": 0}
        return self.control.command("lr_scale", args, key=key, deadline_s=deadline_s)

    def steps(self):
        return {number: rank.step for number, rank in self._segments.ranks.items()}

    def boundaries(self):
        return {number: rank.boundary() for number, rank in self._segments.ranks.items()}

    def pids(self):
        return {number: rank.pid for number, rank in self._segments.ranks.items()}

    def done(self):
        return [log.read_text().splitlines() for log in self._logs]

    def verdicts(self):
        """Return what was decided at each fence."""
        paths = sorted(self.shm.glob(f"{fences.PREFIX}*"))
        return [fences.read_verdict(str(path)).decision for path in paths]


@pytest.fixture
def gang(start, looping, tmp_path):
    """A function that starts a gang with the faults of its ranks, `rank1=("dies", 60)`."""

    def make(world=2, held=None, **faults):
        named = {int(name.removeprefix("rank")): fault for name, fault in faults.items()}
        return Gang(start, looping, tmp_path, named, world, held)

    return make
