"""Index of the runs of this user: a link per run, named after its id, to its directory.

It lies in `$XDG_STATE_HOME/supervise/runs` and serves to find a run and nothing else: the target of
a link is checked as any other path that somebody types.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import StoreError
from . import files
from .run_directory import RunDir

MAX_RUNS = 1000  # the newest; the ids begin with the time


def add(run: RunDir, environ: Mapping[str, str]) -> None:
    """Make a run findable from everywhere. It never fails: a run does without."""
    with suppress(OSError):
        folder = _folder(environ)
        files.make_directory(folder)
        link = folder / run.id
        fresh = files.unpredictable(link)
        fresh.symlink_to(run.path)
        fresh.replace(link)
        for name in sorted(os.listdir(folder))[:-MAX_RUNS]:  # noqa: PTH208 - names alone
            (folder / name).unlink()


def entries(environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the directories by run id, the newest first, without a look at them."""
    directories = {}
    with suppress(OSError):
        folder = _folder(environ)
        for name in sorted(os.listdir(folder), reverse=True):  # noqa: PTH208 - names alone
            with suppress(OSError):  # not a link of ours
                directories[name] = (folder / name).readlink()
    return directories


def still_there(run_id: str, path: Path) -> bool:
    """Return whether a directory is still that of this run."""
    with suppress(StoreError):
        return RunDir.open(path).id == run_id
    return False


def _folder(environ: Mapping[str, str]) -> Path:
    """Return the directory of the index. Raises OSError where there is no home directory."""
    state = Path(environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # to be ignored by the specification
        home = Path(environ.get("HOME", ""))
        if not home.is_absolute():
            with suppress(KeyError):
                home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
        if not (home.is_absolute() and home.is_dir()):
            raise NotADirectoryError(f"there is no home directory {home}")
        state = home / ".local" / "state"
    return state / "supervise" / "runs"
