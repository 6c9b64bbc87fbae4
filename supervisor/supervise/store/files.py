"""Files that survive a power cut: written whole, or not at all.

A new name is only safe after an fsync of its directory; the bytes only after an fsync of the file.
"""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Make the names in the directory `path` survive a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def gone(path: Path, known: os.stat_result) -> str | None:
    """Say that `path` is not the file any more that was opened; None: it is, or nobody can tell."""
    try:
        if os.path.samestat(path.stat(), known):
            return None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:
        return None
    return f"{path} is gone: it was removed, moved or replaced"


def replace(path: Path, data: bytes, *, durable: bool, mode: int = 0o666) -> None:
    """Write `path` atomically: a reader sees the old bytes or the new ones, never a mixture.

    Args:
        durable: also survive a power cut (two fsyncs, milliseconds); else only a killed process.
        mode: of the file, less the umask.

    Raises:
        OSError: nothing was changed.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)
