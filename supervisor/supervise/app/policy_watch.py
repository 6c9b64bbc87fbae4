"""`--watch-policy`: a policy file that is edited is reloaded, once it passes `policy check`.

Editors write in several steps, so an edit counts when nothing was written for a moment. A policy
that does not load is reported, and the one in force stays. A reload never raises the mode: whoever
may edit the file may not thereby let the supervisor act. The reload itself is posted as a command,
as by `supervise reload`, and takes effect between two steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..catalog import shipped
from ..core.model.decisions import MODES
from ..core.model.policy import Policy
from ..errors import InputError, SuperviseError
from ..inputs import clock, control_inbox
from ..store.policies import Reloader
from ..threads import Thread
from .file_watch import Target

QUIET_S = 1.0  # without a write; project default
RESCAN_S = 30.0  # a network file system tells nothing; project default
OPERATOR = "watch-policy"

_log = logging.getLogger(__name__)
Snapshot = frozenset[tuple[str, int, int]]


class PolicyWatch:
    """Reloads the policy of one run from a thread of its own, between `start` and `close`.

    Args:
        run: the run directory.
        reloader: knows the file, and loads it.
        in_force: returns the policy in force. Called on any thread.
        print_line: shows a line to the person at the terminal.
    """

    def __init__(
        self,
        run: Path,
        reloader: Reloader,
        in_force: Callable[[], Policy],
        print_line: Callable[[str], None],
    ) -> None:
        self._run = run
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
        before = self._in_force()
        mode = self._reloader.mode
        try:
            policy = self._reloader.load(self._source, mode=mode)
            if MODES.index(policy.mode) > MODES.index(before.mode):
                mode = before.mode
                policy = self._reloader.load(self._source, mode=mode)
        except SuperviseError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                self._print_line(
                    f"supervise: {self._source} was changed and does not load; policy "
                    f"{before.name} stays in force: supervise policy check {self._source}"
                )
            return False
        self._refused = ""
        if policy.digest == before.digest:
            return False
        at_ns = clock.monotonic_ns()
        args = {"policy": None, "mode": mode, "key": f"{at_ns}-{OPERATOR}"}
        control_inbox.post(self._run, "reload", OPERATOR, args, at_ns=at_ns)
        return True

    def _work(self) -> None:
        while not self._closed:
            if self._changed.wait(RESCAN_S):
                self._settle()
            seen = self._snapshot()
            if self._closed or seen == self._seen:
                continue
            self._seen = seen
            try:
                self.check()
            except Exception:  # the run goes on under its policy
                _log.exception("the policy watch failed")

    def _settle(self) -> None:
        """Wait until nothing was written for a moment."""
        while self._changed.is_set() and not self._closed:
            self._changed.clear()
            self._changed.wait(QUIET_S)

    def _files(self) -> list[Path]:
        """Return the file and its bases, as far as they can be told."""
        with suppress(OSError, ValueError, InputError):
            return shipped.chain(Path(self._source))
        return [Path(self._source)]

    def _snapshot(self) -> Snapshot:
        """Return name, size and time of the files, and of the packs and runbooks beside them."""
        files = self._files()
        beside = (file for path in files for part in _parts(path) for file in part.glob("*.yaml"))
        found = set()
        for path in (*files, *beside):
            with suppress(OSError):  # just being replaced
                look = path.stat()
                found.add((str(path), look.st_size, look.st_mtime_ns))
        return frozenset(found)


def _parts(path: Path) -> tuple[Path, Path]:
    return path.parent / "packs", path.parent / "runbooks"
