"""The manifest of a checkpoint: code, packages, command, data and randomness that produced it.

The code is read once, when the run begins: later edits are not part of the run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import children
from ..store import files
from .registry import Entry

GIT_S = 20.0
PIECE = 1 << 24  # bytes


def code(cwd: Path, argv: Sequence[str]) -> dict[str, Any]:
    """Return the commit of the job's directory and the SHA-256 of its uncommitted diff.

    Untracked files are left out. Without git, or outside a repository: the SHA-256 of each Python
    file that the command names.
    """
    commit = _git(cwd, "rev-parse", "HEAD")
    diff = None
    if commit is not None:
        diff = _git(cwd, "diff", "HEAD", "--no-ext-diff", "--binary")
    if commit is None or diff is None:
        return {"files": inputs([name for name in argv if name.endswith(".py")], cwd)}
    changed = "sha256:" + hashlib.sha256(diff).hexdigest() if diff else None
    return {"commit": commit.decode("ascii", "replace").strip(), "diff": changed}


def _git(cwd: Path, *args: str) -> bytes | None:
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # the job may use git at the same time
    try:
        done = children.run(["git", *args], within_s=GIT_S, env=environ, cwd=cwd)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def inputs(paths: Sequence[str], cwd: Path) -> dict[str, str | None]:
    """Return the SHA-256 of each file, None for one that cannot be read."""
    found: dict[str, str | None] = {}
    for name in paths:
        sha = hashlib.sha256()
        try:
            with os.fdopen(files.open_file(cwd / name, foreign=True), "rb") as file:
                while piece := file.read(PIECE):
                    sha.update(piece)
            found[name] = "sha256:" + sha.hexdigest()
        except OSError:
            found[name] = None
    return found


def describe(
    entry: Entry,
    facts: Mapping[str, Any],
    code: Mapping[str, Any],
    environment: Mapping[str, Any],
    inputs: Mapping[str, str | None],
) -> dict[str, Any]:
    """Return the manifest of a checkpoint, JSON-ready.

    Args:
        facts: of the run: its command, its policy.
    """
    return {
        "checkpoint": {
            "id": entry.id,
            "path": entry.path,
            "step": entry.step,
            "attempt": entry.attempt,
            "saved": entry.saved,
            "verified": entry.verified,
            "bytes": entry.bytes,
            "files": entry.files,
        },
        **facts,
        "code": code,
        "environment": environment,
        "inputs": inputs,
        "rng": "random states are in the checkpoint" if entry.rng else "no random states",
        "metrics": entry.values,
    }
