"""Frees the disk space of runs that are over: what only a run that goes on needs goes first.

    1. savepoints/   state for a relaunch        3. output/      what the job printed (--logs)
    2. journal/      for replay and export       4. incidents/   evidence bundles

All else stays: the audit log, which `why`, `status` and `audit verify` read, the policies, and
pinned checkpoints, which may be the only copy. `retention.json` says what was removed; it is on
disk before anything is. A run is left alone while its supervisor or its job lives, while its
supervisor is dead and an incident is open, or where it cannot be known.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import MISSHAPEN, StoreError
from . import files
from .audit import read
from .journal import RETENTION
from .run_directory import RunDir, is_run

PARTS = ("savepoints", "journal", "output", "incidents")  # in the order of removal


@dataclass(frozen=True, slots=True)
class Part:
    """One directory of a run, and what its removal frees."""

    name: str
    files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What retention finds of one run.

    Attributes:
        age_s: since its last record.
        kept: why nothing is removed, "" where `parts` may be.
    """

    path: Path
    age_s: float
    kept: str = ""
    parts: tuple[Part, ...] = field(default=())


def survey(
    directory: Path,
    *,
    now_s: float,
    older_than_s: float,
    keep: int,
    host: str,
    lives: Callable[[RunDir], bool],
) -> list[Survey]:
    """Return all runs in a directory, the newest first.

    Args:
        now_s: time since the epoch.
        older_than_s: since the last record of a run that is over.
        keep: the newest runs that are left whole, whatever their age.
        host: this machine's name; a job on another one cannot be looked at.
        lives: whether the job of a run lives.

    Raises:
        StoreError: the directory cannot be read.
    """
    found = []
    for rank, (age_s, path) in enumerate(sorted(_ages(directory, now_s))):
        why = f"one of the newest {keep}" if rank < keep else ""
        why = why or ("" if age_s >= older_than_s else "not old enough")
        why = why or _why_kept(path, host, lives)
        parts = () if why else tuple(_parts(path))
        found.append(Survey(path, age_s, why or ("" if parts else "nothing to remove"), parts))
    return found


def remove(path: Path, parts: tuple[Part, ...], wall: str) -> None:
    """Remove these parts of a run, as its only writer.

    Raises:
        StoreError: a supervisor has taken the run over, or it cannot be written.
    """
    run = RunDir.open(path)
    try:
        fd = files.open_file(run.audit_path, os.O_RDWR)
        try:
            files.take(fd, run.audit_path)
            known = run.read_json(RETENTION) if (path / RETENTION).exists() else {}
            rows = [
                {"part": p.name, "files": p.files, "bytes": p.size_bytes, "wall": wall}
                for p in parts
            ]
            run.write_json(RETENTION, {"removed": [*known.get("removed", []), *rows]}, durable=True)
            for part in parts:
                shutil.rmtree(path / part.name)
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreError(f"cannot remove from {path}: {error.strerror}") from error
    except MISSHAPEN as error:
        raise StoreError(f"{path / RETENTION} is damaged", hint="remove this file") from error


def removed(run: RunDir) -> dict[str, str]:
    """Return the parts that were removed, and when; empty where none was, or nobody knows."""
    try:
        rows = run.read_json(RETENTION)["removed"]
        return {str(row["part"]): str(row["wall"]) for row in rows}
    except (StoreError, *MISSHAPEN):
        return {}


def _ages(directory: Path, now_s: float) -> Iterator[tuple[float, Path]]:
    try:
        for path in directory.iterdir():
            if is_run(path):
                log = path / "audit.log"
                newest = log if log.exists() else path / "run.json"
                yield now_s - newest.stat().st_mtime, path
    except OSError as error:
        raise StoreError(f"cannot read {directory}: {error.strerror}") from error


def _why_kept(path: Path, host: str, lives: Callable[[RunDir], bool]) -> str:
    """Return why a run must be left alone, "" if it is over."""
    if path.is_symlink():
        return "a symbolic link to another run"
    try:
        run = RunDir.open(path)
        if not files.is_own_directory(path):
            return "belongs to another user"
        if not run.audit_path.exists():
            return "has no audit log"
        if files.locked(run.audit_path):
            return "is watched"
        ended, open_incident = _end(run)
        if not ended and run.read_json("run.json")["host"] != host:
            return "did not end, on another machine"
        if not ended and open_incident:
            return f"its supervisor died with {open_incident} open: `supervise adopt` ends it"
        if lives(run):
            return "its job lives"
    except StoreError as error:
        return f"cannot be read: {error}"
    except (OSError, *MISSHAPEN) as error:
        return f"cannot be read: {type(error).__name__}"
    return ""


def _end(run: RunDir) -> tuple[bool, str]:
    """Return whether the run ended, and the incident that was open in its last record."""
    ended, open_incident = False, ""
    for record in read(run.audit_path):
        ended = record["kind"] == "run_end"
        if record["kind"] == "incident":
            what = (record.get("data") or {}).get("what")
            open_incident = str(record["incident"]) if what == "opened" else open_incident
            open_incident = "" if what == "closed" else open_incident
    return ended, open_incident


def _parts(path: Path) -> Iterator[Part]:
    for name in PARTS:
        part = path / name
        if part.is_symlink() or not part.is_dir():
            continue
        sizes = [file.lstat().st_blocks * 512 for file in part.rglob("*") if not file.is_dir()]
        if sizes:
            yield Part(name, len(sizes), sum(sizes))
