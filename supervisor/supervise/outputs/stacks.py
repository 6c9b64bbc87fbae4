"""Stacks of every thread of a hung job, read from outside.

Three sources, best first. The probe answers a signal with all stacks once the main thread runs
Python again; if that is stuck in C code, it answers another signal with the main thread's stack
(see `listen` in the probe's `evidence`). py-spy, if installed and permitted. The kernel's view in
/proc, which is always available and distinguishes running from waiting.

A signal is sent only to a process that has a handler for it: the default action is termination.
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
END_OF_ALL = b"(all threads)\n"
ANSWER_S = 1.0  # milliseconds if Python runs; more for a swapped-out process
SETTLED_S = 0.1
BUSY_S = 0.1  # Python checks for signals at every call and loop: longer means C code
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
    """Signal the probe to write the stacks of all threads, or of the main one, and return them.

    Each of the two may take `timeout_s`. Reading frames while they change kills the job, so the
    second signal is sent only if the main thread sleeps in the kernel, or has used `BUSY_S` of CPU
    since the first signal without returning to Python.

    Raises:
        OSError: the probe has no handler, or there was no answer.
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
        if not _is_outside_python(main, cpu_s):
            raise OSError(f"no answer to the signal within {timeout_s:g} s")
    except psutil.Error as error:
        raise OSError(str(error)) from error
    _signal_main_thread(pid, MAIN_STACK)
    if text := _written(file, start, timeout_s, SETTLED_S):
        return text
    raise OSError(f"no answer to two signals within {timeout_s:g} s each")


def _is_outside_python(main: psutil.Process, since_cpu_s: float) -> bool:
    """Whether the main thread, which did not answer, cannot be running Python code."""
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
    libc = ctypes.CDLL(None, use_errno=True)  # os.kill signals a process: any thread may receive it
    if not hasattr(libc, "tgkill"):
        raise OSError("this C library cannot signal a thread")
    if libc.tgkill(pid, pid, signum) != 0:
        raise OSError(os.strerror(ctypes.get_errno()))


def _written(file: Path, start: int, timeout_s: float, settled_s: float = math.inf) -> str:
    """Return the text of `file` after `start` once it is complete or stable; else ""."""
    deadline = time.monotonic() + timeout_s
    text, since = b"", time.monotonic()
    while time.monotonic() < deadline:
        with os.fdopen(files.open_file(file), "rb") as handle:
            handle.seek(start)
            newest = handle.read()
        if newest != text:
            text, since = newest, time.monotonic()
        if text.endswith(END_OF_ALL) or (text and time.monotonic() - since >= settled_s):
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
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]  # does not stop the job
    return run_tool(command, timeout_s).decode("utf-8", "replace")


def kernel(pid: int) -> str:
    """Return state, wait channel and kernel stack of every thread from /proc."""
    lines = [f"process {pid}"]
    try:
        threads = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))
    except OSError:
        return f"process {pid}: exited\n"
    for thread in threads[:_THREADS]:
        status = dict(
            line.split(":\t", 1) for line in _read(thread / "status").splitlines() if ":\t" in line
        )
        name, state = status.get("Name", "?"), status.get("State", "exited")
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
    except OSError:  # exited, or root only
        return ""
