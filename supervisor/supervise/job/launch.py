"""Start the command as the user would have, and say clearly when that cannot be.

The argument list, the working directory and every inherited descriptor, stdio first, are handed on
as they are: no pipe lies between the job and its terminal or log file, so nothing of ours can block
it or break when we die (unless its output is to be kept, see `job_output`). The job gets no
PDEATHSIG (if the supervisor dies, training goes on), and default signal handling but for signals
that were ignored already.

The job gets a process group of its own, of which it is not the leader: `setsid()` fails in a
leader, and a job must be able to call it, as without us. Another process makes the group; see
`_new_group`.

The supervisor becomes a subreaper: a process of the job that loses its parent becomes our child, so
that stopping the job can reach it and its end is collected.
"""

from __future__ import annotations

import ctypes
import difflib
import errno
import os
import shutil
import signal
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from ..errors import LaunchError

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
NO_OUTPUTS: Mapping[int, int] = {}
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # the shell's rule


def become_subreaper() -> bool:
    """Adopt orphans among our descendants; False where the kernel cannot."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def spawn(
    argv: Sequence[str], environ: Mapping[str, str], outputs: Mapping[int, int] = NO_OUTPUTS
) -> tuple[int, int]:
    """Start `argv` in a process group of its own; return its pid and the id of the group.

    Args:
        outputs: its descriptors that are not inherited -> ours that it gets for them.

    Raises:
        LaunchError: it was not found (exit code 127) or is not executable (126).
    """
    become_subreaper()
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        # Inherited from a careless parent; with it the kernel throws exit codes away.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with _new_group() as group:
        try:
            pid = os.posix_spawnp(
                argv[0],
                list(argv),
                dict(environ),
                file_actions=[(os.POSIX_SPAWN_DUP2, ours, fd) for fd, ours in outputs.items()],
                setpgroup=group,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these two for itself
            )
        except (OSError, ValueError) as error:
            raise explain(argv, environ, error) from error
    return pid, group or pid


def replace_process(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become the program. Raises LaunchError: it cannot be started."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two for itself
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], list(argv), dict(environ))  # noqa: S606 - the user's own command
    except (OSError, ValueError) as error:
        raise explain(argv, environ, error) from error


@contextmanager
def _new_group() -> Iterator[int]:
    """Make a process group and keep it until its first member is in; 0: that member makes one.

    The leader is a process that has nothing to do: what exists when `posix_spawn` returns is the
    group, and it exists until the leader is collected, even if that has ended before. So nothing
    has to be waited for, and it does not matter how far the program gets before it is killed. It
    is our own interpreter, the one program that is surely there (`/proc/self/exe` also names one
    that was deleted since). `os.fork` would need no program, but a relaunch happens while other
    threads run, and a fork of such a process can deadlock.
    """
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    try:
        leader = os.posix_spawn(
            "/proc/self/exe", ["supervise-group", "-V"], {}, file_actions=null, setpgroup=0
        )
    except OSError:  # no /proc, or no process to spare: the job then leads its group itself
        yield 0
        return
    try:
        yield leader
    finally:
        with suppress(OSError):
            os.kill(leader, signal.SIGKILL)
            os.waitpid(leader, 0)


def explain(
    argv: Sequence[str], environ: Mapping[str, str], error: OSError | ValueError
) -> LaunchError:
    """Turn the operating system's refusal into one sentence and a hint."""
    command = argv[0] if argv else ""
    search = environ.get("PATH", os.defpath)
    found = command if "/" in command else shutil.which(command, mode=os.F_OK, path=search)
    path = Path(found or "/nowhere")
    if isinstance(error, ValueError):
        return LaunchError(f"cannot start {command!r}: {error}", exit_code=NOT_EXECUTABLE)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return _not_found(command, path, search)
    hint = None
    reason = error.strerror or str(error)
    if os.path.isdir(path):  # noqa: PTH112 - Path raises where a directory above is closed
        reason = "it is a directory"
    elif error.errno == errno.ENOEXEC:
        reason, hint = "it is not a program", "give its interpreter first, or add a '#!' line"
    elif error.errno == errno.EACCES and not os.access(path, os.X_OK):
        reason = "it is not executable"
        hint = _run_with_python(command) or f"chmod +x {command}"
        if not os.path.exists(path):  # noqa: PTH110
            reason, hint = "a directory above it may not be entered", f"namei -l {command}"
    return LaunchError(f"cannot start {command}: {reason}", exit_code=NOT_EXECUTABLE, hint=hint)


def _not_found(command: str, path: Path, search: str) -> LaunchError:
    if os.path.isfile(path):  # noqa: PTH113 - the file is there, so it is the interpreter in its first line that is not
        with path.open("rb") as file:
            line = file.readline(256).decode("utf-8", "replace")
        wanted = line[2:].strip() if line.startswith("#!") else "its loader"
        return LaunchError(
            f"cannot start {command}: its interpreter {wanted} does not exist",
            exit_code=NOT_EXECUTABLE,
        )
    hint = _run_with_python(command) if os.path.isfile(command) else None  # noqa: PTH113
    if hint is None and "/" not in command:
        near = difflib.get_close_matches(command, _programs(search), n=1, cutoff=0.75)
        hint = f"did you mean {near[0]}?" if near else None
    return LaunchError(
        f"cannot start {command!r}: command not found", exit_code=NOT_FOUND, hint=hint
    )


def _run_with_python(command: str) -> str | None:
    if not command.endswith(".py"):
        return None
    return f"did you mean: supervise -- python {command}"


def _programs(search: str) -> list[str]:
    names: set[str] = set()
    for directory in search.split(os.pathsep):
        try:
            with os.scandir(directory or ".") as entries:
                names.update(entry.name for entry in entries if entry.stat().st_mode & stat.S_IXUSR)
        except OSError:
            continue
    return sorted(names)
