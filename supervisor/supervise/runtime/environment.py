"""Environment of the job: its variables, its limits of resources, its shared memory.

`shortage` says whether the limits of this process leave room to watch a job: a supervisor that
fails half-way is worse than none.

The probe enters through `sitecustomize` in a directory put in front of `PYTHONPATH`. Two variables
come with it; nothing else of the job's environment changes. `tier` forecasts from the command line
when that cannot work: T0 means that only exit, signals, logs and hardware are seen. A program may
start Python later and a wrapper may drop the variable, so a probe that reports is believed over the
forecast, and one that never does is noticed by its silence.

The supervisor makes and removes the directory in shared memory with the segments of a run; the
probes only make files in it. A supervisor that was killed leaves it behind, since its job may still
be writing: the next one removes those of dead runs.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import shlex
import shutil
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from supervise_probe import wire

from ..store import files
from .process_tree import STATE, start_ticks, stat_fields

FILES = 12  # that must be left to open: log, journal, pipes, evidence; project default
# Of address space, where it is limited: a stack and a heap for each thread, and no error of memory
# in the middle of a C extension, which ends the process (seen at 400 MiB).
MEMORY_BYTES = 512 << 20


def explain_ulimit_shortage() -> str | None:
    """Return which limit is too small and how to raise it, None where none is."""
    files, memory = (
        resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)
    )
    if files != resource.RLIM_INFINITY:
        used = sum(map(_is_open, range(min(files, FILES))))
        if files - used < FILES:
            return f"only {files} files may be open, {used} are (ulimit -n 1024 allows more)"
    if memory not in (resource.RLIM_INFINITY, -1) and memory < MEMORY_BYTES:
        return (
            f"only {memory >> 20} MiB of address space are allowed, and watching takes "
            f"{MEMORY_BYTES >> 20} (ulimit -v unlimited allows more)"
        )
    return None


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


LAUNCH = "SUPERVISE_LAUNCH"  # "<run id>:<attempt>"; by it a later supervisor knows the job
_VARIABLE = re.compile(rb"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?(-dbg)?(\.exe)?$")

# Programs that start other programs and hand the environment on. What they start is searched for
# in their arguments; where it is not to be seen there, the forecast is hopeful.
_LAUNCHERS = {
    "bash",
    "sh",
    "dash",
    "zsh",
    "fish",
    "ksh",
    "make",
    "just",
    "task",
    "script",
    "sudo",
    "env",
    "nice",
    "ionice",
    "chrt",
    "taskset",
    "numactl",
    "timeout",
    "time",
    "stdbuf",
    "setsid",
    "nohup",
    "unshare",
    "xvfb-run",
    "srun",
    "mpirun",
    "mpiexec",
    "orterun",
    "uv",
    "uvx",
    "poetry",
    "pdm",
    "hatch",
    "pipenv",
    "pixi",
    "conda",
    "mamba",
    "micromamba",
    "nsys",
    "ncu",
    "strace",
    "perf",
}

_KEEPS_OUT = {
    "I": "python -I ignores PYTHONPATH",
    "E": "python -E ignores PYTHONPATH",
    "S": "python -S does not import sitecustomize",
}


def inject_dir() -> Path:
    """Return the directory of the probe's `sitecustomize.py`."""
    spec = find_spec("supervise_probe")
    assert spec is not None, "supervise_probe is part of this distribution"
    assert spec.origin is not None
    return Path(spec.origin).resolve().parent / "inject"


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Return True when the kill switch `SUPERVISE_DISABLE` is on (anything but empty or "0")."""
    return environ.get("SUPERVISE_DISABLE", "") not in ("", "0")


def child_environment(
    environ: Mapping[str, str], probe_config: Path, launch: str = ""
) -> dict[str, str]:
    """Return the job's environment: `environ` plus the way in for the probe.

    Args:
        environ: the environment to start from, usually `os.environ`.
        probe_config: path of the run's `probe.json`.
        launch: by this name the processes of one launch are known; see `launched`.
    """
    child = dict(environ)
    if launch:
        child[LAUNCH] = launch
    if is_disabled(environ):
        return child
    inject = str(inject_dir())
    # An empty PYTHONPATH is no PYTHONPATH; an empty entry in it would be the working directory.
    entries = [
        entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry != inject
    ]
    child["PYTHONPATH"] = os.pathsep.join([inject, *entries] if entries != [""] else [inject])
    child["SUPERVISE_PROBE"] = str(probe_config.resolve())
    return child


def has_run_mark(pid: int, run_id: str) -> bool | None:
    """Return whether process `pid` carries the mark of a run.

    None: that cannot be seen, since the process is ours and has written something else over its
    environment, as setproctitle does, or is gone.
    """
    process = Path(f"/proc/{pid}")
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
        ours = process.stat().st_uid == os.geteuid()
    except PermissionError:
        return False
    except OSError:
        return None
    if any(variable.startswith(f"{LAUNCH}={run_id}:".encode()) for variable in variables):
        return True
    return None if ours and not any(map(_VARIABLE.match, variables)) else False


def find_launched(name: str) -> int | None:
    """Return the pid of our first process of the launch `name`, None when none lives."""
    import psutil

    processes = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(LAUNCH) == name and process.uids().real == os.getuid():
                processes[process.pid] = process.ppid()
        except (psutil.Error, OSError):  # gone, or another user's
            continue
    return min((pid for pid, parent in processes.items() if parent not in processes), default=None)


def forecast_tier(
    argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[str, str | None]:
    """Forecast how much of the job can be seen: `("T1", None)`, or `("T0", reason)`.

    Args:
        argv: the job's command line.
        environ: the environment it will get; `os.environ` by default.
    """
    environ = os.environ if environ is None else environ
    if is_disabled(environ):
        return "T0", "SUPERVISE_DISABLE is set"
    reason = _reason(list(argv), environ.get("PATH", os.defpath))
    return ("T1", None) if reason is None else ("T0", reason)


def inner_restarts(argv: Sequence[str]) -> int:
    """Return how often torchrun itself would start the ranks again, 0 where it would not.

    Source: `--max-restarts` of torch.distributed.run, 0 by default.
    """
    args = list(argv)
    for index, arg in enumerate(args):
        name, _, value = arg.partition("=")
        if name in ("--max-restarts", "--max_restarts"):
            value = value or "".join(args[index + 1 : index + 2])
            is_torchrun = any(re.search(r"torchrun|torch\.distributed", w) for w in args[:index])
            return int(value) if is_torchrun and value.isdecimal() else 0
    return 0


def _reason(argv: list[str], path: str, depth: int = 0) -> str | None:
    """Say why no probe can enter the process that `argv` starts, or None."""
    if not argv or depth > 4:
        return None
    name = Path(argv[0]).name
    if _PYTHON.match(name):
        return _python_flags(argv[1:])
    if name in _LAUNCHERS:
        return _behind_launcher(argv[1:])
    path_found = shutil.which(argv[0], path=path)
    if path_found is None:
        return None  # it cannot be started, which is another message
    shebang = _shebang(Path(path_found))
    if shebang:
        return _reason([*shebang, path_found, *argv[1:]], path, depth + 1)
    if any(_PYTHON.match(Path(arg).name) or arg.endswith(".py") for arg in argv[1:]):
        return _behind_launcher(argv[1:])
    return f"{name} is not Python"


def _behind_launcher(args: list[str]) -> str | None:
    for index, arg in enumerate(args):
        if _PYTHON.match(Path(arg).name):
            return _python_flags(args[index + 1 :])
    return None


def _python_flags(args: list[str]) -> str | None:
    """Walk over the interpreter's own options, up to the script, `-c` or `-m`."""
    remaining = iter(args)
    for arg in remaining:
        if not arg.startswith("-") or arg in ("-", "--"):
            return None
        if arg.startswith("--"):
            if arg == "--check-hash-based-pycs":
                next(remaining, None)
            continue
        for index, letter in enumerate(arg[1:], start=1):
            if letter in _KEEPS_OUT:
                return _KEEPS_OUT[letter]
            if letter in "cm":
                return None  # what follows belongs to the program
            if letter in "WX":
                if index == len(arg) - 1:
                    next(remaining, None)
                break
    return None


def _shebang(path: Path) -> list[str]:
    """Return the args of the `#!` line of `path`, without `env`; empty when there is none."""
    try:
        with os.fdopen(files.open_file(path, foreign=True), "rb") as file:
            head = file.read(512).decode("utf-8", "replace")
    except OSError:
        return []
    if not head.startswith("#!"):
        return []
    lines = head.splitlines()
    args = lines[0][2:].split()
    if args and Path(args[0]).name == "env":
        args = [arg for arg in args[1:] if arg != "-S" and "=" not in arg]
    # pip writes `#!/bin/sh` and `'''exec' "/a very long path/python" "$0" "$@"` on the second line
    if len(lines) > 1 and lines[1].startswith("'''exec'"):
        call = shlex.split(lines[1].removeprefix("'''exec'"))
        args = list(takewhile(lambda arg: arg != "$0", call))
    return args


DEFAULT = Path("/dev/shm")  # noqa: S108 - the kernel's tmpfs; the segments in it are private
LEAST_SLOTS = 256
SLOT_BYTES = 600  # a frame of 64 metrics, and its share of the rest
OWNER = "owner"  # locked by the supervisor while it lives
JOB = "job."  # before the pid of the job's first process
TRIES, WAIT_S = 4, 0.05  # to get the lock
LEAST_AGE_S = 3600.0  # younger directories are left alone, whatever they look like
SEGMENT = ".seg"
PROBE_FORMAT = wire.VERSION
_USER = re.compile(r"(?:rank-\d+|job)\.(\d+)(?:\.\d+)?(?:\.seg)?")


def shared_memory_base(environ: Mapping[str, str]) -> Path:
    """Return where shared memory is: `SUPERVISE_SHM`, else /dev/shm."""
    return Path(environ.get("SUPERVISE_SHM") or DEFAULT)


def make_environment(root: Path, run_id: str) -> Path:
    """Make the directory of a run, mode 0700, ours while this process lives. Raises OSError."""
    path = segment_directory(root, run_id)
    files.make_directory(path, exist_ok=False)
    lock_run_directory(path)
    return path


def segment_directory(root: Path, run_id: str) -> Path:
    """Return where the directory of a run is."""
    return root / f"supervise-{os.getuid()}-{run_id}"


def lock_run_directory(path: Path) -> None:
    """Mark a run's directory as ours while this process lives; another user's is left alone."""
    try:
        if not files.is_own_directory(path):
            return
        fd = files.open_file(path / OWNER, os.O_CREAT | os.O_WRONLY)
    except OSError:
        return  # a full /dev/shm: without the mark the directory is swept once it is old
    for _ in range(TRIES):  # `sweep` in another process holds a shared lock for a moment
        try:
            # It goes with the process, and is seen from other containers.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(WAIT_S)
        except OSError:
            return  # no locks on this file system


def mark_directory_owner(path: Path, pid: int) -> None:
    """Say whose directory it is: the job's, which may have no segment for long after its start."""
    with suppress(OSError):
        os.close(files.create_file(path / f"{JOB}{pid}"))


def fitting_slots(path: Path, slot_count: int) -> int:
    """Return how many frames a rank's segment may hold: `wanted`, fewer where memory is scarce.

    A container's /dev/shm of 64 MB belongs to the data workers first: a segment takes at most a
    32nd of what is free, and holds at least 256 frames.
    """
    try:
        free = os.statvfs(path)
    except OSError:
        return slot_count
    return max(LEAST_SLOTS, min(slot_count, free.f_bavail * free.f_frsize // 32 // SLOT_BYTES))


def remove_environment(path: Path) -> None:
    """Remove a run's directory: ours by name, owner and mark; what cannot be removed is left.

    While a process that writes there lives, all of it is: `sweep` removes it later.
    """
    with suppress(OSError):
        if not (path.name.startswith(f"supervise-{os.getuid()}-") and files.is_own_directory(path)):
            return
        if os.path.lexists(path / OWNER):
            _clear(path)
        else:  # whatever it was replaced by stays, but where a cleaner has only emptied it
            path.rmdir()


def _clear(path: Path) -> None:
    if not any(map(_in_use, path.iterdir())):
        shutil.rmtree(path, ignore_errors=True)


def sweep_environments(root: Path) -> list[Path]:
    """Remove directories of ours whose supervisor and jobs are all dead; return them."""
    removed = []
    for path in root.glob(f"supervise-{os.getuid()}-*"):
        try:
            if not files.is_own_directory(path):
                continue  # anybody may put anything into shared memory, a FIFO for instance
            pids = _users(path)
            old = time.time() - path.stat().st_mtime > LEAST_AGE_S
            if not old or files.is_locked(path / OWNER) or any(stat_fields(pid) for pid in pids):
                continue
            _clear(path)
        except OSError:  # no directory, not ours to look into, or just being removed
            continue
        removed.append(path)
    return removed


def _users(path: Path) -> list[int]:
    """Return the processes that made the files of a directory, by the names of the files."""
    return [int(match[1]) for file in path.iterdir() if (match := _USER.fullmatch(file.name))]


def _in_use(file: Path) -> bool:
    """Whether the process that a file is named after lives and, of a segment, may have written it.

    Anything can be planted under such a name, and pids are reused.
    """
    match = _USER.fullmatch(file.name)
    if match is None:
        return False
    pid = int(match[1])
    stat = stat_fields(pid) if pid > 1 else None
    lives = stat is not None and stat[STATE] not in (b"Z", b"X")
    return lives and (file.suffix != SEGMENT or _may_be_of(file, pid))


def _may_be_of(segment: Path, pid: int) -> bool:
    """Whether a segment is that of process `pid`; one that cannot be read may be."""
    try:
        if not stat.S_ISREG(segment.lstat().st_mode):
            return False
        header = _read_header(segment)
    except wire.VersionError:  # of the probe of another release
        return True
    except wire.WireError:
        return False
    except OSError:
        return True
    return header.pid == pid and header.start_ticks in (0, start_ticks(pid))


def _read_header(segment: Path) -> wire.Header:
    """Raises OSError, wire.WireError."""
    fd = files.open_file(segment)
    try:
        return wire.unpack_header(os.read(fd, wire.FIXED_SIZE))
    finally:
        os.close(fd)


def find_other_wire(path: Path) -> str:
    """Return what a living probe in a run's directory has that this version cannot read, or ""."""
    for segment in sorted(path.glob(f"*{SEGMENT}")):
        try:
            _read_header(segment)
        except wire.VersionError as error:
            if _in_use(segment):
                return f"segment {segment.name} {error}"
        except (wire.WireError, OSError):  # the poll tells of a broken segment
            continue
    return ""
