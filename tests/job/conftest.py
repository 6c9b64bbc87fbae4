"""Real processes, a real terminal, and a complete fake of the segments."""

from __future__ import annotations

import fcntl
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from supervise.core.model import Beat, Payload
from supervise.runtime import Process

PATIENCE_S = 20.0


@pytest.fixture
def wrapper() -> list[str]:
    """The command line of a supervisor reduced to its job package."""
    return [sys.executable, str(Path(__file__).with_name("wrapper.py"))]


@pytest.fixture
def wrapped(wrapper: list[str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command under the wrapper with pipes on stdio; `job_pid` is the job's pid."""
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str, **options: Any) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        options = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True} | options
        popen = subprocess.Popen([*wrapper, *argv], **options)
        started.append(popen)
        return popen

    yield start
    for popen in started:
        for process in psutil.Process(popen.pid).children(recursive=True) if _runs(popen) else []:
            process.kill()
        popen.kill()
        popen.communicate()


def _runs(popen: subprocess.Popen[str]) -> bool:
    return popen.poll() is None


@pytest.fixture
def job_pid() -> Callable[[subprocess.Popen[str]], int]:
    """Read the job's pid from the wrapper's stderr."""

    def read(popen: subprocess.Popen[str]) -> int:
        assert popen.stderr is not None
        found = re.match(r"pid (\d+)", popen.stderr.readline())
        assert found is not None
        return int(found[1])

    return read


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Start a command in this process; every process of it is killed at the end."""
    started: list[Process] = []

    def begin(*argv: str) -> Process:
        started.append(Process.start(argv, os.environ))
        return started[-1]

    yield begin
    for process in started:
        process.tree.end(signal.SIGKILL, 5.0)
        process.wait(60.0)


class Shell:
    """An interactive bash in a terminal of its own."""

    def __init__(self) -> None:
        self._fd, slave = pty.openpty()
        own_the_terminal = (
            "import fcntl, os, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
            "os.execvp('bash', ['bash', '--norc', '--noprofile', '-i'])"
        )
        environ = {**os.environ, "PS1": "ready> ", "TERM": "dumb", "HISTFILE": "/dev/null"}
        self.bash = subprocess.Popen(
            [sys.executable, "-c", own_the_terminal],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environ,
        )
        os.close(slave)
        self._seen = ""
        self.expect("ready> ")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, pattern: str) -> re.Match[str]:
        """Read until `pattern` appears; what comes after it is kept for the next call."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self._seen)):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._fd], [], [], left)[0]:
                raise AssertionError(f"no {pattern!r} on the terminal, but {self._seen!r}")
            self._seen += os.read(self._fd, 4096).decode(errors="replace")
        self._seen = self._seen[found.end() :]
        return found

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the terminal, as its window does."""
        size = struct.pack("4H", rows, columns, 0, 0)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, size)

    def foreground(self) -> int:
        return os.tcgetpgrp(self._fd)

    def close(self) -> None:
        for process in psutil.Process(self.bash.pid).children(recursive=True):
            process.kill()
        self.bash.kill()
        self.bash.wait()
        os.close(self._fd)


@pytest.fixture
def shell() -> Iterator[Shell]:
    session = Shell()
    yield session
    session.close()


@dataclass
class FakeRank:
    """A segment and the probe behind it, in memory.

    `answer` maps a verb to what the probe answers: a result, an error sentence, or None for
    silence. A known key gets the same ack again and is not carried out twice.
    """

    rank: int = 0
    world_size: int = 1
    pid: int = 4242
    step: int = 7
    answer: dict[str, Callable[[Mapping[str, Any]], dict[str, Any] | str | None]] = field(
        default_factory=dict
    )
    phase: str = "step"
    silent_s: float = 0.0
    letters: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    done: dict[str, Any] = field(default_factory=dict)
    leases: list[int] = field(default_factory=list)
    outgoing: list[Any] = field(default_factory=list)

    def send(self, key: str, verb: str, args: Mapping[str, Any]) -> None:
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
        self.outgoing.append(self.done[key])

    def acks(self) -> list[Any]:
        taken, self.outgoing = self.outgoing, []
        return taken

    def lease(self, until_ns: int) -> None:
        self.leases.append(until_ns)

    def beat(self) -> Beat:
        return Beat(self.rank, time.monotonic_ns() - int(self.silent_s * 1e9), self.phase)

    def status(self) -> Payload:
        return Payload({"tier": "T1"})

    def step_ns(self) -> int:
        return 10**8

    def collective(self) -> None:
        return None


@dataclass
class FakeSegments:
    ranks: dict[int, FakeRank] = field(default_factory=dict)
    directory: Path = Path("nowhere")
    kept_until: list[int] = field(default_factory=list)

    def keep_signals(self, until_ns: int) -> None:
        self.kept_until.append(until_ns)


@pytest.fixture
def fake_rank() -> type[FakeRank]:
    return FakeRank


@pytest.fixture
def fake_segments() -> type[FakeSegments]:
    return FakeSegments


@pytest.fixture
def looping() -> Iterator[Callable[..., None]]:
    """Run a main loop on a thread: poll the process, pump the control, every 2 ms."""
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def run(control: Any, process: Process, withdrawn: str, standstill: bool) -> None:
        while not ended.is_set():
            process.poll()
            control.pump(time.monotonic_ns(), withdrawn=withdrawn, standstill=standstill)
            time.sleep(0.002)

    def begin(
        control: Any, process: Process, *, withdrawn: str = "", standstill: bool = False
    ) -> None:
        threads.append(threading.Thread(target=run, args=(control, process, withdrawn, standstill)))
        threads[-1].start()

    yield begin
    ended.set()
    for thread in threads:
        thread.join()
