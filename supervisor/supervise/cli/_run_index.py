"""Where the runs of this user are: a link per run, named after its id, to its directory.

It lies beside the outbox, in `$XDG_STATE_HOME/supervise/runs`, and serves to find a run and nothing
else: what a link leads to is checked as any other path that somebody types.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import StoreError
from ..store import files
from ..store.late_page_spool import spool_directory
from ..store.run_directory import RunDir

KEPT = 1000  # newest runs; the ids begin with the time


def add(run: RunDir, environ: Mapping[str, str]) -> None:
    """Make a run findable from everywhere. It never fails: a run does without."""
    with suppress(StoreError, OSError):
        folder = _folder(environ)
        files.make_directory(folder)
        link = folder / run.id
        fresh = files.unpredictable(link)
        fresh.symlink_to(run.path)
        fresh.replace(link)
        for name in sorted(os.listdir(folder))[:-KEPT]:  # noqa: PTH208 - names alone
            (folder / name).unlink()


def entries(environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the directories by run id, the newest first. What is there now is not looked at."""
    found = {}
    with suppress(StoreError, OSError):
        folder = _folder(environ)
        for name in sorted(os.listdir(folder), reverse=True):  # noqa: PTH208 - names alone
            with suppress(OSError):  # not a link of ours
                found[name] = (folder / name).readlink()
    return found


def still_there(run_id: str, path: Path) -> bool:
    """Whether a directory is still that of this run."""
    with suppress(StoreError):
        return RunDir.open(path).id == run_id
    return False


def _folder(environ: Mapping[str, str]) -> Path:
    return spool_directory(environ).parent / "runs"
