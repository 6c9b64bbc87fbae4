"""`--watch-policy`: a policy file that is edited is reloaded, once it passes `policy check`.

Editors write in several steps, so an edit counts when nothing was written for a moment. A policy
that does not load is reported, and the one in force stays. A reload never raises the mode: whoever
may edit the file may not thereby let the supervisor act. The reload itself is posted as a command,
as by `supervise reload`, and takes effect between two steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ..core.model.decisions import MODES
from ..core.model.policy import Policy
from ..errors import SuperviseError
from ..inputs import clock, control_inbox
from ..store.policies import Reloader
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
        self._thread = threading.Thread(target=self._work, name="policy watch", daemon=True)

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
        """Return the directories to watch: that of the file, its packs and its runbooks."""
        return [Target(folder, self._changed.set) for folder in self._folders()]

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

    def _folders(self) -> Iterable[Path]:
        folder = Path(self._source).parent
        return (folder, folder / "packs", folder / "runbooks")

    def _snapshot(self) -> Snapshot:
        """Return name, size and time of the file, and of the packs and runbooks beside it."""
        _, *parts = self._folders()
        found = set()
        for path in (Path(self._source), *(file for part in parts for file in part.glob("*.yaml"))):
            with suppress(OSError):  # just being replaced
                look = path.stat()
                found.add((str(path), look.st_size, look.st_mtime_ns))
        return frozenset(found)
