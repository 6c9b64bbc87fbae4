"""Runs one tool and leaves nothing of it behind; started by `system`, as a program.

    python -I -S process_reaper.py LIFELINE TOOL ARGUMENT...

LIFELINE is the reading end of a pipe that the supervisor holds open and never writes to. It closes
when the supervisor hangs up, and whatever it dies of. The reaper is the subreaper of what it
starts, so no process of the tool can leave its tree, with a session of its own or as an orphan: all
of them are killed when the tool has ended, or when the lifeline closes. It ends as the tool did.

Standard library only: it is started without our packages.
"""

import ctypes
import os
import select
import signal
import sys
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(lifeline: int, argv: list[str]) -> int:
    """Run the tool; return its exit code, or minus the signal that ended it."""
    os.set_inheritable(lifeline, False)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # typed at the terminal: the tool hears it itself
    try:
        tool = os.posix_spawnp(
            argv[0], argv, os.environ, setsigdef=[signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ]
        )
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        return 127
    code = None
    while code is None:
        ready, _, _ = select.select([lifeline, woken], [], [])
        if lifeline in ready:
            code = -signal.SIGKILL
        else:
            os.read(woken, 512)
            code = _collect(tool)
    _end_all()
    return code


def _collect(tool: int) -> "int | None":
    """Collect who has ended; return how the tool did, if it did."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if not pid:
            return code
        if pid == tool:
            code = os.waitstatus_to_exitcode(status)


def _end_all() -> None:
    """Kill our children until there are none: those of one who dies become ours."""
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    pids = []
    for process in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(process.read_bytes().rpartition(b")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        if parent == os.getpid():
            pids.append(int(process.parent.name))
    return pids


def _end_as(code: int) -> None:
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the tool has left one, if anybody did
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _end_as(main(int(sys.argv[1]), sys.argv[2:]))
