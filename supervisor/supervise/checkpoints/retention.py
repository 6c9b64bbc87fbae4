"""What is pinned and held of a register's checkpoints, and how it is let go of.

The register, and what is held, is changed under `lock`, pinned files under `disk`; whoever needs
both takes `disk` first.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import StoreError
from . import discovery
from .hard_link_holds import HardLinkHolds
from .notifications import CheckpointNotifications
from .overwrite_tracker import OverwriteTracker
from .pin_store import PinStore
from .registry import COPIED, FOUND, PINNED, UNVERIFIED, VANISHED, VERIFIED, Entry, Register
from .verifier_process import Verifier

END_S = 2.0


@dataclass
class Retention:
    """Verifies and keeps the checkpoints of a register.

    Attributes:
        verify: what must hold of one, see `CheckpointsForm`. limit_s: time limit of a verification.
        keep_good: newest good ones that stay pinned.
        facts, data: for manifests, see `manifest.describe` and `manifest.inputs`.
        lock: of the register; nothing that the loop does waits for it.
        reserved: id of the one that is about to be put back; it stays pinned.
        overtaken: of what is written again before it is verified, a copy is verified.
    """

    register: Register
    news: CheckpointNotifications
    run: Path
    cwd: Path
    verify: Sequence[str]
    limit_s: float
    keep_good: int
    link: bool
    facts: Mapping[str, Any]
    data: Sequence[str]
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._disk = threading.RLock()
        self._over, self._claimed = threading.Event(), threading.Event()
        self.reserved = ""
        self.overtaken = OverwriteTracker(self.news)
        self.pins = PinStore(self.run, link=self.link, over=self._stopped)
        self.holds = HardLinkHolds(self.run / PINNED)
        self._verifier = Verifier(self.verify, self.limit_s)
        self._code: Mapping[str, Any] | None = None
        self._tried: set[str] = set()
        self.pins.clear()
        for entry in self.register.entries:
            entry.pinned = entry.pinned and self.pins.data(entry).exists()
            if entry.state == COPIED or (entry.state == FOUND and not entry.there):
                self._let_go(entry)  # nobody verifies it any more

    def close(self) -> None:
        """Give up what is under way."""
        self._over.set()
        self._verifier.close()

    def cancel(self) -> None:
        """Give up a verification that is under way; its checkpoint is looked at again."""
        self._verifier.cancel()

    def lower_priority(self, niceness: int) -> None:
        """Let a verification that is under way be so nice from now on."""
        self._verifier.lower_priority(niceness)

    def _stopped(self) -> bool:
        return self._over.is_set() or self._claimed.is_set()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Have the pinned files for oneself; a copy under way is given up, and made later."""
        self._claimed.set()
        with self._disk:
            self._claimed.clear()
            yield

    def write(self) -> None:
        """Write the register; what cannot be written is told, and is written the next time."""
        try:
            self.register.write()
        except OSError as error:
            self.news.say(f"the register of checkpoints cannot be written: {error}", once="write")

    def hold(self, ready: Sequence[Entry]) -> bool:
        """Hold the newest of what is ready, see `HardLinkHolds.keep`.

        Returns:
            Whether any of it is gone now.
        """
        dropped = [e for e in self.holds.keep(ready) if e.state == FOUND and not e.there]
        for entry in dropped:
            self._let_go(entry)
        return bool(dropped)

    def end(self) -> None:
        """Hold nothing any more; what the job's rotation has taken meanwhile is gone."""
        if not self.lock.acquire(timeout=END_S):
            return  # a disk that hangs
        try:
            self.holds.clear()
            for entry in self.register.entries:
                if entry.state == FOUND and discovery.stamp(entry.path) is None:
                    entry.there = False
                    self._let_go(entry)
            self.write()
        finally:
            self.lock.release()

    def drop(self, judged: Collection[str], suspects: Collection[str]) -> None:
        """Let go of pinned ones that newer good ones stand for.

        Args:
            judged: those that the run has had time to suspect; others neither go nor count.
            suspects: they go first, and never stand for a good one.
        """
        with self._disk, self.lock:
            known = [e for e in self.register.entries if e.pinned and e.id in judged]
            sound = [e for e in known if e.state == VERIFIED]
            good = [e for e in sound if e.id not in suspects]
            keep = (good or sound)[-self.keep_good :]
            drop = [e for e in known if e not in keep and e.id != self.reserved]
            for entry in drop:
                self.pins.drop(entry)
                entry.pinned = False
                if not entry.there and entry.state == VERIFIED:
                    self.gone(entry, "newer good ones are kept")
            if drop:
                self.write()

    def lost(self, entry: Entry) -> None:
        """Its files are not where and what they were."""
        if entry.pinned and self.link and self.pins.differs_by_stamp(entry):
            self.pins.drop(entry)
            entry.pinned = False
        if entry.state == VERIFIED and not entry.pinned:
            self.gone(entry, "its files were changed or removed")
        elif entry.state == UNVERIFIED and entry.id in self.news.delivered:
            self.news.gone(entry, "; ".join(entry.problems))

    def stage(self, entry: Entry) -> Path:
        """See `PinStore.stage`. A copy that is not what was verified is nothing to go back to."""
        try:
            return self.pins.stage(entry)
        except StoreError as error:
            with self.lock:
                if entry.state == VERIFIED and not entry.there:
                    self.gone(entry, str(error))
                    self.write()
            raise

    def gone(self, entry: Entry, why: str) -> None:
        """Nothing is left of a good one."""
        entry.state, entry.problems = VANISHED, [why]
        self.news.gone(entry, why)

    def _room(self, entry: Entry) -> bool:
        why = self.pins.no_room(entry.bytes)
        if why:
            self.news.say(f"checkpoints are not pinned: {why}", once="room")
        return not why

    def _let_go(self, entry: Entry, *, overtaken: bool = False) -> None:
        """There is no verdict: what lies there, if it is still that, is looked at anew."""
        if overtaken:
            self.overtaken.again(entry.path)
        self.pins.drop(entry)
        entry.pinned = False
        here = entry.there and discovery.stamp(entry.path) == entry.stamp
        if entry.state == COPIED and (here or self.holds.intact(entry)):
            entry.state = FOUND
        elif entry.state == COPIED or (entry.state == FOUND and not entry.there):
            what = "was written again" if entry.state == COPIED else "went away"
            entry.state, entry.there = VANISHED, False
            entry.problems = [f"it {what} before it was verified"]
