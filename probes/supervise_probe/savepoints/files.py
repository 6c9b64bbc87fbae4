"""The file of a probe batch: complete or absent, with its hash beside it."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Callable, Dict

from ..runtime import files

HASH = ".sha256"
PIECE = 1 << 20  # bytes that are hashed at a time


class _HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self.hash.update(view)
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()


def write(save: Callable[..., Any], document: Dict[str, Any], path: str) -> None:
    """Write a file that is complete or absent, and its hash beside it.

    Raises:
        OSError, RuntimeError: it cannot be written; the previous file is still there.
    """
    files.make_directory(os.path.dirname(path))
    with files.replacing(path, sync=True) as file:
        out = _HashedFile(file)
        save(document, out)
        with files.replacing(path + HASH, sync=True) as beside:
            beside.write(f"{out.hash.hexdigest()}  {os.path.basename(path)}\n".encode())


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
        raise ValueError("it is not a probe batch")
    return document


def _hash(path: str) -> str:
    digest = hashlib.sha256()
    with os.fdopen(files.open_file(path), "rb") as file:
        while True:
            piece = file.read(PIECE)
            if not piece:
                return digest.hexdigest()
            digest.update(piece)
