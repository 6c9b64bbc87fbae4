"""A witness over a real process, as the control of a job is one, and what it has seen."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from supervise.core.model import Payload
from supervise.errors import ActionError
from supervise.runtime import Evidence, RankView
from tests.support.waiting import wait_until


class FakeWitness:
    """The job as evidence sees it. `probe` writes a rank's files, or says why not, or is None."""

    def __init__(self, pids, views=None, probe=None, loop=True):
        self.pids, self.views, self.probe, self.loop = pids, views or {}, probe, loop
        self.asked = []

    def send_command(self, verb, args, *, key, partly=False):
        assert (verb, partly) == ("snapshot", True)
        self.asked.append(args)
        errors = {}
        for rank in self.views if self.probe is not None else ():
            errors[rank] = self.probe(Path(args["directory"]), rank)
        answers = {
            rank: SimpleNamespace(ok=error is None, error=error, result={})
            for rank, error in errors.items()
            if error != "silence"
        }
        return SimpleNamespace(wait=lambda timeout_s: answers)

    def stop_waiting(self, asked):
        pass

    def on_loop(self, call, timeout_s):
        if not self.loop:
            raise ActionError("the supervisor's main loop is busy")
        return call()

    def ranks(self):
        return self.views

    def processes(self):
        return [psutil.Process(pid) for pid in self.pids]


def view(pid, *, silent_s=0.0, **status):
    seen_ns = time.monotonic_ns() - int(silent_s * 1e9)
    return RankView(pid, "step", seen_ns, Payload({"tier": "T1", **status}))


@pytest.fixture
def bundle(tmp_path):
    """A function that collects evidence of a job in `tmp_path`: its summary, and its directory."""
    run = tmp_path / "run"
    (run / "probe").mkdir(parents=True)

    def collect(job, *, incident="inc-1", key="k", window=list, **options):
        evidence = Evidence(
            run / "incidents", run / "probe", window, **({"directory": tmp_path} | options)
        )
        seen = evidence.collect(job, incident, key, 30.0)
        return seen, run / seen.path

    return collect


# A job that is silent, in two threads: waiting in Python or in C, or working in C or in Python
# with other threads that come and go. The probe's own listener is there if it is told where.
SILENT = """
import hashlib, sys, threading, time
silent_in, marks = sys.argv[1:]
if marks:
    from supervise_probe.runtime import evidence
    evidence.dump_stacks_on_signals(marks)
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
def hung():
    """Start a Python job that is silent in two threads; the probe listens in `marks`, if given."""
    started = []

    def start(marks=None, silent_in="sleep", **environ):
        command = [sys.executable, "-c", SILENT, silent_in, str(marks or "")]
        environ, pipe = {**os.environ, **environ}, subprocess.PIPE
        popen = subprocess.Popen(command, stdout=pipe, text=True, env=environ)
        started.append(popen)
        assert popen.stdout.readline() == "up\n"
        if silent_in in ("sleep", "lock"):  # it says so a moment before
            wait_until(lambda: psutil.Process(popen.pid).status() == psutil.STATUS_SLEEPING)
        return popen

    yield start
    for popen in started:
        popen.send_signal(signal.SIGKILL)
        popen.communicate()
