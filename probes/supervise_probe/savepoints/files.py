"""The files of savepoints for another process: whole or not there, and never more than are wanted.

Rule: who is told to stop leaves torch within a piece, since a thread that is inside it while Python
goes away takes the process with it. Only a disk that does not take one piece can still hold it.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Callable, Dict

from ..runtime import files

PREFIX, SUFFIX, NEW, HASH = "savepoint-", ".pt", ".new", ".sha256"
PIECE = 1 << 20  # bytes that are written or hashed at a time


class Stopped(Exception):  # noqa: N818 (nothing went wrong)
    """The writing was called off."""


class _Out:
    """A file that is hashed on its way to the disk, until `stopped` says so."""

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
    """Write a file that is whole or not there, and its hash beside it.

    Raises:
        Stopped: `stopped` returned true before all was written.
        OSError, RuntimeError: the disk does not take it.
        What was there before is still there then.
    """
    files.make_directory(os.path.dirname(path))
    new = f"{NEW}.{files.token()}"
    try:
        with os.fdopen(files.create(path + new), "wb") as file:
            out = _Out(file, stopped)
            try:
                save(document, out)
            except RuntimeError:  # what torch makes of it, in the middle of a record
                if stopped():
                    raise Stopped from None
                raise
        with os.fdopen(files.create(path + HASH + new), "w", encoding="ascii") as file:
            file.write(f"{out.hash.hexdigest()}  {os.path.basename(path)}\n")
        for name in (path + HASH, path):
            descriptor = files.open_file(name + new)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(name + new, name)
    except BaseException:
        for name in (path + HASH + new, path + new):
            if os.path.exists(name):
                os.unlink(name)
        raise


def keep_newest(directory: str, keep: int) -> None:
    """Remove all savepoints of a directory but the `keep` of the highest steps; half ones too."""
    names = [name for name in os.listdir(directory) if name.startswith(PREFIX)]
    whole = sorted(name for name in names if name.endswith(SUFFIX))
    stay = {kept + end for kept in whole[-max(1, keep) :] for end in ("", HASH)}
    for name in names:
        if name not in stay:
            os.unlink(os.path.join(directory, name))


def remove_behind(directory: str, step: int) -> None:
    """Remove the savepoints of steps behind `step`, if the directory is there."""
    if not os.path.isdir(directory):
        return
    last = os.path.basename(path_of(directory, step))
    for name in os.listdir(directory):
        whole = name[: -len(HASH)] if name.endswith(HASH) else name
        if whole.startswith(PREFIX) and whole.endswith(SUFFIX) and whole > last:
            os.unlink(os.path.join(directory, name))


def path_of(directory: str, step: int) -> str:
    """Return where the savepoint of a step is; names sort as steps do."""
    return os.path.join(directory, f"{PREFIX}{step:09d}{SUFFIX}")


def read(load: Callable[..., Any], path: str) -> Dict[str, Any]:
    """Return the document in a file.

    Raises:
        OSError, ValueError: it cannot be read, or is not what was written.
    """
    if os.path.exists(path + HASH):
        told = files.read(path + HASH).decode("ascii").split()
        if not told or told[0] != _hash(path):
            raise ValueError("its hash is another than the one beside it")
    os.close(files.open_file(path))  # torch would wait at a FIFO
    document = load(path, map_location="cpu", weights_only=True)
    if not isinstance(document, dict) or "what" not in document:
        raise ValueError("it is no savepoint")
    return document


def _hash(path: str) -> str:
    found = hashlib.sha256()
    with os.fdopen(files.open_file(path), "rb") as file:
        while True:
            piece = file.read(PIECE)
            if not piece:
                return found.hexdigest()
            found.update(piece)
