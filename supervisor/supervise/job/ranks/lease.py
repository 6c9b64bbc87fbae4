"""The lease of a pause: the job stays held only while a supervisor lives that can still decide.

The probe lets a paused job go on when nobody has renewed its pause for `LEASE_S`. The renewing is
done by a thread of its own, since the main loop may wait for a disk. The thread reads no file and
writes shared memory only. It stops when the main loop has not come round for `PATIENCE_S`, so a
supervisor that hangs holds the job for two minutes at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from ...errors import SuperviseError
from ...threads import Thread
from .pending_command import Rank

LEASE_S = 60.0
PATIENCE_S = 60.0  # a disk may freeze for half a minute, and the pause stays; project default
PER_LEASE = 3  # renewals: two may come late


class Lease:
    """Renews a pause. `beat` is for the main loop's thread, the others for any.

    Args:
        lease_s: how long the job stays held after a renewal.
        patience_s: how long the main loop may be away.
    """

    def __init__(self, lease_s: float = LEASE_S, patience_s: float = PATIENCE_S) -> None:
        self.lease_s = lease_s
        self._patience_ns = int(patience_s * 1e9)
        self._ranks: tuple[Rank, ...] = ()
        self._beat_ns = time.monotonic_ns()
        self._ended: threading.Event | None = None

    @property
    def held(self) -> bool:
        """Whether a pause is in force, as far as is known here."""
        return self._ended is not None

    def beat(self, now_ns: int, ranks: Iterable[Rank]) -> None:
        """The main loop comes round, and these are the job."""
        self._beat_ns, self._ranks = now_ns, tuple(ranks)

    def hold(self, until_ns: int) -> None:
        """Renew from now on, up to `until_ns` (CLOCK_MONOTONIC) at most."""
        self.end()
        ended = self._ended = threading.Event()
        thread = Thread(target=self._renew, args=(until_ns, ended), name="lease", daemon=True)
        thread.start()

    def end(self) -> None:
        """Renew no longer; safe to repeat."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.set()

    def _renew(self, until_ns: int, ended: threading.Event) -> None:
        while not ended.is_set() and (now_ns := time.monotonic_ns()) < until_ns:
            if now_ns - self._beat_ns < self._patience_ns:
                for rank in self._ranks:
                    with suppress(SuperviseError, OSError):  # the poll tells of a broken segment
                        rank.lease(min(until_ns, now_ns + int(self.lease_s * 1e9)))
            ended.wait(self.lease_s / PER_LEASE)
