"""Facts about the environment of a run: code, host, processes, logs. Reads only.

Functions leave out what they cannot read, or describe it in a sentence, since a broken tool must
not cost an incident its other evidence.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from .. import children
from ..store import files

TOOL_S = 5.0  # time limit of an external tool
TAIL_BYTES = 64 * 1024
DIRTY_FILES = 200


def run_tool(argv: Sequence[str], timeout_s: float = TOOL_S, cwd: Path | None = None) -> bytes:
    """Run an external tool and return its stdout.

    Raises:
        OSError: it is not installed, failed, or took longer than `timeout_s`.
    """
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    environ.pop("PYTHONPATH", None)
    try:
        done = children.run(argv, within_s=timeout_s, env=environ, cwd=cwd)
    except subprocess.TimeoutExpired:
        raise OSError(f"{argv[0]} took longer than {timeout_s:g} s") from None
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        why = lines[-1] if lines else f"exit code {done.returncode}"
        raise OSError(f"{Path(argv[0]).name}: {why}")
    return done.stdout


def git(directory: Path) -> dict[str, Any]:
    """Return the version of the code in `directory`: commit, branch, dirty files, hash of the diff.

    The diff itself is left out: it may contain secrets. Its SHA-256 shows whether two runs had the
    same one.
    """
    base = ["git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false"]
    try:
        head = run_tool([*base, "rev-parse", "HEAD", "--abbrev-ref", "HEAD"], cwd=directory)
        status = run_tool([*base, "status", "--porcelain"], cwd=directory)
        dirty = status.decode("utf-8", "replace").splitlines()
        diff = b""
        if any(not line.startswith("??") for line in dirty):
            diff = run_tool(
                [*base, "diff", "--no-ext-diff", "--no-textconv", "HEAD"], cwd=directory
            )
    except OSError as error:
        return {"missing": str(error)}
    commit, _, branch = head.decode("utf-8", "replace").strip().partition("\n")
    return {
        "commit": commit,
        "branch": branch,
        "dirty": dirty[:DIRTY_FILES],
        "dirty_count": len(dirty),
        "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
    }


def host(*disks: Path) -> dict[str, Any]:
    """Return the machine and its load; sizes in bytes."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    space: dict[str, dict[str, Any]] = {}
    for disk in disks:
        try:
            usage = psutil.disk_usage(str(disk))
            space[str(disk)] = {"total": usage.total, "free": usage.free}
        except OSError as error:
            space[str(disk)] = {"missing": str(error)}
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "supervisor_python": sys.version.split()[0],
        "cpus": psutil.cpu_count(),
        "load": list(os.getloadavg()),
        "memory": {"total": memory.total, "available": memory.available},
        "swap": {"total": swap.total, "used": swap.used},
        "disks": space,
        "up_s": round(time.time() - psutil.boot_time()),
    }


def processes(members: Sequence[psutil.Process]) -> list[dict[str, Any]]:
    """Return one row per process of the job; memory in bytes, CPU time in seconds."""
    rows = []
    for process in members:
        try:
            with process.oneshot():
                times = process.cpu_times()
                rows.append(
                    {
                        "pid": process.pid,
                        "parent": process.ppid(),
                        "command": process.cmdline(),
                        "state": process.status(),
                        "threads": process.num_threads(),
                        "rss": process.memory_info().rss,
                        "cpu_s": times.user + times.system,
                    }
                )
        except (psutil.Error, OSError):
            continue
    return rows


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that process `pid` was started with; empty if unreadable."""
    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return {}


def output_files(pid: int) -> dict[str, Path]:
    """Return the regular files that stdout and stderr of a process go to.

    Returns:
        Their names, and the paths to read them by: below /proc, which also reaches a rotated file.
    """
    found: dict[str, Path] = {}
    for number in (1, 2):
        link = Path(f"/proc/{pid}/fd/{number}")
        try:
            if stat.S_ISREG(link.stat().st_mode):
                found.setdefault(str(link.readlink()).removesuffix(" (deleted)"), link)
        except OSError:
            continue
    return found


def tail(path: Path, limit: int = TAIL_BYTES) -> str:
    """Return the last `limit` bytes of a file as text, from a line's beginning.

    Raises:
        OSError: it cannot be read.
    """
    with os.fdopen(files.open_file(path, foreign=True), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - limit))
        data = file.read(limit)
    if size > limit:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace")
