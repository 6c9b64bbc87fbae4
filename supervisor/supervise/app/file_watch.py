"""Wakes whoever waits for files: control commands, checkpoints, a policy that is edited.

Directories are watched by inotify, through `watchdog`: files that were closed after writing or
moved in, and new directories, which are watched too where asked, one level down. Not recursive,
and at most `MAX_WATCHES`. This only makes things faster: whoever is woken looks for itself, and
looks from time to time anyway, since a network file system tells nothing. The import and every call
that may wait for a disk happen on a thread of its own.
"""

from __future__ import annotations

import glob
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..threads import Thread

MAX_WATCHES = 256
MAX_BELOW = 16  # of the newest directories; a checkpoint is written in one, and then left alone
RETRY_S = 5.0  # for directories that are not there yet; project default
IDLE_S = 3600.0  # the threads of watchdog wake that often for nothing

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A directory, and what to call (on any thread; it must not wait) when something comes there.

    Attributes:
        below: new directories in it are watched as well.
    """

    directory: Path
    wake: Callable[[], None]
    below: bool = False


def checkpoint_targets(
    patterns: Iterable[str], cwd: Path, wake: Callable[[], None]
) -> list[Target]:
    """Return the directories that the literal beginnings of glob patterns lead to."""
    found: dict[Path, Target] = {}
    for pattern in patterns:
        parts = (cwd / pattern).parts[:-1]
        literal = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        directory = Path(*parts[:literal])
        found[directory] = Target(directory, wake, below=True)
    return list(found.values())


class FileWatch:
    """Watches targets between `start` and `close`."""

    def __init__(self, targets: Iterable[Target]) -> None:
        self._missing = list(targets)
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of the next two
        self._watches = 0
        self._below: deque[Any] = deque()  # oldest first
        self._observer: Any = None

    def start(self) -> None:
        """Begin. Whatever cannot be watched is looked at from time to time only."""
        try:
            Thread(target=self._run, name="file watch", daemon=True).start()
        except RuntimeError:  # at the limit of processes and threads
            _log.warning("no thread for the file watch")

    def close(self) -> None:
        """End; does not wait."""
        self._closed.set()
        if self._observer is not None:
            self._observer.stop()

    def _run(self) -> None:
        try:
            from watchdog.observers import Observer

            self._observer = Observer(timeout=IDLE_S)
            self._observer.start()
        except Exception:  # no inotify instance to spare, or not installed
            _log.warning("files are not watched, but looked at regularly", exc_info=True)
            return
        while not self._closed.is_set():
            self._missing = [target for target in self._missing if not self._add(target)]
            if not self._missing:
                return
            self._closed.wait(RETRY_S)

    def _add(self, target: Target, *, below: bool = False) -> bool:
        """Watch a directory; return whether that is settled, False: it is not there yet."""
        from watchdog import events

        if not target.directory.is_dir():
            return False
        kinds = [
            events.FileClosedEvent,
            events.FileMovedEvent,
            events.FileCreatedEvent,  # so a file is called that is moved in from elsewhere
            events.DirCreatedEvent,
            events.DirMovedEvent,
        ]
        with self._lock:
            if below and len(self._below) >= MAX_BELOW:
                self._observer.unschedule(self._below.popleft())
                self._watches -= 1
            if self._watches >= MAX_WATCHES:
                return True
            try:
                watch = self._observer.schedule(
                    _Handler(self, target), str(target.directory), event_filter=kinds
                )
            except OSError as error:  # no watch to spare, or it has just gone
                _log.warning("%s is not watched: %s", target.directory, error)
                return True
            self._watches += 1
            if below:
                self._below.append(watch)
        target.wake()  # what came before the watch
        return True

    def on_event(self, target: Target, event: Any) -> None:
        """On a thread of watchdog: something came."""
        path = event.dest_path or event.src_path
        if event.is_directory and target.below and Path(path).parent == target.directory:
            self._add(Target(Path(path), target.wake), below=True)
        target.wake()


class _Handler:
    """What watchdog calls."""

    def __init__(self, watch: FileWatch, target: Target) -> None:
        self._watch, self._target = watch, target

    def dispatch(self, event: Any) -> None:
        try:
            self._watch.on_event(self._target, event)
        except Exception:  # a thread of watchdog must not end
            _log.exception("the file watch failed at %s", self._target.directory)
