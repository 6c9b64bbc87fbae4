"""Follows the log files that the policy names, and finds lines that tell of a known failure.

Files that are there when the supervisor begins, a moment after the job, are read from their end,
later ones from their beginning. A file that was rotated is read to its end before the new one is
begun; one that was cut short is read again from its start. However fast a log grows, a look takes a
bounded time and memory: what cannot be read by then is read later, and what lies too far back is
skipped.

The lines are the job's: control sequences are taken out, and long lines are cut.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..core.analysis.failure_classes import FailureClass, classify
from ..core.model.failure import LOG, Failure
from ..store import files

FILES = 32  # that are followed at once
PER_CLASS = 3  # lines of one class that are reported of one launch
BLOCK = 1 << 20
LOOK_S, LAST_LOOK_S = 0.05, 2.0  # how long one look may take; the last one, at the job's end
BEHIND = 64 << 20  # bytes; further back is skipped
LINE_BYTES = 4096
MOST_LINES = 64  # of one block that are looked at closely
SHOWN_CHARS = 500
LIST_NS = 5_000_000_000  # between two looks for new files
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(slots=True)
class _Followed:
    """One file: its descriptor and identity, how far it was read, and a line without an end."""

    fd: int
    identity: tuple[int, int]
    at: int
    rest: bytes = b""


class LogFiles:
    """The log files of one run.

    Args:
        patterns: globs of the policy, relative to `directory`.
        directory: the job's working directory.
        classes: returns the classes that count now.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        directory: Path,
        classes: Callable[[], tuple[FailureClass, ...]],
    ) -> None:
        self._globs = [str(directory / pattern) for pattern in patterns]
        self._directory = directory
        self._classes = classes
        self._followed: dict[str, _Followed] = {}
        self._found: dict[str, int] = {}  # class -> lines of this launch
        self._listed_ns = 0
        self._patterns: list[re.Pattern[bytes]] = []

    def launched(self) -> None:
        """The job starts: what is in its logs already is of an earlier one."""
        self._found.clear()
        self._patterns = _patterns(self._classes()) if self._globs else []
        for path in self._paths():
            if path not in self._followed:
                self._follow(path, from_end=True)

    def poll(self, now_ns: int, *, last: bool = False) -> list[Failure]:
        """Return the lines that were found since the last call, as failures; never raises."""
        if not self._globs:
            return []
        until = time.monotonic() + (LAST_LOOK_S if last else LOOK_S)
        if last or now_ns >= self._listed_ns + LIST_NS:
            self._listed_ns = now_ns
            for path in self._paths():
                if path not in self._followed:
                    self._follow(path)
        found: list[Failure] = []
        for path in list(self._followed):
            with suppress(OSError):  # a file system that fails: the next look tries again
                for line in self._lines(path, until, last=last):
                    found += self._match(path, line, now_ns)
        return found

    def close(self) -> None:
        """Close all files."""
        for followed in self._followed.values():
            os.close(followed.fd)
        self._followed.clear()

    def _paths(self) -> list[str]:
        found: set[str] = set()
        for pattern in self._globs:
            found.update(glob.iglob(pattern, recursive=True))  # noqa: PTH207, absolute too
        return sorted(found)[:FILES]

    def _follow(self, path: str, *, from_end: bool = False) -> None:
        if len(self._followed) >= FILES:
            return
        with suppress(OSError):  # it vanished, or is no regular file
            fd = files.open_file(Path(path), foreign=True)
            seen = os.fstat(fd)
            at = seen.st_size if from_end else 0
            self._followed[path] = _Followed(fd, (seen.st_dev, seen.st_ino), at)

    def _lines(self, path: str, until: float, *, last: bool) -> Iterator[str]:
        """Yield the new lines that match, until there are none or the time is up."""
        one = self._followed[path]
        size = os.fstat(one.fd).st_size
        if size < one.at:
            one.at, one.rest = 0, b""
        elif size - one.at > BEHIND:
            one.at, one.rest = size - BEHIND, b""
        while time.monotonic() < until:
            block = os.pread(one.fd, BLOCK, one.at)
            if not block:
                if last:
                    yield from _matching(self._patterns, one.rest)
                self._rotated(path, one)
                return
            one.at += len(block)
            text = one.rest + block
            cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            one.rest = text[max(cut, len(text) - LINE_BYTES) :]  # of an endless line the newest
            yield from _matching(self._patterns, text[:cut])

    def _rotated(self, path: str, one: _Followed) -> None:
        """Begin the file that has this name now, if that is another one."""
        with suppress(FileNotFoundError):
            now = Path(path).stat()
            if (now.st_dev, now.st_ino) != one.identity:
                os.close(one.fd)
                del self._followed[path]
                self._follow(path)

    def _match(self, path: str, line: str, now_ns: int) -> Iterator[Failure]:
        shown = os.path.relpath(path, self._directory)
        text = line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 1]}…"
        failure = classify(
            Failure(LOG, message=text, file=shown, at_ns=now_ns, leading=True), self._classes()
        )
        count = self._found[failure.cls] = self._found.get(failure.cls, 0) + 1
        if failure.cls and count <= PER_CLASS:
            yield failure


def _patterns(classes: Sequence[FailureClass]) -> list[re.Pattern[bytes]]:
    """Return what finds a line of any class; one that begins with letters takes 1 ms per MB."""
    return [re.compile(text.encode()) for each in classes for text in each.logs]


def _matching(patterns: Sequence[re.Pattern[bytes]], text: bytes) -> Iterator[str]:
    """Yield the lines in which a pattern is found, in their order, each once."""
    places = {}
    for pattern in patterns:
        for found in pattern.finditer(text):
            marks = (text.rfind(mark, 0, found.start()) for mark in (b"\n", b"\r"))
            places[max(marks) + 1] = found.span()
            if len(places) >= MOST_LINES:
                break
    for first, (start, end) in sorted(places.items()):
        ends = (text.find(mark, end) for mark in (b"\n", b"\r"))
        last = min((each for each in ends if each >= 0), default=len(text))
        line = text[max(first, start - LINE_BYTES) : min(last, end + LINE_BYTES)]
        yield _CONTROL.sub("", _SEQUENCE.sub("", line.decode("utf-8", "replace"))).strip()
