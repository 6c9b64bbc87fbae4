"""All that takes long but putting back: verifying, pinning, dropping, testing again.

Never called by the loop. The register is changed under `lock`, pinned files under `disk`; whoever
needs both takes `disk` first.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import StoreError
from ...store import files
from ...store.checkpoints import BAD, FOUND, UNVERIFIED, VANISHED, VERIFIED, Entry, Register
from .. import clock
from . import finding, manifest
from .news import News
from .pins import Pins
from .verifier import Answer, Verifier

NEAR = 100  # steps that a file may be found after it was saved
VERDICTS = {True: VERIFIED, False: BAD, None: UNVERIFIED}


@dataclass
class Keeper:
    """Verifies and keeps the checkpoints of a register.

    Attributes:
        verify: what must hold of one, see `CheckpointsForm`. limit_s: time limit of a verification.
        keep_good: newest good ones that stay pinned.
        facts, data: for manifests, see `manifest.describe` and `manifest.inputs`.
        lock: of the register; nothing that the loop does waits for it.
        reserved: id of the one that is about to be put back; it stays pinned.
    """

    register: Register
    news: News
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
        self.pins = Pins(self.run, link=self.link, over=self._stopped)
        self._verifier = Verifier(self.verify, self.limit_s)
        self._code: Mapping[str, Any] | None = None
        self._tried: set[str] = set()
        for entry in self.register.entries:
            entry.pinned = entry.pinned and self.pins.data(entry).exists()

    def close(self) -> None:
        """Give up what is under way."""
        self._over.set()
        self._verifier.close()

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

    # ── verify and pin ────────────────────────────────────────────────────────────────────────────

    def look_at_code(self) -> None:
        """See what code runs, the first time that it is called."""
        if self._code is None:
            self._code = manifest.code(self.cwd)

    def take(self, entry: Entry, *, urgent: bool = False) -> None:
        """Verify a checkpoint that is complete, one at a time; pin it if it is good."""
        path, look = entry.path, entry.stamp
        answer = self._verifier.verify(path, entry.bytes, entry.python, urgent=urgent)
        if answer.ok is None and not answer.found and entry.id not in self._tried:
            self._tried.add(entry.id)  # no memory, no time: it may be better the next time
            return
        with self.lock:
            changed = finding.stamp(path) != look or entry.state != FOUND
            if changed or self._over.is_set():
                return  # it is being written again: the next look begins anew
            entry.state = VERDICTS[answer.ok]
            entry.problems, entry.verified = list(answer.problems), clock.wall()
            _describe(entry, answer)
        if answer.ok and not self._pin(entry, answer.environment):
            return
        with self.lock:
            self.write()
            if answer.ok is None:
                why = "; ".join(entry.problems)
                self.news.say(f"checkpoint {entry.id} in {path} is not verified: {why}")
            elif answer.ok:
                self.news.verified(entry)
            else:
                self.news.bad(entry)

    def _pin(self, entry: Entry, environment: Mapping[str, Any]) -> bool:
        """Pin a good one. False: it has changed, or there was no time; it is to be looked at anew.

        One that is good but cannot be pinned is still good, as long as the job leaves it alone.
        """
        try:
            with self._disk:
                no_room = self.pins.no_room(entry.bytes)
                if no_room:
                    self.news.say(f"checkpoints are not pinned: {no_room}", once="room")
                    return True
                self.pins.pin(entry)
                with self.lock:
                    entry.pinned = True
                inputs = manifest.inputs(self.data, self.cwd)
                about = manifest.describe(entry, self.facts, self._code or {}, environment, inputs)
                text = json.dumps(about, indent=1, default=str) + "\n"
                place = self.pins.folder(entry) / "manifest.json"
                files.replace(place, text.encode(), durable=True)
        except (StoreError, InterruptedError):
            with self.lock:
                entry.state, entry.stamp = FOUND, ()
            return False
        except OSError as error:
            self.news.say(f"checkpoints cannot be pinned: {error}", once="pin")
        return True

    def test(self) -> None:
        """Verify the newest pinned one again, as if it were to be restored."""
        with self.lock:
            pinned = [e for e in self.register.entries if e.pinned and e.state == VERIFIED]
        if not pinned:
            return
        entry = pinned[-1]
        path = self.pins.data(entry)
        answer = self._verifier.verify(str(path), entry.bytes, entry.python)
        found = {name: file["sha256"] for name, file in answer.found.get("files", {}).items()}
        with self.lock:
            if self._over.is_set() or not entry.pinned:
                return
            if answer.ok is False or (found and found != entry.hashes):
                problems = answer.problems or ("its files are not those that were verified",)
                entry.state = BAD
                entry.problems = [f"the pinned copy: {problem}" for problem in problems]
            elif answer.ok:
                entry.verified = clock.wall()
            self.write()
            if entry.state == BAD:
                self.news.bad(entry)

    # ── let go ────────────────────────────────────────────────────────────────────────────────────

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

    def gone(self, entry: Entry, why: str) -> None:
        entry.state, entry.problems = VANISHED, [why]
        self.news.gone(entry, why)


def _describe(entry: Entry, answer: Answer) -> None:
    """Take over what was found in a checkpoint."""
    entry.files = dict(answer.found.get("files", {}))
    entry.bytes = sum(file["size"] for file in entry.files.values()) or entry.bytes
    entry.tensors = int(answer.found.get("bytes", 0))
    entry.inside, entry.rng = answer.found.get("step"), bool(answer.found.get("rng"))
    # Seen by its file alone it is known late; a count of steps in it that is near tells which.
    if entry.how == "glob" and entry.inside is not None:
        late = entry.step - (entry.inside - 1)
        if 0 <= late <= NEAR:
            entry.step = entry.inside - 1
