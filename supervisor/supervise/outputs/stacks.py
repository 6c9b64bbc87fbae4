"""What every thread of the job is doing, seen from outside: for a job that hangs.

Three ways, best first. The probe answers a signal with all stacks once the main thread runs Python
again, or, where that stands still in C code, another with the main thread's (see `listen` in the
probe's `evidence`). py-spy, where it is installed and allowed. The kernel's view in /proc, which is
always there and tells at least running from waiting.

A signal is only sent to a process that catches it: its default action is death.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import psutil

from ..store import files
from .host_facts import run_tool

STACKS, MAIN_STACK = signal.SIGRTMIN + 5, signal.SIGRTMIN + 6
ALL_TOLD = b"(all threads)\n"
ANSWER_S = 1.0  # within milliseconds where Python runs; a swapped-out process takes longer
SETTLED_S = 0.1
BUSY_S = 0.1  # Python looks for signals at every call and loop: so long without is C code
PY_SPY_S = 10.0
_THREADS = 64  # per process, in the kernel's view


def catches(pid: int, signum: int) -> bool:
    """Return True when the process has a handler for `signum` (SigCgt of /proc/<pid>/status)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)


def ask(pid: int, marks: Path, timeout_s: float = ANSWER_S) -> str:
    """Have the probe write the stacks of all threads, or of the main one; return what it wrote.

    Each of the two is waited for up to `timeout_s`. Reading frames while they change kills the job,
    so the second is asked only of a main thread that sleeps in the kernel, or that had `BUSY_S` of
    a CPU since the first signal and did not come back to Python.

    Raises:
        OSError: the probe listens to no signals, or nothing came.
    """
    file = marks / f"stacks.{pid}.txt"
    if not file.exists() or not (catches(pid, STACKS) and catches(pid, MAIN_STACK)):
        raise OSError("the probe registered no handler for it")
    start = file.stat().st_size
    try:
        main = psutil.Process(pid)
        cpu_s = _main_cpu_s(main)
        main.send_signal(STACKS)
        if text := _written(file, start, timeout_s):
            return text
        if not _standing(main, cpu_s):
            raise OSError(f"no answer to the signal within {timeout_s:g} s")
    except psutil.Error as error:
        raise OSError(str(error)) from error
    _signal_main_thread(pid, MAIN_STACK)
    if text := _written(file, start, timeout_s, SETTLED_S):
        return text
    raise OSError(f"no answer to two signals within {timeout_s:g} s each")


def _standing(main: psutil.Process, since_cpu_s: float) -> bool:
    """Return True when the main thread, asked before, cannot be running Python."""
    state = main.status()
    if state == psutil.STATUS_RUNNING:
        return _main_cpu_s(main) - since_cpu_s >= BUSY_S
    return state in (psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP)


def _main_cpu_s(process: psutil.Process) -> float:
    return sum(
        thread.user_time + thread.system_time
        for thread in process.threads()
        if thread.id == process.pid
    )


def _signal_main_thread(pid: int, signum: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.kill is for processes: any thread may get it
    if not hasattr(libc, "tgkill"):
        raise OSError("this C library cannot signal a thread")
    if libc.tgkill(pid, pid, signum) != 0:
        raise OSError(os.strerror(ctypes.get_errno()))


def _written(file: Path, start: int, timeout_s: float, settled_s: float = math.inf) -> str:
    """Return what is in `file` from `start` on once all is told or it has settled; else ""."""
    deadline = time.monotonic() + timeout_s
    text, since = b"", time.monotonic()
    while time.monotonic() < deadline:
        with os.fdopen(files.open_file(file), "rb") as handle:
            handle.seek(start)
            newest = handle.read()
        if newest != text:
            text, since = newest, time.monotonic()
        if text.endswith(ALL_TOLD) or (text and time.monotonic() - since >= settled_s):
            return text.decode("utf-8", "replace")
        time.sleep(0.005)
    return ""


def py_spy(pid: int, timeout_s: float = PY_SPY_S) -> str:
    """Return py-spy's dump of the process.

    Raises:
        OSError: it is not installed, not allowed to trace, or too slow.
    """
    tool = shutil.which("py-spy")
    if tool is None:
        raise OSError("py-spy is not installed")
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]  # a healthy job is not stopped
    return run_tool(command, timeout_s).decode("utf-8", "replace")


def kernel(pid: int) -> str:
    """Return state, wait channel and kernel stack of every thread, as far as /proc shows them."""
    lines = [f"process {pid}"]
    try:
        threads = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))
    except OSError:
        return f"process {pid}: gone\n"
    for thread in threads[:_THREADS]:
        status = dict(
            line.split(":\t", 1) for line in _read(thread / "status").splitlines() if ":\t" in line
        )
        name, state = status.get("Name", "?"), status.get("State", "gone")
        waits = _read(thread / "wchan").strip("\0\n") or "-"
        lines.append(f"  thread {thread.name} {name}: {state}, waits in {waits}")
        call = _read(thread / "syscall").split()
        lines += [f"    system call {call[0]}"] if call and call[0] != "running" else []
        lines += [f"    {frame}" for frame in _read(thread / "stack").splitlines()]
    if len(threads) > _THREADS:
        lines.append(f"  and {len(threads) - _THREADS} more threads")
    return "\n".join(lines) + "\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # gone, or for root only
        return ""
