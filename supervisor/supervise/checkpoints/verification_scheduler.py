"""All that takes long but putting back: verifying, pinning, dropping, testing again.

Never called by the loop. See `retention` for the locks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..inputs import clock
from ..store import files
from . import discovery, manifest
from .registry import BAD, COPIED, FOUND, UNVERIFIED, VERIFIED, Entry
from .retention import Retention

VERDICTS = {True: VERIFIED, False: BAD, None: UNVERIFIED}


class VerificationScheduler(Retention):
    """Verifies the checkpoints of a register, and pins those that are good."""

    def look_at_code(self) -> None:
        """See what code runs, the first time that it is called."""
        if self._code is None:
            self._code = manifest.code(self.cwd, self.facts["argv"])

    def take(self, entry: Entry, *, urgent: bool = False, awaited: bool = False) -> None:
        """Verify a checkpoint that is complete, one at a time; pin it if it is good.

        Args:
            urgent: the job is dead: nobody needs the disk, or writes it again.
            awaited: the job trains on and should be taken back: its disk does not come first.
        """
        with self.lock:
            link = self.holds.begin(entry)
        try:
            self._take(entry, link, urgent=urgent, awaited=awaited)
        finally:
            with self.lock:
                self.holds.end(entry)

    def _take(self, entry: Entry, link: Path | None, *, urgent: bool, awaited: bool) -> None:
        often = entry.there and entry.path in self.overtaken and not self.holds.alone(entry)
        try:
            held = self._hold(entry) if often and not urgent else None
        except (StoreError, InterruptedError):
            return  # it was written again even so
        with self.lock:
            if entry.state not in (FOUND, COPIED):
                return
            path, look = entry.path, entry.stamp
        link = link if held is None else None
        where = str(held or link or path)
        hurried = urgent or awaited
        try:
            answer = self._verifier.verify(where, entry.bytes, entry.python, urgent=hurried)
        except InterruptedError:
            with self.lock:
                self._let_go(entry)
            return
        unread = answer.ok is None and not answer.found and entry.id not in self._tried
        with self.lock:
            if self._over.is_set():
                return
            changed = discovery.stamp(path) != look
            linked = held is not None and self.link and discovery.stamp(where) != look
            if link is None:
                failed = linked or (changed and (held is None or not answer.ok))
            else:  # of a directory more may have been to come
                failed = changed and not answer.ok and len(look) > 1
                failed = failed or not self.holds.intact(entry, look)
            if failed:
                self._let_go(entry, overtaken=True)  # it may have been caught half written
                return
            if unread:  # no memory, no time: it may be better the next time
                self._tried.add(entry.id)
            if unread or entry.state not in (FOUND, COPIED):
                self._let_go(entry)
                return
            entry.state = COPIED  # as long as it is being pinned
            entry.problems, entry.verified = list(answer.problems), clock.wall()
            entry.describe(answer.found)
        if answer.ok and not self._pin(entry, answer.environment, link, held=held is not None):
            return
        with self.lock:
            lost = (now := discovery.stamp(path)) != look and not entry.pinned
            lost = lost and (answer.ok is True or link is None)
            if lost or entry.state != COPIED:
                self._let_go(entry, overtaken=lost)
                return
            entry.state = VERDICTS[answer.ok]
            self.overtaken.judged(path, again=now not in (look, None))
            self.write()
            self.news.judged(entry, answer.ok)
        if held is not None and not answer.ok:
            self.pins.drop(entry)

    def _hold(self, entry: Entry) -> Path | None:
        """Copy one before it is verified; None where that cannot be, it is verified where it is.

        From the first byte on the entry is of what lies there now: the next save is another one.

        Raises:
            StoreError: there was another save meanwhile. InterruptedError: see `Pins.hold`.
        """
        try:
            with self._disk:
                if not self._room(entry):
                    return None
                with self.lock:
                    entry.state = COPIED if entry.state == FOUND else entry.state
                return self.pins.hold(entry)
        except (StoreError, OSError) as error:
            with self.lock:
                self._let_go(entry, overtaken=isinstance(error, StoreError))
            if isinstance(error, (StoreError, InterruptedError)):
                raise
            if entry.state == FOUND:
                self.news.say(f"checkpoints cannot be pinned: {error}", once="pin")
            return None

    def _pin(
        self, entry: Entry, environment: Mapping[str, Any], link: Path | None, *, held: bool
    ) -> bool:
        """Pin a good one. False: it has changed, or there was no time; it is to be looked at anew.

        One that is good but cannot be pinned is still good, as long as the job leaves it alone.

        Args:
            link: where it is held, if it is. held: a copy of it was verified, and is pinned.
        """
        alone = link is not None and self.holds.alone(entry)  # nobody writes it: no copy is needed
        try:
            with self._disk:
                if not (held or alone or self._room(entry)):
                    return True
                if held:
                    self.pins.keep(entry)
                else:
                    self.pins.pin(entry, link, link=alone)
                with self.lock:
                    entry.pinned = True
                inputs = manifest.inputs(self.data, self.cwd)
                for name in (name for name, sha in inputs.items() if sha is None):
                    self.news.say(
                        f"job.manifest: {name} cannot be read, so no checkpoint's manifest has its "
                        f"hash; looked for in {self.cwd}",
                        once=f"manifest {name}",
                    )
                about = manifest.describe(entry, self.facts, self._code or {}, environment, inputs)
                text = json.dumps(about, indent=1, default=str) + "\n"
                place = self.pins.folder(entry) / "manifest.json"
                files.replace(place, text.encode(), durable=True)
        except (StoreError, InterruptedError) as error:
            with self.lock:
                self._let_go(entry, overtaken=isinstance(error, StoreError))
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
        try:
            answer = self._verifier.verify(str(path), entry.bytes, entry.python)
        except InterruptedError:
            return
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
