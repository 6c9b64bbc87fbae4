"""New records of an audit log, as they are written."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..store import files

HIDDEN = frozenset({"rule", "near_miss", "rebaseline", "notify_intent", "notify_result"})


class LogTail:
    """Reads what was appended since the last call; verification is left to `audit verify`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the complete new records; none while there is no log. Raises StoreError."""
        try:
            with os.fdopen(files.open_file(self._path), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._offset:  # a truncated last record was removed
                    self._offset = size
                file.seek(self._offset)
                whole, end, _ = file.read(size - self._offset).rpartition(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}") from error
        self._offset += len(whole) + len(end)
        found = []
        for line in whole.split(b"\n") if end else ():
            with suppress(ValueError, RecursionError):
                record = json.loads(line[65:])
                found += [record] if isinstance(record, dict) else []
        return found


def event_line(record: dict[str, Any]) -> str:
    """Return a record as one line: time in UTC, step, severity, incident, kind, reason."""
    wall = str(record.get("wall"))
    marks = [str(record[key]) for key in ("severity", "incident") if record.get(key)]
    step = record.get("step", -1)
    where = f"step {step}" if isinstance(step, int) and step >= 0 else "-"
    head = f"{wall[5:10]} {wall[11:19]}Z  {where:<11}  {record.get('kind')!s:<10}"
    return f"{head}  {' '.join([*marks, str(record.get('reason', ''))])}".rstrip()
