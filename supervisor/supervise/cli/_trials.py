"""What the commands that make trials share: their directory, and the policy of their runs."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import StoreError, UsageError
from ..inputs import clock
from ..store import files
from ..store.run_directory import RUNS

if TYPE_CHECKING:
    from ..catalog.assembly.isolated import Isolated

SCRATCH, POLICY = "scratch", "policy.yaml"


def place_of(given: Path | None, sort: str) -> Path:
    """Return the directory of a trial: the one given, else `runs/SORT-<time>-<id>`."""
    stamp = clock.wall()[:19].replace("-", "").replace(":", "").replace("T", "-")
    return (given or RUNS / f"{sort}-{stamp}-{secrets.token_hex(3)}").absolute()


def make_empty(path: Path) -> Path:
    """Make a directory. Raises UsageError: it holds something; StoreError: it cannot be made."""
    try:
        if path.exists() and any(path.iterdir()):
            raise UsageError(f"{path} is not empty", hint="choose another one with --dir DIR")
        path.parent.mkdir(parents=True, exist_ok=True)
        files.make_directory(path)
    except OSError as error:
        raise StoreError(f"cannot make {path}: {error.strerror}") from error
    return path


def write_policy(directory: Path, policy: Isolated) -> Path:
    """Write the policy of the runs of a trial, and return its file. Raises StoreError."""
    path = directory / POLICY
    try:
        files.replace(path, policy.text.encode(), durable=True)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    return path
