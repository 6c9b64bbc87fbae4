"""A witness over a real process, as `job.controller.Control` is one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from supervise.core.model import Payload
from supervise.runtime import RankView
from tests.support.waiting import wait_until


@dataclass
class FakeWitness:
    """The job as evidence sees it. `probe` writes a rank's files, or says why not, or is None."""

    pids: list[int]
    views: dict[int, dict[str, Any]] = field(default_factory=dict)
    probe: Callable[[Path, int], str | None] | None = None
    asked: list[Mapping[str, Any]] = field(default_factory=list)
    loop: bool = True

    def ask(self, verb: str, args: Mapping[str, Any], *, key: str, partly: bool = False) -> Any:
        assert (verb, partly) == ("snapshot", True)
        self.asked.append(args)
        answers = {}
        for rank in self.views if self.probe is not None else ():
            error = self.probe(Path(args["directory"]), rank)
            answers[rank] = SimpleNamespace(ok=error is None, error=error, result={})
        return SimpleNamespace(wait=lambda timeout_s: answers)

    def forget(self, asked: Any) -> None:
        pass

    def on_loop(self, call: Callable[[], Any], timeout_s: float) -> Any:
        if not self.loop:
            from supervise.errors import ActionError

            raise ActionError("the supervisor's main loop is busy")
        return call()

    def ranks(self) -> Mapping[int, RankView]:
        return self.views

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in self.pids]


@pytest.fixture
def witness() -> type[FakeWitness]:
    return FakeWitness


@pytest.fixture
def view() -> Callable[..., RankView]:
    """What `Control.ranks` says of one rank."""

    def make(pid: int, *, silent_s: float = 0.0) -> RankView:
        seen_ns = time.monotonic_ns() - int(silent_s * 1e9)
        return RankView(pid, "step", seen_ns, Payload({"tier": "T1"}))

    return make


# A job that is silent, in two threads: waiting in Python or in C, or working in C or in Python
# with other threads that come and go. The probe's own listener is there if it is told where.
SILENT = """
import hashlib, sys, threading, time
silent_in, marks = sys.argv[1:]
if marks:
    from supervise_probe.runtime import evidence
    evidence.listen(marks)
WAYS = {
    "sleep": lambda: time.sleep(600),
    "lock": lambda: [lock.acquire() for lock in [threading.Lock()] for _ in range(2)],
    "c": lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1),
    "python": lambda: [list(map(lambda x: x, range(1000))) for _ in iter(int, 1)],
}
loader_is_in = threading.Event()
def stuck_in_here(way):
    if threading.current_thread() is threading.main_thread():
        loader_is_in.wait()
        print("up", flush=True)
    else:
        loader_is_in.set()
    WAYS[way]()
def crowd():
    while True:
        thread = threading.Thread(target=time.sleep, args=(0.001,))
        thread.start()
        thread.join()
threading.Thread(target=stuck_in_here, args=("sleep",), name="loader", daemon=True).start()
if silent_in == "python":
    threading.Thread(target=crowd, daemon=True).start()
stuck_in_here(silent_in)
"""


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a Python job that is silent in two threads; the probe listens in `marks`, if given."""
    started: list[subprocess.Popen[str]] = []

    def start(
        marks: Path | None = None, silent_in: str = "sleep", **environ: str
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SILENT, silent_in, str(marks or "")]
        popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ}
        )
        started.append(popen)
        assert popen.stdout is not None
        assert popen.stdout.readline() == "up\n"
        if silent_in in ("sleep", "lock"):  # it says so a moment before
            wait_until(lambda: psutil.Process(popen.pid).status() == psutil.STATUS_SLEEPING)
        return popen

    yield start
    for popen in started:
        popen.send_signal(signal.SIGKILL)
        popen.communicate()
