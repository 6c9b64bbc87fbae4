"""Words of operators, left as files in the run directory by other processes.

A file `control/<time>-<pid>.json` holds `{"command", "operator", "args"}`. It is written aside and
renamed, taken in the order of its name, and removed once taken. The run directory's permissions
say who may speak.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..core.model.events import OperatorCommand
from ..store import files
from .directory_change import DirectoryChange

DIRECTORY = "control"
MAX_BYTES = 64 << 10  # of one command; a list of thousands of shards fits


def post(run: Path, command: str, operator: str, args: Mapping[str, Any], *, at_ns: int) -> Path:
    """Post a command to the supervisor of `run`. Raises OSError."""
    directory = run / DIRECTORY
    files.make_directory(directory)
    path = directory / f"{at_ns:020d}-{os.getpid()}.json"
    text = json.dumps({"command": command, "operator": operator, "args": dict(args)})
    files.replace(path, text.encode(), durable=False)
    return path


class ControlInbox:
    """Reads the words left for one run.

    A command's file stays until the next poll, when it is in the journal: a supervisor that dies in
    between loses none. The one after it knows by their keys which words were taken.

    Args:
        received: `args["key"]` of the commands that an earlier supervisor processed.
    """

    def __init__(self, run: Path, clock: Callable[[], int], received: Collection[str] = ()) -> None:
        self._directory = run / DIRECTORY
        self._clock = clock
        self._received = frozenset(received)
        self._taken: set[Path] = set()
        self._change = DirectoryChange(self._directory)

    def poll(self) -> list[OperatorCommand]:
        """Return the commands since the last call; files that hold none are dropped."""
        if not self._taken and not self._change.due(self._clock()):
            return []
        try:
            paths = sorted(self._directory.glob("*.json"))
        except OSError:
            return []
        found = []
        for path in paths:
            try:
                if path in self._taken:
                    path.unlink()
                    self._taken.remove(path)
                    continue
                self._taken.add(path)
                raw = files.read(path, limit=MAX_BYTES)
                content = json.loads(raw, parse_constant=_refuse)
                args = {key: _flat(value) for key, value in content["args"].items()}
                if args.get("key") not in self._received:
                    found.append(
                        OperatorCommand(
                            self._clock(), str(content["operator"]), str(content["command"]), args
                        )
                    )
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue  # not a command, or already removed
        return found


def _flat(value: Any) -> Any:
    """Return an argument, which is a value or a list of values."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, list | dict):
            raise TypeError(each)
    return value


def _refuse(constant: str) -> float:
    """NaN and infinities are no JSON."""
    raise ValueError(constant)
