"""Watches of files: commands of operators, and edits of the policy.

Commands are files `control/<time>-<pid>.json` with `{"command", "operator", "args"}` in the run
directory. They are written aside and renamed, taken in the order of their names, and removed once
taken. The run directory's permissions say who may send them. The loop looks in each of its rounds:
one `stat`, where a listing would cost a hundred times; it lists from time to time all the same,
since a network file system may report nothing.

`--watch-policy` reloads an edited policy once it passes `policy check`. Editors write in several
steps, so an edit counts when nothing was written since the look before. A policy that does not load
is reported, and the one in force stays. A reload never raises the mode: the right to edit the file
is no right to let the supervisor act. It is posted as a command, as by `supervise reload`, and
takes effect between two steps.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
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

    def due(self, now_ns: int) -> bool:
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
        if not self._taken and not self._change.due(self._clock()):
            return []
        try:
            paths = sorted(self._directory.glob("*.json"))
        except OSError:
            return []
        commands = []
        for path in paths:
            try:
                if path in self._taken:
                    path.unlink()
                    self._taken.remove(path)
                    continue
                self._taken.add(path)
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
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue  # not a command, or already removed
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


_log = logging.getLogger(__name__)
LOOK_S = 1.0  # between two looks, in which nothing is written once an edit is complete
OPERATOR = "watch-policy"

Snapshot = frozenset[tuple[str, int, int]]


class PolicyWatch:
    """Reloads the policy of one run from a thread of its own, between `start` and `close`.

    Args:
        run: the run directory.
        reloader: knows the file, and loads it.
        in_force: returns the policy in force. Called on any thread.
        print_line: shows a line to the person at the terminal.
        look_s: between two looks.
    """

    def __init__(
        self,
        run: Path,
        reloader: Reloader,
        in_force: Callable[[], Policy],
        print_line: Callable[[str], None],
        look_s: float = LOOK_S,
    ) -> None:
        self._run = run
        self._look_s = look_s
        self._reloader = reloader
        self._source = reloader.source
        self._in_force = in_force
        self._print_line = print_line
        self._closed = threading.Event()
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
        self._closed.set()

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
        previous = self._seen
        while not self._closed.wait(self._look_s):
            snapshot = self._snapshot()
            is_settled, previous = snapshot == previous, snapshot
            if not is_settled or snapshot == self._seen:
                continue
            self._seen = snapshot
            try:
                self.check()
            except Exception:  # the run goes on under its policy
                _log.exception("the policy watch failed")

    def _files(self) -> list[Path]:
        """Return the file and its bases, as far as they can be told."""
        with suppress(OSError, ValueError, InputError):
            return shipped.file_chain(Path(self._source))
        return [Path(self._source)]

    def _snapshot(self) -> Snapshot:
        """Return name, size and time of the files, and of the packs and runbooks beside them."""
        files = self._files()
        folders = (path.parent / part for path in files for part in ("packs", "runbooks"))
        beside = (file for folder in folders for file in folder.glob("*.yaml"))
        stats = set()
        for path in (*files, *beside):
            with suppress(OSError):  # just being replaced
                look = path.stat()
                stats.add((str(path), look.st_size, look.st_mtime_ns))
        return frozenset(stats)
