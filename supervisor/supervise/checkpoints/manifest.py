"""The manifest of a checkpoint: code, packages, command, data and randomness that produced it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..store import files
from .registry import Entry

PIECE = 1 << 24  # bytes


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
        code: its version at the first launch: later edits are not part of the run.
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
