"""Words of operators, left as files in the run directory by other processes.

A file `control/<time>-<pid>.json` holds `{"word", "operator", "args"}`. It is written aside and
renamed, taken in the order of its name, and removed once taken. The run directory's permissions
say who may speak.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.values import Told

DIRECTORY = "control"


def post(run: Path, word: str, operator: str, args: Mapping[str, Any], *, at_ns: int) -> Path:
    """Leave a word for the supervisor of `run`. Raises OSError."""
    directory = run / DIRECTORY
    directory.mkdir(exist_ok=True)
    path = directory / f"{at_ns:020d}-{os.getpid()}.json"
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps({"word": word, "operator": operator, "args": dict(args)}))
    aside.rename(path)
    return path


class Words:
    """Reads the words left for one run."""

    def __init__(self, run: Path, clock: Callable[[], int]) -> None:
        self._directory = run / DIRECTORY
        self._clock = clock

    def poll(self) -> list[Told]:
        """Return the words that came since the last call; what is no word of ours is dropped."""
        try:
            paths = sorted(self._directory.glob("*.json"))
        except OSError:
            return []
        found = []
        for path in paths:
            try:
                said = json.loads(path.read_bytes())
                path.unlink()
                found.append(
                    Told(
                        self._clock(), str(said["operator"]), str(said["word"]), dict(said["args"])
                    )
                )
            except (OSError, ValueError, KeyError, TypeError):
                path.unlink(missing_ok=True)
        return found
