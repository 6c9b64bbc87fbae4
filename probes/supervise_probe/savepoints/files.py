"""The files of savepoints for another process: complete or absent, and a limited number of them.

Rule: a writer that is stopped leaves torch within one piece, since a thread inside torch while
Python shuts down crashes the process. Only a disk that hangs on one piece can delay that.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Callable, Dict

from ..runtime import files

PREFIX, SUFFIX, HASH = "savepoint-", ".pt", ".sha256"
PIECE = 1 << 20  # bytes that are written or hashed at a time


class Stopped(Exception):  # noqa: N818 (not an error)
    """The writing was cancelled."""


class _Out:
    """A file that is hashed while it is written, until `stopped` returns true."""

    def __init__(self, file: Any, stopped: Callable[[], bool]) -> None:
        self._file = file
        self._stopped = stopped
        self.hash = hashlib.sha256()

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        for start in range(0, len(view), PIECE):
            if self._stopped():
                raise Stopped
            piece = view[start : start + PIECE]
            self.hash.update(piece)
            self._file.write(piece)
        return len(view)

    def flush(self) -> None:
        self._file.flush()


def write(
    save: Callable[..., Any], document: Dict[str, Any], path: str, stopped: Callable[[], bool]
) -> None:
    """Write a file that is complete or absent, and its hash beside it.

    Raises:
        Stopped: `stopped` returned true before all was written.
        OSError, RuntimeError: it cannot be written.
        After an error the previous file is still there.
    """
    files.make_directory(os.path.dirname(path))
    with files.replacing(path, sync=True) as file:
        out = _Out(file, stopped)
        try:
            save(document, out)
        except RuntimeError:  # torch wraps the exception, in the middle of a record
            if stopped():
                raise Stopped from None
            raise
        with files.replacing(path + HASH, sync=True) as beside:
            beside.write(f"{out.hash.hexdigest()}  {os.path.basename(path)}\n".encode())


def keep_newest(directory: str, keep: int) -> None:
    """Remove all savepoints of a directory but the newest `keep`; incomplete ones too."""
    names = [name for name in os.listdir(directory) if name.lstrip(".").startswith(PREFIX)]
    whole = sorted(n for n in names if n.startswith(PREFIX) and n.endswith(SUFFIX))
    stay = {kept + end for kept in whole[-max(1, keep) :] for end in ("", HASH)}
    for name in names:
        if name not in stay:
            os.unlink(os.path.join(directory, name))


def remove_after(directory: str, step: int) -> None:
    """Remove the savepoints of steps after `step`, if the directory exists."""
    if not os.path.isdir(directory):
        return
    last = os.path.basename(path_of(directory, step))
    for name in os.listdir(directory):
        whole = name[: -len(HASH)] if name.endswith(HASH) else name
        if whole.startswith(PREFIX) and whole.endswith(SUFFIX) and whole > last:
            os.unlink(os.path.join(directory, name))


def path_of(directory: str, step: int) -> str:
    """Return the path of the savepoint of a step; names sort as steps do."""
    return os.path.join(directory, f"{PREFIX}{step:09d}{SUFFIX}")


def read(load: Callable[..., Any], path: str) -> Dict[str, Any]:
    """Return the document in a file.

    Raises:
        OSError, ValueError: it cannot be read, or differs from what was written.
    """
    if os.path.exists(path + HASH):
        expected = files.read(path + HASH).decode("ascii").split()
        if not expected or expected[0] != _hash(path):
            raise ValueError("its hash differs from the one beside it")
    os.close(files.open_file(path))  # refuses a FIFO, at which torch would wait
    document = load(path, map_location="cpu", weights_only=True)
    if not isinstance(document, dict) or "what" not in document:
        raise ValueError("it is not a savepoint")
    return document


def _hash(path: str) -> str:
    found = hashlib.sha256()
    with os.fdopen(files.open_file(path), "rb") as file:
        while True:
            piece = file.read(PIECE)
            if not piece:
                return found.hexdigest()
            found.update(piece)
