"""What every thread of the job is doing, seen from outside: for a job that hangs.

Three ways, best first. The probe registers `faulthandler` on a real-time signal; it answers within
milliseconds even while C code holds the interpreter's lock. py-spy, where it is installed and
allowed. The kernel's view in /proc, which is always there and tells at least running from waiting.

The signal is only sent to a process that catches it: its default action is death.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path

import psutil

from .facts import run_tool

STACK_SIGNAL = signal.SIGRTMIN + 5
ANSWER_S = 1.0  # faulthandler took 0.2 to 4 ms in trials; a swapped-out process takes longer
SETTLED_S = 0.05
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
    """Have the probe's faulthandler write all stacks; return what it wrote.

    Raises:
        OSError: the probe did not register it, or nothing came within `timeout_s`.
    """
    file = marks / f"stacks.{pid}.txt"
    if not file.exists() or not catches(pid, STACK_SIGNAL):
        raise OSError("the probe registered no handler for it")
    before = file.stat().st_size
    try:
        psutil.Process(pid).send_signal(STACK_SIGNAL)
    except psutil.Error as error:
        raise OSError(str(error)) from error
    deadline = time.monotonic() + timeout_s
    size, grew = before, time.monotonic()
    while time.monotonic() < deadline:
        now = file.stat().st_size
        if now != size:
            size, grew = now, time.monotonic()
        elif size > before and time.monotonic() - grew >= SETTLED_S:
            break
        time.sleep(0.005)
    if size == before:
        raise OSError(f"no answer to the signal within {timeout_s:g} s")
    with file.open("rb") as handle:
        handle.seek(before)
        return handle.read().decode("utf-8", "replace")


def py_spy(pid: int, timeout_s: float = PY_SPY_S) -> str:
    """Return py-spy's dump of the process.

    Raises:
        OSError: it is not installed, not allowed to trace, or too slow.
    """
    tool = shutil.which("py-spy")
    if tool is None:
        raise OSError("py-spy is not installed")
    return run_tool([tool, "dump", "--pid", str(pid)], timeout_s).decode("utf-8", "replace")


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
