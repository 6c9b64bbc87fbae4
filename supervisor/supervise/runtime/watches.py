"""Watches of files: commands of operators, checkpoints, and edits of the policy.

Commands are files `control/<time>-<pid>.json` with `{"command", "operator", "args"}` in the run
directory. They are written aside and renamed, taken in the order of their names, and removed once
taken. The run directory's permissions say who may send them.

inotify, through `watchdog`, wakes the loop for files that were closed after writing or moved in,
and for new directories, which are watched too where asked, one level down; at most `MAX_WATCHES`.
It only makes things faster. The reader looks for itself (one `stat` where a listing would cost a
hundred times), also from time to time, since a network file system reports nothing. The import and
every call that may wait for a disk happen on a thread of its own.

`--watch-policy` reloads an edited policy once it passes `policy check`. Editors write in several
steps, so an edit counts when nothing was written for a moment. A policy that does not load is
reported, and the one in force stays. A reload never raises the mode: the right to edit the file is
no right to let the supervisor act. It is posted as a command, as by `supervise reload`, and takes
effect between two steps.
"""

from __future__ import annotations

import errno
import glob
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import system
from ..catalog import shipped
from ..core.model.decisions import MODES
from ..core.model.events import OperatorCommand
from ..core.model.payload import Payload
from ..core.model.policy import Policy
from ..errors import InputError, SuperviseError
from ..store import files
from ..store.policies import Reloader
from ..system import Thread

RESCAN_NS = 1_000_000_000  # after this time it is listed anyway: a network file system may lag
FRESH_NS = 100_000_000  # a directory that changed so lately may change again within its clock


class DirectoryChange:
    """Remembers how a directory looked when it was listed last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed_ns = self._listed_ns = 0

    def is_listing_due(self, now_ns: int) -> bool:
        """Return whether to list it now; the caller then does."""
        try:
            changed_ns = self._path.stat().st_mtime_ns
        except OSError:  # not made yet, or removed at the end
            return False
        if changed_ns == self._changed_ns and now_ns < self._listed_ns + RESCAN_NS:
            return False
        is_fresh = abs(time.time_ns() - changed_ns) < FRESH_NS
        self._changed_ns, self._listed_ns = (0 if is_fresh else changed_ns), now_ns
        return True


DIRECTORY = "control"
# Links, directories, devices and files of others: those are never read.
NO_COMMAND = (errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EPERM, errno.EACCES)
MAX_BYTES = 64 << 10  # of one command; a list of thousands of shards fits


def post_command(
    run: Path, command: str, operator: str, args: Mapping[str, Any], *, at_ns: int
) -> Path:
    """Post a command to the supervisor of `run`. Raises OSError."""
    directory = run / DIRECTORY
    files.make_directory(directory)
    path = directory / f"{at_ns:020d}-{os.getpid()}.json"
    text = json.dumps({"command": command, "operator": operator, "args": dict(args)})
    files.replace_file(path, text.encode(), durable=False)
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
        if not self._taken and not self._change.is_listing_due(self._clock()):
            return []
        try:
            paths = sorted(self._directory.glob("*.json"))
        except OSError:
            return []
        commands = []
        for path in paths:
            if path in self._taken:
                with suppress(OSError):
                    path.unlink()
                    self._taken.remove(path)
                continue
            self._taken.add(path)
            try:
                raw = files.read_file(path, limit=MAX_BYTES)
                content = json.loads(raw, parse_constant=_refuse)
                args = {key: _flat(value) for key, value in content["args"].items()}
                if args.get("key") not in self._received:
                    commands.append(
                        OperatorCommand(
                            self._clock(),
                            str(content["operator"]),
                            str(content["command"]),
                            Payload(args),
                        )
                    )
            except OSError as error:
                if error.errno not in NO_COMMAND:  # of a network disk, say: it is read again
                    self._taken.remove(path)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue  # not a command
        return commands


def _flat(value: Any) -> Any:
    """Return an argument, which is a value or a list of values."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, list | dict):
            raise TypeError(item)
    return value


def _refuse(constant: str) -> float:
    """NaN and infinities are no JSON."""
    raise ValueError(constant)


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
    targets: dict[Path, Target] = {}
    for pattern in patterns:
        parts = (cwd / pattern).parts[:-1]
        literal = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        directory = Path(*parts[:literal])
        targets[directory] = Target(directory, wake, below=True)
    return list(targets.values())


class FileWatch:
    """Watches targets between `start` and `close`."""

    def __init__(self, targets: Iterable[Target], *, retry_s: float = RETRY_S) -> None:
        self._missing = list(targets)
        self._retry_s = retry_s
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
            self._closed.wait(self._retry_s)

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


QUIET_S = 1.0  # without a write; project default
RESCAN_S = 30.0  # a network file system tells nothing; project default
OPERATOR = "watch-policy"

Snapshot = frozenset[tuple[str, int, int]]


class PolicyWatch:
    """Reloads the policy of one run from a thread of its own, between `start` and `close`.

    Args:
        run: the run directory.
        reloader: knows the file, and loads it.
        in_force: returns the policy in force. Called on any thread.
        print_line: shows a line to the person at the terminal.
        quiet_s: without a write, until an edit counts.
    """

    def __init__(
        self,
        run: Path,
        reloader: Reloader,
        in_force: Callable[[], Policy],
        print_line: Callable[[str], None],
        quiet_s: float = QUIET_S,
    ) -> None:
        self._run = run
        self._quiet_s = quiet_s
        self._reloader = reloader
        self._source = reloader.source
        self._in_force = in_force
        self._print_line = print_line
        self._closed = False
        self._changed = threading.Event()
        self._seen = self._snapshot()
        self._refused = ""  # as it was told
        self._thread = Thread(target=self._work, name="policy watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        try:
            self._thread.start()
        except RuntimeError as error:  # at the limit of processes and threads
            self._print_line(f"supervise: the policy file is not watched: {error}")

    def close(self) -> None:
        """End; does not wait."""
        self._closed = True
        self._changed.set()

    def targets(self) -> list[Target]:
        """Return the directories to watch: of the file and its bases, with packs and runbooks."""
        folders = [f for path in self._files() for f in (path.parent, *_parts(path))]
        return [Target(folder, self._changed.set) for folder in dict.fromkeys(folders)]

    def check(self) -> bool:
        """Post a reload if the file holds another policy that loads; return whether it does."""
        if self._reloader.source != self._source:
            return False  # an operator chose another file
        policy_before = self._in_force()
        mode = self._reloader.mode
        try:
            policy = self._reloader.load(self._source, mode=mode)
            if MODES.index(policy.mode) > MODES.index(policy_before.mode):
                mode = policy_before.mode
                policy = self._reloader.load(self._source, mode=mode)
        except SuperviseError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                self._print_line(
                    f"supervise: {self._source} was changed and does not load; policy "
                    f"{policy_before.name} stays in force: supervise policy check {self._source}"
                )
            return False
        self._refused = ""
        if policy.digest == policy_before.digest:
            return False
        at_ns = system.monotonic_ns()
        args = {"policy": None, "mode": mode, "key": f"{at_ns}-{OPERATOR}"}
        post_command(self._run, "reload", OPERATOR, args, at_ns=at_ns)
        return True

    def _work(self) -> None:
        while not self._closed:
            if self._changed.wait(RESCAN_S):
                self._settle()
            snapshot = self._snapshot()
            if self._closed or snapshot == self._seen:
                continue
            self._seen = snapshot
            try:
                self.check()
            except Exception:  # the run goes on under its policy
                _log.exception("the policy watch failed")

    def _settle(self) -> None:
        """Wait until nothing was written for a moment."""
        while self._changed.is_set() and not self._closed:
            self._changed.clear()
            self._changed.wait(self._quiet_s)

    def _files(self) -> list[Path]:
        """Return the file and its bases, as far as they can be told."""
        with suppress(OSError, ValueError, InputError):
            return shipped.file_chain(Path(self._source))
        return [Path(self._source)]

    def _snapshot(self) -> Snapshot:
        """Return name, size and time of the files, and of the packs and runbooks beside them."""
        files = self._files()
        beside = (file for path in files for part in _parts(path) for file in part.glob("*.yaml"))
        stats = set()
        for path in (*files, *beside):
            with suppress(OSError):  # just being replaced
                look = path.stat()
                stats.add((str(path), look.st_size, look.st_mtime_ns))
        return frozenset(stats)


def _parts(path: Path) -> tuple[Path, Path]:
    return path.parent / "packs", path.parent / "runbooks"
