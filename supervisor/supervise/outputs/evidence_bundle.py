"""A bundle of files in the making, and its manifest.

The manifest lists every file with size and SHA-256, what was redacted, and what is missing and why.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from ..core.model.redaction import Redactor
from ..store import files

T = TypeVar("T")

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SHARDS = "shards.json"


class Bundle:
    """A bundle in the making.

    Args:
        path: its directory, empty.
        deadline_s: how long it may take.
        redactor: knows the secrets of the job.

    Attributes:
        redactor: what all that is written goes through; and what it has emptied here.
    """

    def __init__(self, path: Path, deadline_s: float, redactor: Redactor) -> None:
        self.path = path
        self.redactor = redactor.fresh()
        self._missing: list[dict[str, str]] = []
        self._end = time.monotonic() + deadline_s

    def left_s(self) -> float:
        """Return the seconds left until the deadline."""
        return max(0.0, self._end - time.monotonic())

    def missing(self, what: str, why: str) -> None:
        """Note what could not be had."""
        self._missing.append({"what": what, "why": why})

    def source(self, what: str, get: Callable[[], T]) -> T | None:
        """Return what `get` finds; note what it does not."""
        try:
            return get()
        except Exception as error:  # one broken source must not cost the others
            _log.warning("evidence without %s", what, exc_info=True)
            self.missing(what, str(error) or type(error).__name__)
            return None

    def text(self, name: str, text: str) -> None:
        """Write one file without secrets, down to the disk."""
        self._write(name, self.redactor.text(text))

    def json(self, name: str, document: Any) -> None:
        """Write one JSON file without secrets."""
        plain = json.loads(json.dumps(document, default=str))
        self._write(name, json.dumps(self.redactor.tree(plain), indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        fd = files.create(self.path / name)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def clean(self, name: str) -> None:
        """Take the secrets out of a file that the probe has written here."""
        path = self.path / name
        text = files.read(path).decode("utf-8", "replace")
        path.unlink()
        try:
            self.json(name, json.loads(text))
        except ValueError:  # no JSON
            self.text(name, text)

    def seal(self, incident: str, key: str) -> None:
        """Write the manifest over all files that are there."""
        files = [
            {"name": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(self.path.iterdir())
            if path.is_file()
        ]
        manifest = {
            "version": 1,
            "incident": incident,
            "key": key,
            "made": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "files": files,
            "missing": self._missing,
            "redacted": self.redactor.names,
        }
        self.json(MANIFEST, manifest)


def described(manifest: Path) -> dict[str, Any]:
    """Return what the audit log keeps of a sealed bundle."""
    content = json.loads(files.read(manifest))
    size = manifest.stat().st_size + sum(file["bytes"] for file in content["files"])
    traced = manifest.parent / SHARDS
    shards = json.loads(files.read(traced))["shards"] if traced.exists() else {}
    return {
        "path": "/".join(manifest.parent.parts[-3:]),
        "sha256": _sha256(manifest),
        "bytes": size,
        "files": [file["name"] for file in content["files"]],
        "missing": [gap["what"] for gap in content["missing"]],
        **({"shards": shards} if shards else {}),
    }


def _sha256(path: Path) -> str:
    with os.fdopen(files.open_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
