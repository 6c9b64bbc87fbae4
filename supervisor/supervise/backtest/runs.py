"""Our own run directories as recordings for a back-test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..core.model.events import Event, Finished, OperatorCommand
from ..errors import InputError, StoreError
from ..recordings.table import Table
from ..store import journal
from ..store.run_directory import RunDir

NAME = "run"


class Runs:
    """Claims run directories; what is in them is read by `events`, not as a sheet."""

    def claims(self, path: Path) -> bool:
        """Return whether this is a run directory."""
        return path.is_dir() and (path / "run.json").is_file()

    def read(self, path: Path) -> Table:
        raise AssertionError("a journal holds events, not a table")


def events(path: Path) -> Iterator[Event]:
    """Yield what the run saw, in the order in which it was judged.

    Outcomes of its own actions and words of operators are left out: they answered the policy of
    that time. What its actions did to the numbers stays.

    Raises:
        InputError: the journal is missing or damaged.
    """
    try:
        for _, event in journal.read(RunDir.open(path).journal_path):
            if not isinstance(event, (Finished, OperatorCommand)):
                yield event
    except StoreError as error:
        raise InputError(str(error), hint=error.hint) from error
