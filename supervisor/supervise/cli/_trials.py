"""Shared parts of the commands that make trials: their directory, and the policy of their runs."""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .. import system
from ..errors import StoreError, SuperviseError, UsageError
from ..store import files
from ..store.run_directory import RUNS

if TYPE_CHECKING:
    from ..catalog.loader import Isolated

SCRATCH, POLICY = "scratch", "policy.yaml"


@contextmanager
def errors_without_verdict(verdicts: Collection[int]) -> Iterator[None]:
    """Give errors an exit code that is no verdict; a broken gate must not look like one.

    Args:
        verdicts: exit codes that mean something else.
    """
    try:
        yield
    except SuperviseError as error:
        if error.exit_code not in verdicts:
            raise
        raise SuperviseError(str(error), hint=error.hint) from error
    except (click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None:  # standard output, see `Commands`
            raise
        traceback.print_exc()
        text = f"the runs could not be judged: {type(error).__name__}: {error}"
        raise SuperviseError(text) from error


def trial_directory(directory: Path | None, sort: str) -> Path:
    """Return the directory of a trial: the one given, else `runs/SORT-<time>-<id>`."""
    stamp = system.wall_time()[:19].replace("-", "").replace(":", "").replace("T", "-")
    return (directory or RUNS / f"{sort}-{stamp}-{secrets.token_hex(3)}").absolute()


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
        files.replace_file(path, policy.text.encode(), durable=True)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    return path
