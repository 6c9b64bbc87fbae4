"""All that takes long: verifying, pinning, dropping, testing again, putting back.

Never called by the loop. The register is changed under `lock`, pinned files under `disk`; whoever
needs both takes `disk` first.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
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
        self._over, self._hurry = threading.Event(), threading.Event()
        self._pins = Pins(self.run, link=self.link, over=self._stopped)
        self._verifier = Verifier(self.verify, self.limit_s)
        self._code: Mapping[str, Any] | None = None
        self._tried: set[str] = set()
        for entry in self.register.entries:
            entry.pinned = entry.pinned and self._pins.data(entry).exists()

    def close(self) -> None:
        """Give up what is under way."""
        self._over.set()
        self._verifier.close()

    def _stopped(self) -> bool:
        return self._over.is_set() or self._hurry.is_set()

    # ── verify and pin ────────────────────────────────────────────────────────────────────────────

    def look_at_code(self) -> None:
        """See what code runs, the first time that it is called."""
        if self._code is None:
            self._code = manifest.code(self.cwd)

    def take(self, entry: Entry) -> None:
        """Verify a checkpoint that is complete; pin it if it is good."""
        path, look = entry.path, entry.stamp
        answer = self._verifier.verify(path, entry.bytes, entry.python)
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
            if answer.ok is None:
                why = "; ".join(entry.problems)
                self.news.say(f"checkpoint {entry.id} in {path} is not verified: {why}")
            elif answer.ok:
                self.news.verified(entry)
            else:
                self.news.bad(entry)
            self.register.write()

    def _pin(self, entry: Entry, environment: Mapping[str, Any]) -> bool:
        """Pin a good one. False: it has changed, or there was no time; it is to be looked at anew.

        One that is good but cannot be pinned is still good, as long as the job leaves it alone.
        """
        try:
            with self._disk:
                no_room = self._pins.no_room(entry.bytes)
                if no_room:
                    self.news.say(f"checkpoints are not pinned: {no_room}", once="room")
                    return True
                self._pins.pin(entry)
                with self.lock:
                    entry.pinned = True
                inputs = manifest.inputs(self.data, self.cwd)
                about = manifest.describe(entry, self.facts, self._code or {}, environment, inputs)
                text = json.dumps(about, indent=1, default=str) + "\n"
                place = self._pins.folder(entry) / "manifest.json"
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
        path = self._pins.data(entry)
        answer = self._verifier.verify(str(path), entry.bytes, entry.python)
        found = {name: file["sha256"] for name, file in answer.found.get("files", {}).items()}
        with self.lock:
            if self._over.is_set() or not entry.pinned:
                return
            if answer.ok is False or (found and found != entry.hashes):
                problems = answer.problems or ("its files are not those that were verified",)
                entry.state = BAD
                entry.problems = [f"the pinned copy: {problem}" for problem in problems]
                self.news.bad(entry)
            elif answer.ok:
                entry.verified = clock.wall()
            self.register.write()

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
            drop = [entry for entry in known if entry not in keep]
            for entry in drop:
                self._pins.drop(entry)
                entry.pinned = False
                if not entry.there and entry.state == VERIFIED:
                    self._gone(entry, "newer good ones are kept")
            if drop:
                self.register.write()

    def lost(self, entry: Entry) -> None:
        """Its files are not where and what they were."""
        if entry.pinned and self.link and self._pins.differs_by_stamp(entry):
            self._pins.drop(entry)
            entry.pinned = False
        if entry.state == VERIFIED and not entry.pinned:
            self._gone(entry, "its files were changed or removed")
        elif entry.state == UNVERIFIED and entry.id in self.news.delivered:
            self.news.gone(entry, "; ".join(entry.problems))

    def _gone(self, entry: Entry, why: str) -> None:
        entry.state, entry.problems = VANISHED, [why]
        self.news.gone(entry, why)

    # ── put back ──────────────────────────────────────────────────────────────────────────────────

    def put_back(self, name: str, look: Callable[[], object]) -> dict[str, Any]:
        """See `Guard.put_back`.

        Args:
            look: sees what the job has written last.
        """
        self._hurry.set()  # a copy under way can wait
        with self._disk, self.lock:
            self._hurry.clear()
            look()
            entry = self.register.get(name)
            if entry is None or entry.state != VERIFIED:
                state = "is not known" if entry is None else f"is {entry.state}"
                raise StoreError(f"checkpoint {name} {state}: only a verified one is put back")
            moved = []
            if not entry.there or self._pins.differs(entry, Path(entry.path)):
                moved += self._restore(entry)
            moved += self._set_aside(entry)
            self.register.write()
            return {"path": entry.path, "moved": [str(path) for path in moved]}

    def _restore(self, entry: Entry) -> list[Path]:
        if not entry.pinned:
            raise StoreError(
                f"checkpoint {entry.id} is not in {entry.path} any more, and was not pinned",
                hint="supervise checkpoints RUN lists those that are",
            )
        try:
            before = self._pins.restore(entry)
        except OSError as error:
            raise StoreError(f"checkpoint {entry.id} cannot be put back: {error}") from error
        for other in self.register.entries:
            if other.path == entry.path and other.there and other is not entry:
                self._left(other)
        entry.there, entry.stamp = True, finding.stamp(entry.path) or ()
        return [] if before is None else [before]

    def _set_aside(self, entry: Entry) -> list[Path]:
        """Move what is newer than `entry`, or bad, out of the job's way."""
        moved, later = [], False
        for other in list(self.register.entries):
            later = later or other is entry
            newer = other is not entry and (later or other.step > entry.step)
            if other.there and other is not entry and (newer or other.state == BAD):
                path = Path(other.path)
                if path.exists():
                    moved.append(self._pins.aside(path, other.id))
                self._left(other)
        return moved

    def _left(self, entry: Entry) -> None:
        """It is not where the job left it."""
        entry.there = False
        if entry.state == VERIFIED and not entry.pinned:
            self._gone(entry, "it was set aside")
        elif entry.state == FOUND:
            entry.state, entry.problems = VANISHED, ["it was set aside before it was verified"]


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
