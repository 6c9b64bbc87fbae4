"""Stacks of every thread of a hung job, read from outside.

Three sources, best first. The probe answers a signal with all stacks once the main thread runs
Python again; if that is stuck in C code, it answers another signal with the main thread's stack
(see `listen` in the probe's `evidence`). py-spy, if installed and permitted. The kernel's view in
/proc, which is always available and distinguishes running from waiting.

A signal is sent only to a process that has a handler for it: the default action is termination. A
worker that was forked has its parent's handlers, and answers into its parent's file, which is open
in it; one that was started afresh has neither.

Looks at the processes of a job that stands still, for `core.standstill` to explain.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path, PurePath

import psutil

from ..core.standstill import Collective, LoaderWorker, RankStand, Standstill, explain_standstill
from ..store import files
from .host import run_tool
from .segment_reader import RankView

STACKS, MAIN_STACK = signal.SIGRTMIN + 5, signal.SIGRTMIN + 6
_END_OF_ALL = re.compile(rb"\(all threads of (\d+)\)\n")
ANSWER_S = 1.0  # milliseconds if Python runs; more for a swapped-out process
SETTLED_S = 0.1
BUSY_S = 0.1  # Python checks for signals at every call and loop: longer means C code
PY_SPY_S = 10.0
_LIVED_S = 2.0  # the start of a process is known to a second
_THREADS = 64  # per process, in the kernel's view


def catches_signal(pid: int, signum: int) -> bool:
    """Return True when the process has a handler for `signum` (SigCgt of /proc/<pid>/status)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (signum - 1) & 1)


def ask_for_stacks(
    pid: int, marks: Path, timeout_s: float = ANSWER_S, *, forks: bool = False
) -> str:
    """Signal the probe to write the stacks of all threads, or of the main one, and return them.

    Each of the two may take `timeout_s`. Reading frames while they change kills the job, so the
    second signal is sent only if the main thread sleeps in the kernel, or has used `BUSY_S` of CPU
    since the first signal without returning to Python.

    Args:
        forks: also of a process that has the handlers of the one that it was forked from.

    Raises:
        OSError: the probe has no handler, or there was no answer.
    """
    try:
        main = psutil.Process(pid)
        file = marks / f"stacks.{pid}.txt"
        if not file.exists() and forks:
            file = _inherited(main, marks) or file
        if not file.exists() or not (
            catches_signal(pid, STACKS) and catches_signal(pid, MAIN_STACK)
        ):
            raise OSError("the probe registered no handler for it")
        start = file.stat().st_size
        cpu_s = _main_cpu_s(main)
        main.send_signal(STACKS)
        if text := _wait_for_text(file, start, pid, timeout_s):
            return text
        if not _is_outside_python(main, cpu_s):
            raise OSError(f"no answer to the signal within {timeout_s:g} s")
    except psutil.Error as error:
        raise OSError(str(error)) from error
    _signal_main_thread(pid, MAIN_STACK)
    if text := _wait_for_text(file, start, pid, timeout_s, SETTLED_S):
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


def _inherited(process: psutil.Process, marks: Path) -> Path | None:
    """Return the file that a fork answers into, None where it is not sure to be one.

    It is that of the nearest ancestor that has one, open under the same number, which the handlers
    write to. A process that is about to run another program loses them, so it must have lived.
    """
    if time.time() - process.create_time() < _LIVED_S:
        return None
    for ancestor in process.parents():
        file = marks / f"stacks.{ancestor.pid}.txt"
        if file.exists():
            return file if _numbers(ancestor.pid, file) & _numbers(process.pid, file) else None
    return None


def _numbers(pid: int, file: Path) -> set[str]:
    """Return the descriptors under which a process has a file open."""
    numbers = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if descriptor.samefile(file):
                    numbers.add(descriptor.name)
    return numbers


def _wait_for_text(
    file: Path, start: int, pid: int, timeout_s: float, settled_s: float = math.inf
) -> str:
    """Return what `pid` wrote to `file` after `start`, once it is complete or stable; else ""."""
    deadline = time.monotonic() + timeout_s
    text, since = b"", time.monotonic()
    while time.monotonic() < deadline:
        with os.fdopen(files.open_file(file), "rb") as handle:
            handle.seek(start)
            # Complete answers, each followed by its pid; a late one may be of another process.
            *answers, newest = _END_OF_ALL.split(handle.read())
        for answer, label in zip(answers[::2], answers[1::2], strict=True):
            if int(label) == pid:
                return answer.decode("utf-8", "replace")
        if newest != text:
            text, since = newest, time.monotonic()
        if text and time.monotonic() - since >= settled_s:
            return text.decode("utf-8", "replace")
        time.sleep(0.005)
    return ""


def py_spy_dump(pid: int, timeout_s: float = PY_SPY_S) -> str:
    """Return py-spy's dump of the process.

    Raises:
        OSError: it is not installed, not allowed to trace, or too slow.
    """
    tool = shutil.which("py-spy")
    if tool is None:
        raise OSError("py-spy is not installed")
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]  # does not stop the job
    return run_tool(command, timeout_s).decode("utf-8", "replace")


def read_kernel_stack(pid: int) -> str:
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


def waits_for_lock(pid: int) -> bool:
    """Return whether the main thread sleeps until another one wakes it, as `lock.acquire` does."""
    return "futex" in _read(Path(f"/proc/{pid}/task/{pid}/wchan"))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # exited, or root only
        return ""


_STATES = {
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped",
    psutil.STATUS_ZOMBIE: "exited",
    psutil.STATUS_DEAD: "exited",
    psutil.STATUS_DISK_SLEEP: "disk",
}
# faulthandler's, newest call first; then py-spy's.
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_PY_SPY = re.compile(r"^    (?P<name>.+) \((?P<file>.+):(?P<line>\d+)\)$")
_MAIN = re.compile(r"^(Current thread|Stack \(most recent|Thread .*MainThread)")
_FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python\d|supervise_probe/|^<frozen")
_ENGINE = "_engine_run_backward"
_LOADER = re.compile(r"torch/utils/data/dataloader\.py$")
_WORKER = "_worker_loop"  # of torch's data loader; what is above it in a fork is its parent's
_SPAWNED = "--multiprocessing-fork"  # in the command of a worker that is no fork


class RankSurvey:
    """The processes of the ranks, as they are found; `finish` says what became of them.

    Args:
        ranks: what `Control.ranks` returns. members: the processes of the job.
    """

    def __init__(
        self,
        ranks: Mapping[int, RankView],
        members: Sequence[psutil.Process] = (),
    ) -> None:
        self._ranks = ranks
        self._workers = _descendants({view.pid for view in ranks.values()}, members)
        self._found = {
            pid: _observe(pid) for pid in (*(view.pid for view in ranks.values()), *self._workers)
        }
        self._at_ns = time.monotonic_ns()

    def has_exited(self) -> bool:
        """Return whether the process of any rank does not exist any more."""
        return any(self._found[view.pid][0] == "exited" for view in self._ranks.values())

    def silent_s(self) -> float:
        """Return for how long no rank has shown a sign of life, 0 where there is none."""
        newest: int = max((view.seen_ns for view in self._ranks.values()), default=self._at_ns)
        return (self._at_ns - newest) / 1e9

    def finish(self, steps: Mapping[int, int], stacks: Callable[[int], str]) -> Standstill:
        """Return who holds the job up.

        Args:
            steps: the newest of each rank. stacks: returns the text of a process's stacks.
        """
        passed = max((time.monotonic_ns() - self._at_ns) / 1e9, 1e-3)
        stands = {}
        for rank, view in self._ranks.items():
            state, used = self._usage(view.pid, passed)
            frames = main_frames(stacks(view.pid).splitlines())
            in_loader = any(
                frame["name"] == "__next__" and _LOADER.search(frame["file"]) for frame in frames
            )
            stands[rank] = RankStand(
                state,
                used,
                steps.get(rank, -1),
                Collective(*view.collective) if view.collective else None,
                deepest_own_frame(frames),
                any(frame["name"] == _ENGINE for frame in frames),
                in_loader,
                tuple(self._loaders(view.pid, passed, stacks)) if in_loader else (),
            )
        return explain_standstill(stands, {rank: view.pid for rank, view in self._ranks.items()})

    def _usage(self, pid: int, passed_s: float) -> tuple[str, float | None]:
        """Return the state of a process, and how many cores it has used since."""
        state, previous_usage = self._found[pid]
        _, current_usage = _observe(pid)
        return state, None if previous_usage is None or current_usage is None else (
            current_usage - previous_usage
        ) / passed_s

    def _loaders(
        self, rank: int, passed_s: float, stacks: Callable[[int], str]
    ) -> Iterator[LoaderWorker]:
        """Yield the workers of the rank with this pid."""
        for pid, (parent, command) in self._workers.items():
            frames = main_frames(stacks(pid).splitlines())
            inner = list(takewhile(lambda frame: frame["name"] != _WORKER, frames))
            if parent != rank or len(inner) == len(frames) > 0:
                continue
            if not frames and _SPAWNED not in command:
                continue
            state, used = self._usage(pid, passed_s)
            idle = bool(inner) and inner[-1]["name"] == "get"  # from the queue of what is asked for
            location = deepest_own_frame(inner) or (_location(inner[0]) if inner else "")
            activity = "" if not frames else "idle" if idle else "busy"
            yield LoaderWorker(pid, state, used, activity, location, waits_for_lock(pid))


def _descendants(
    ranks: set[int], members: Sequence[psutil.Process]
) -> dict[int, tuple[int, Sequence[str]]]:
    """Return the rank and the command of each process that ranks started, by pid."""
    children: dict[int, tuple[int, Sequence[str]]] = {}
    for process in members:  # parents come first
        if process.pid not in ranks:
            with suppress(psutil.Error):
                parent = process.ppid()
                rank = parent if parent in ranks else children.get(parent, (0, ()))[0]
                if rank:
                    children[process.pid] = rank, process.cmdline()
    return children


def _observe(pid: int) -> tuple[str, float | None]:
    """Return the state of a process, and the seconds of CPU time that it has used."""
    try:
        process = psutil.Process(pid)
        used = process.cpu_times()
        return _STATES.get(process.status(), ""), used.user + used.system
    except psutil.NoSuchProcess:
        return "exited", None
    except psutil.Error:
        return "", None


def deepest_own_frame(frames: Sequence[re.Match[str]]) -> str:
    """Return the deepest frame outside installed packages, "" where there is none."""
    own_frame = next((frame for frame in frames if not _FOREIGN.search(frame["file"])), None)
    return "" if own_frame is None else _location(own_frame)


def _location(frame: re.Match[str]) -> str:
    name = frame["name"] if frame["name"].startswith("<") else f"{frame['name']}()"
    return f"{PurePath(frame['file']).name}:{frame['line']} in {name}"


def main_stack(marks: Path, pid: int) -> str:
    """Return the frames of a process's main thread, "" where they cannot be read."""
    try:
        frames = main_frames(ask_for_stacks(pid, marks).splitlines())
    except OSError:
        return ""
    return "\n".join(frame[0].strip() for frame in frames)


def main_frames(lines: Iterable[str]) -> list[re.Match[str]]:
    """Return the calls of the main thread, the newest first."""
    matches: list[re.Match[str]] = []
    inside = False
    for line in lines:
        frame = _FRAME.match(line) or _PY_SPY.match(line)
        if frame is None:
            if inside and not line.strip():
                break
            inside = bool(_MAIN.match(line)) or (inside and line.startswith(" "))
        elif inside:
            matches.append(frame)
    return matches
