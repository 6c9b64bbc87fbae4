"""Writes of an arm outside its own directory, as far as they can be seen without privileges.

Two looks, neither of them complete: which files its processes have open for writing, again and
again, and which files of the working directory are other ones after it than before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

SYSTEM = ("/dev", "/proc", "/sys", "/run")
MAX_FILES = 20_000  # of a working directory that are compared; more would delay the arm
NOT_COMPARED = frozenset({"__pycache__", "node_modules"})  # and all whose name begins with a dot


def harmless(environ: dict[str, str], *own: Path) -> tuple[str, ...]:
    """Return the directories that an arm may write to: its own, caches, and the temporary one."""
    home = Path(environ.get("HOME") or "/")
    caches = [
        environ.get("XDG_CACHE_HOME") or str(home / ".cache"),
        environ.get("XDG_STATE_HOME") or str(home / ".local" / "state"),
        *(str(home / name) for name in (".triton", ".nv", ".config/matplotlib")),
        tempfile.gettempdir(),
    ]
    return tuple(os.path.realpath(one) for one in (*SYSTEM, *caches, *map(str, own)))


def is_inside(path: str, directories: Iterable[str]) -> bool:
    """Return whether a path is one of the directories or below one."""
    return any(path == one or path.startswith(one.rstrip("/") + "/") for one in directories)


def open_for_writing(pids: Sequence[int]) -> Iterator[str]:
    """Yield the paths of regular files that processes have open for writing."""
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        with suppress(OSError):  # it has ended, or is another user's
            for name in os.listdir(folder):  # noqa: PTH208 - a Path for each costs more
                with suppress(OSError, ValueError, IndexError):
                    path = os.readlink(f"{folder}/{name}")  # noqa: PTH115 - likewise
                    if path.startswith("/") and _is_written(pid, name) and os.path.isfile(path):  # noqa: PTH113
                        yield path


def _is_written(pid: int, name: str) -> bool:
    text = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
    flags = int(text.partition("flags:")[2].split()[0], 8)
    return flags & os.O_ACCMODE != os.O_RDONLY


def fingerprint(directory: Path, skipped: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return `(time of change in ns, bytes)` of the files below a directory; {} for too many."""
    found: dict[str, tuple[int, int]] = {}
    for folder, names, files in os.walk(directory):
        names[:] = [
            name
            for name in names
            if not name.startswith(".")
            and name not in NOT_COMPARED
            and not is_inside(os.path.realpath(f"{folder}/{name}"), skipped)
        ]
        for name in files:
            with suppress(OSError):
                status = os.stat(f"{folder}/{name}")  # noqa: PTH116 - thousands of them
                found[f"{folder}/{name}"] = status.st_mtime_ns, status.st_size
        if len(found) > MAX_FILES:
            return {}
    return found


def changed(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    """Return which files are new or other ones; nothing where one of both is not known."""
    if not before or not after:
        return []
    return sorted(path for path, about in after.items() if before.get(path) != about)
