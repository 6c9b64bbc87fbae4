"""The checkpoint guard: finds the job's checkpoints, verifies them, and keeps good ones safe.

Two threads, both as nice as can be: one looks once a second what is there, the other verifies (one
at a time, in a process of its own), pins, and drops what is pinned for longer than needed. The loop
only ever takes what they came to. Decides nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from ..core.model.events import Event, Notice
from ..inputs import clock
from .notifications import CheckpointNotifications
from .ownership import OwnershipResolver
from .registry import BAD, COPIED, FOUND, VANISHED, VERIFIED, Entry, Register
from .restore import Restorer
from .save_report import RunPosition, saved
from .tracker import Watch
from .verification_scheduler import VerificationScheduler
from .verifier_process import LIMIT_S

EVERY_S = 1.0
IDLE = 20.0  # times as long as a look took, until the next; project default
LEAST_S = 0.25  # from one look to the next, also when the job tells of a save; project default
NICE = 19
SHARE = 0.5  # project default
CLOSE_S = 2.0  # for what is under way at the end of the run; the disk may hang
VERIFY_NOW_S, SOON_S = 60.0, 10.0  # for what a dead job left; project defaults


class CheckpointService:
    """Guards the checkpoints of one run, from `start` to `close`.

    For the loop: `saved(notice)` for each `checkpoint-saved` of a probe; `poll()` for events: kind
    `checkpoint`, whose data `{"id", "step", "attempt", "path", "ok", "bytes", "seconds",
    "problems"}` tell that one was verified, is bad, or is gone; kind `note` for what people should
    know. `newest()` for the leading rank's next frame: `checkpoint_ok` and `checkpoint_size`, once
    per checkpoint (`checkpoint_time` is the probe's). None of the three ever waits.

    For the thread of an action: `prepare(id)`, as long as a copy takes, then `put_back(id)`.

    Args:
        form: `policy.job["checkpoints"]`, see `catalog.forms.job_form.CheckpointsForm`.
        run: the run directory.
        cwd: the job's working directory.
        now: where the run is; called by `saved`, and by `poll` every `every_s`.
        facts: what a manifest tells of the run: its command, its policy.
        data: files whose hashes belong into a manifest, `policy.job["manifest"]`.
        runs: where other runs may be, besides the neighbours of this one.
        every_s: between two looks. limit_s: see `verifier.LIMIT_S`. soon_s: see `verify_now`.
        share: of the time that may be spent verifying; of what is saved too often, the newest are.

    Raises:
        StoreError: the register of this run cannot be read.
    """

    def __init__(
        self,
        form: Mapping[str, Any],
        run: Path,
        cwd: Path,
        now: Callable[[], RunPosition],
        *,
        facts: Mapping[str, Any] | None = None,
        data: Sequence[str] = (),
        runs: Path | None = None,
        every_s: float = EVERY_S,
        limit_s: float = LIMIT_S,
        share: float = SHARE,
        soon_s: float = SOON_S,
    ) -> None:
        self._now, self._every_s = now, every_s
        self._test_s: float | None = form["restore_test"]
        self._register, self._news = Register(run), CheckpointNotifications()
        self._keeper = VerificationScheduler(
            self._register,
            self._news,
            run,
            cwd,
            tuple(form["verify"]),
            limit_s,
            int(form["keep_good"]),
            form["pin"] == "link",
            dict(facts or {}),
            tuple(data),
        )
        owners = OwnershipResolver(self._register, tuple(form["glob"]), cwd, run, runs)
        self._watch = Watch(
            self._register,
            tuple(form["glob"]),
            cwd,
            float(form["settle"]),
            owners,
            self._keeper.holds.intact,
        )
        self._restorer = Restorer(self._keeper, owners, lambda: self.look(closely=True))
        self._ready: list[Entry] = []
        self._moment = RunPosition()
        self._judged: frozenset[str] = frozenset()
        self._asked_s = self._rest_s = self._hurry_s = -inf
        self._tested_s, self._share, self._soon_s = time.monotonic(), share, soon_s
        self._rush: threading.Thread | None = None
        self._sought: int | None = None  # an incident waits for one of a step before this
        self._working = threading.Lock()  # one at a time
        self._over, self._came = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(what, wake), name=name, daemon=True)
            for name, what, wake in (
                ("checkpoints", self.look, self._came),
                ("verify", self.work, self._over),
            )
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            self._begin(thread)

    def close(self) -> None:
        """End; a verification or a copy under way is given up. Safe to repeat."""
        self._over.set()
        self._came.set()
        self._keeper.close()
        self._restorer.forget()
        last = threading.Thread(target=self._look_out, name="last look", daemon=True)
        self._begin(last)  # the disk may hang
        until_s = time.monotonic() + CLOSE_S
        for thread in (*self._threads, self._rush, last):
            if thread is not None and thread.is_alive():
                thread.join(timeout=max(0.0, until_s - time.monotonic()))
        self._keeper.end()

    # ── for the loop ──────────────────────────────────────────────────────────────────────────────

    def saved(self, event: Notice) -> None:
        """Take a notice `checkpoint-saved`. Of its data only `path` is needed."""
        self._moment = moment = self._now()
        if (told := saved(event, moment)) is not None:
            self._watch.told(told)
            self._came.set()

    def resume(self, heard: Mapping[str, bool]) -> None:
        """Before `start`: go on for a guard whose supervisor died; tell what nobody has `heard`.

        That is by id whether the newest event that the run took calls it good.
        """
        self._news.delivered |= heard.keys()
        for entry in self._register.entries:
            said = heard.get(entry.id)
            if entry.state == VERIFIED and said is not True:
                self._news.verified(entry, first=said is None)
            elif entry.state == BAD and said is not False:
                self._news.bad(entry)
            elif entry.state == VANISHED and said:
                self._news.gone(entry, "; ".join(entry.problems))

    def poll(self) -> list[Event]:
        """Return what happened since the last call, oldest first."""
        if time.monotonic() >= self._asked_s + self._every_s:
            self._asked_s = time.monotonic()
            self._moment = self._now()
            self._judged = frozenset(self._news.delivered) - self._moment.on_trial
        return self._news.take()

    def verify_now(
        self, within_s: float = VERIFY_NOW_S, *, above: float = -inf, before: float = inf
    ) -> None:
        """The job has ended, and may be started again: verify at once what it left, newest first.

        At normal priority and without a rest, for nobody is trained, and only what may be of a step
        between `above` and `before`, both left out. Returns at once; see `is_verifying_now`. Once
        one is good, no other is begun after `soon_s`: large ones take long.
        """
        self._hurry_s, self._sought = time.monotonic() + within_s, None
        steps = (above, before)
        self._rush = threading.Thread(target=self._hurried, args=steps, name="hurry", daemon=True)
        self._begin(self._rush)

    def seek(self, before: int) -> None:
        """The job trains on, and an incident waits for a good checkpoint of a step before this.

        Verified at normal priority, the newest that can serve first, until one is good; what is
        under way at low priority is begun again. Returns at once; call it for as long as it waits.
        """
        if self._rush is None or not self._rush.is_alive():
            self._sought = before
            self._rush = threading.Thread(
                target=self._seek, args=(before,), name="seek", daemon=True
            )
            if not self._begin(self._rush):
                self._sought = None

    @property
    def seeking(self) -> bool:
        """Whether that is under way; if not, `poll` has what came of it."""
        return self._sought is not None

    @property
    def is_verifying_now(self) -> bool:
        """Whether that is under way and in time; if not, `poll` has what came of it."""
        return self._rush is not None and self._rush.is_alive() and self._pressed

    def lower_priority(self) -> None:
        """The job is about to run again: begin no more in a hurry, and what is under way yields."""
        self._hurry_s, self._sought = -inf, None
        if self._rush is not None and (thread := self._rush.native_id) is not None:
            with suppress(OSError):  # it is over
                os.setpriority(os.PRIO_PROCESS, thread, NICE)
            self._keeper.lower_priority(NICE)

    @property
    def _pressed(self) -> bool:
        return time.monotonic() < self._hurry_s and not self._over.is_set()

    def newest(self) -> dict[str, float]:
        """Return the values of one checkpoint that no frame has yet, `{}` if there is none."""
        return self._news.frame()

    # ── for an action ─────────────────────────────────────────────────────────────────────────────

    def prepare(self, name: str) -> None:
        """Make sure that a checkpoint can be put back, while the job still runs.

        It is unhurt where the job looks for it, or its pinned copy is, and is copied to beside.
        What is newer lies where it can be moved.

        Raises:
            StoreError: see `put_back`; the job's own files are as they were.
        """
        self._restorer.prepare(name)

    def put_back(self, name: str) -> dict[str, Any]:
        """Put a verified checkpoint to where the job looks for it; the job must not run.

        The job's own files that are newer (by step or by time of saving) or bad are moved away, so
        that a job that takes the newest takes this one. A second call finds nothing to do. What
        still lies there unchanged stays; else the pinned copy takes its place, if its hashes are
        those that were verified. After `prepare` this takes moments.

        Returns:
            `path`; `moved`: where what was moved is now; `probe_batch`: if it told.

        Raises:
            StoreError: it is unknown, not verified, damaged, or cannot be written.
        """
        return self._restorer.put_back(name)

    # ── what the threads do ───────────────────────────────────────────────────────────────────────

    def look(self, *, closely: bool = False, ended: bool = False) -> bool:
        """Look once what is there; `closely` also at what was verified already.

        Once the job has `ended`, what is there is complete.
        """
        with self._keeper.lock:
            now_s, wall = time.monotonic(), clock.wall()
            changes = self._watch.look(self._moment, now_s, wall, closely=closely, ended=ended)
            for entry in changes.lost:
                self._keeper.lost(entry)
            dropped = self._keeper.hold(changes.ready)
            self._ready = self._keeper.holds.with_held(self._register.entries, changes.ready)
            if changes.any or dropped:
                self._keeper.write()
            for entry in changes.bad:
                self._news.bad(entry)
            for entry in changes.alien:
                self._news.alien(entry)
        return False

    def work(self) -> bool:
        """Do the most urgent piece of work; return whether there was any."""
        self._keeper.look_at_code()
        self._keeper.drop(self._judged, self._moment.suspects)
        if self._sought is not None or time.monotonic() < self._rest_s:
            return False
        with self._working:
            began_s = time.monotonic()
            if self._keeper.overtaken:  # what is written that often is no news for long
                self.look()
            with self._keeper.lock:
                ready = [entry for entry in self._ready if entry.state == FOUND]
                self._ready = ready[:-1]
            if ready:
                self._keeper.take(ready[-1])
            elif self._test_s and began_s - self._tested_s >= self._test_s:
                self._tested_s = began_s
                self._keeper.test()
            else:
                return False
        now_s = time.monotonic()
        self._rest_s = now_s + (now_s - began_s) * (1.0 / self._share - 1.0)
        return True

    def _seek(self, before: int) -> None:
        """See `seek`."""
        try:
            self._keeper.cancel()
            with self._working:
                self.look()
                while self._sought == before and not self._over.is_set():
                    if not self._took_sought(before):
                        break
        except Exception as error:  # the guard may fail, the run may not
            told = f"the checkpoint guard failed: {type(error).__name__}: {error}"
            self._news.say(told, once=told)
        finally:
            if self._sought == before:
                self._sought = None

    def _took_sought(self, before: int) -> bool:
        """Verify the newest that can serve; return whether another one should be."""
        with self._keeper.lock:
            able = [e for e in self._ready if e.state == FOUND and e.earliest < before]
            self._ready = [e for e in self._ready if e not in able[-1:]]
        if not able:
            return False
        step = f"of step {able[-1].step}" if able[-1].step >= 0 else "of an unknown step"
        sentence = f"checkpoint {able[-1].id} {step} is verified at once"
        self._news.say(f"{sentence}: a relaunch waits for it", once=sentence)
        self._keeper.take(able[-1], awaited=True)
        return able[-1].state != VERIFIED

    def _begin(self, thread: threading.Thread) -> bool:
        try:
            thread.start()
        except RuntimeError as error:  # at the limit of processes and threads
            told = f"the checkpoint guard failed: {error}; not every checkpoint is verified"
            self._news.say(told, once=told)
            return False
        return True

    def _hurried(self, above: float, before: float) -> None:
        """See `verify_now`; what was under way, perhaps from a copy, comes to its end first."""
        began_s = time.monotonic()
        with self._keeper.lock:
            self._look_out()
            ready = [e for e in self._register.entries if e in self._ready or e.state == COPIED]
            ready = [e for e in ready[::-1] if e.step > above and e.earliest < before]
        for entry in ready:
            late = time.monotonic() > began_s + self._soon_s
            if not self._pressed or (late and any(e.state == VERIFIED for e in ready)):
                return
            with self._working:
                if entry.state == FOUND:
                    self._keeper.take(entry, urgent=True)

    def _look_out(self) -> None:
        """Take up all that the job left; the first look may only find it."""
        self.look(ended=True)
        self.look(ended=True)

    def _run(self, what: Callable[[], bool], wake: threading.Event) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # this thread's alone
        while not self._over.is_set():
            more, began_s = False, time.monotonic()
            try:
                more = what()
            except Exception as error:  # the guard may fail, the run may not
                told = f"the checkpoint guard failed: {type(error).__name__}: {error}"
                self._news.say(told, once=told)
            took_s = time.monotonic() - began_s
            if not more:  # a pattern that leads through a large tree is followed less often
                self._over.wait(max(min(self._every_s, LEAST_S), took_s))
                wake.wait(max(self._every_s, IDLE * took_s))
            if wake is not self._over:
                wake.clear()
