"""The checkpoint guard: finds the job's checkpoints, verifies them, and keeps good ones.

Threads at the lowest priority: one scans the disk once a second; another verifies (one at a time,
in a process of its own), pins, and removes surplus pins; with `evaluate` a third one measures the
models. The loop only takes their results.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from .. import system
from ..core.model.checkpoint_registry import WEIGHTS_ONLY
from ..core.model.events import Event, Notice
from ..core.model.policy import Checkpoints, Evaluate
from ..errors import StoreError
from ..store import files
from ..system import Thread
from . import discovery
from .discovery import OwnershipResolver
from .registry import (
    BAD,
    COPIED,
    FOUND,
    VANISHED,
    VERIFIED,
    BatchFacts,
    CheckpointNotifications,
    Entry,
    RankCounters,
    Register,
    RunFacts,
    Stamp,
)
from .retention import Retention
from .tracker import CheckpointTracker, RunPosition, save_report
from .verification import LIMIT_S, CheckpointEvaluator, CheckpointVerifier


@dataclass(frozen=True)
class Prepared:
    """A checkpoint ready to be restored: intact at its path with `stamp`, else a staged `copy`."""

    id: str
    stamp: Stamp | None = None
    copy: Path | None = None


@dataclass(frozen=True)
class RestoredCheckpoint:
    """A checkpoint at the path where the job loads it.

    Attributes:
        moved: new paths of the moved files.
        probe_batch, counters: as the job reported them with the save.
    """

    path: str
    moved: list[str]
    probe_batch: BatchFacts | None = None
    counters: RankCounters = field(default_factory=dict)


@dataclass
class Restorer:
    """Restores kept checkpoints.

    Attributes:
        owners: decides which files are another job's; those are never touched.
        scan: updates the register with the job's last writes.
    """

    retention: Retention
    owners: OwnershipResolver
    scan: Callable[[], object]
    _prepared: Prepared | None = field(default=None, init=False)

    def prepare_restore(self, name: str) -> None:
        """See `CheckpointService.prepare`."""
        retention = self.retention
        with retention.lock_pinned_files():
            self.discard_prepared()
            with retention.lock:
                entry = self._verified(name)
            retention.reserved = name
            try:
                self._check_set_aside(entry)
                stamp = discovery.stamp_files(entry.path)
                if self._reads_intact(entry):
                    self._prepared = Prepared(name, stamp=stamp)
                else:
                    self._check_replace(entry)
                    self._prepared = Prepared(
                        name, copy=retention.stage(self._require_pinned(entry))
                    )
            except OSError as error:
                raise StoreError(f"checkpoint {name} cannot be restored: {error}") from error

    def restore(self, name: str) -> RestoredCheckpoint:
        """See `CheckpointService.restore`."""
        retention = self.retention
        with retention.lock_pinned_files(), retention.lock:
            try:
                self.scan()
                entry = self._verified(name)
                moved = [] if self._intact(entry) else self._replace(entry)
                moved += self._set_aside(entry)
            except OSError as error:
                raise StoreError(f"checkpoint {name} cannot be restored: {error}") from error
            finally:
                self.discard_prepared()
            retention.write()
            return RestoredCheckpoint(
                entry.path, [str(path) for path in moved], entry.probe_batch, entry.counters
            )

    def discard_prepared(self) -> None:
        """Remove an unused prepared copy."""
        prepared, self._prepared = self._prepared, None
        self.retention.reserved = ""
        if prepared is not None and prepared.copy is not None:
            self.retention.pins.remove_staged(prepared.copy)

    def _verified(self, name: str) -> Entry:
        entry = self.retention.register.get(name)
        if entry is None or entry.state != VERIFIED:
            state = "is not known" if entry is None else f"is {entry.state}"
            raise StoreError(
                f"checkpoint {name} {state}: only a verified one can be restored",
                hint="list them with `supervise checkpoints RUN`",
            )
        return entry

    def _require_pinned(self, entry: Entry) -> Entry:
        if entry.pinned:
            return entry
        raise StoreError(
            f"checkpoint {entry.id} is no longer in {entry.path}, and was not pinned",
            hint="list the pinned ones with `supervise checkpoints RUN`",
        )

    def _intact(self, entry: Entry) -> bool:
        """Whether the verified files are at the job's path."""
        prepared = self._prepared
        if prepared is not None and prepared.id == entry.id:
            return (
                prepared.stamp is not None and discovery.stamp_files(entry.path) == prepared.stamp
            )
        return self._reads_intact(entry)

    def _reads_intact(self, entry: Entry) -> bool:
        """Whether the files at the job's path have the verified hashes; unreadable ones do not."""
        try:
            return entry.present and not self.retention.pins.explain_differences(
                entry, Path(entry.path)
            )
        except InterruptedError:
            raise
        except OSError:
            return False

    def _replace(self, entry: Entry) -> list[Path]:
        retention, prepared = self.retention, self._prepared
        self._check_replace(entry)
        copy = prepared.copy if prepared is not None and prepared.id == entry.id else None
        moved = retention.pins.replace_job_file(
            entry, copy or retention.stage(self._require_pinned(entry))
        )
        for sibling in retention.register.entries:
            if sibling.path == entry.path and sibling.present and sibling is not entry:
                self._mark_moved(sibling)
        entry.present, entry.stamp = True, discovery.stamp_files(entry.path) or ()
        return [] if moved is None else [moved]

    def _set_aside(self, entry: Entry) -> list[Path]:
        """Move checkpoints that are newer than `entry`, or bad, out of the job's way."""
        moved = []
        for sibling, newer in self._own_others(entry):
            if sibling.present and (newer or sibling.state == BAD):
                path = Path(sibling.path)
                if path.exists():
                    moved.append(self.retention.pins.move_aside(path, sibling.id))
                self._mark_moved(sibling)
            elif newer and sibling.state == FOUND and not sibling.present:  # only held
                self._mark_moved(sibling)
        return moved

    def _own_others(self, entry: Entry) -> list[tuple[Entry, bool]]:
        """Return the job's other checkpoints, each with whether its step or save is newer."""
        entries = list(self.retention.register.entries)
        index = entries.index(entry)
        own_others = [
            (i, e) for i, e in enumerate(entries) if e is not entry and self.owners.is_own(e)
        ]
        return [(sibling, i > index or sibling.step > entry.step) for i, sibling in own_others]

    def _check_replace(self, entry: Entry) -> None:
        """Raise StoreError if the file at its path belongs to another run."""
        with self.retention.lock:
            run = self.owners.claiming_run(discovery.stamp_files(entry.path) or ())
        if run:
            raise StoreError(
                f"checkpoint {entry.id} is not restored: the run {run} has written {entry.path} "
                "since; give each job a checkpoint directory of its own"
            )

    def _check_set_aside(self, entry: Entry) -> None:
        """Check that the files in the way can be moved. Raises OSError.

        A move needs write permission for the directory, and no disk space.
        """
        with self.retention.lock:
            own_others = self._own_others(entry)
            paths = [
                Path(o.path) for o, newer in own_others if o.present and (newer or o.state == BAD)
            ]
        for folder in {path.parent for path in paths if path.exists()}:
            trial = files.hidden_name(folder / "supervise")
            try:
                os.close(files.create_file(trial))
                trial.unlink()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise

    def _mark_moved(self, entry: Entry) -> None:
        """Record that the files were moved from the job's path."""
        entry.present = False
        if entry.state == VERIFIED and not entry.pinned:
            self.retention.mark_unavailable(entry, "it was set aside")
        elif entry.state == FOUND:
            entry.state, entry.problems = VANISHED, ["it was set aside before it was verified"]


_log = logging.getLogger(__name__)
EVERY_S = 1.0
IDLE = 20.0  # pause between two scans, in durations of the last scan; project default
LEAST_S = 0.25  # shortest pause, also after a report of a save; project default
NICE = 19
SHARE = 0.5  # project default
CLOSE_S = 2.0  # for work under way at the end of the run; the disk may hang
VERIFY_NOW_S, SOON_S = 60.0, 10.0  # after the end of a job; project defaults


class CheckpointService:
    """Guards the checkpoints of one run, from `start` to `close`.

    The loop calls `on_save` for each notice `checkpoint-saved`, `poll` for events, and
    `frame_values` for the leading rank's next frame: `checkpoint_ok` and `checkpoint_size`, once
    per checkpoint. None of the three blocks. Events have kind `checkpoint`, with data `{"id",
    "step", "attempt", "path", "ok", "bytes", "seconds", "problems"}`, when a checkpoint was
    verified, is bad, or is no longer available; kind `note` is for people.

    The thread of an action calls `prepare_restore(id)`, which may take as long as a copy, then
    `restore(id)`.

    Args:
        settings: the policy's `job.checkpoints`.
        run: the run directory.
        cwd: the job's working directory.
        position: returns where the run is; called by `on_save`, and by `poll` every `every_s`.
        facts: the manifest's facts of the run: its command, its policy.
        code: returns the version of the job's code for the manifest; may wait for it.
        data: files whose hashes belong into a manifest, the policy's `job.manifest`.
        runs: another directory of runs, besides the parent of `run`.
        every_s: between two scans. limit_s: see `verification.LIMIT_S`. soon_s: see `verify_now`.
        share: of the time that may be spent verifying, and of that which may be spent evaluating.
            If the job saves faster, only the newest checkpoints are.

    Attributes:
        evaluator: of the models, None without `add_evaluator`.

    Raises:
        StoreError: the register of this run cannot be read.
    """

    def __init__(
        self,
        settings: Checkpoints,
        run: Path,
        cwd: Path,
        position: Callable[[], RunPosition],
        *,
        facts: RunFacts | None = None,
        code: Callable[[], object] = dict,
        data: Sequence[str] = (),
        runs: Path | None = None,
        every_s: float = EVERY_S,
        limit_s: float = LIMIT_S,
        share: float = SHARE,
        soon_s: float = SOON_S,
    ) -> None:
        self._get_position, self._every_s = position, every_s
        self._retest_s: float | None = settings.restore_test
        self._register, self._notifications = Register(run), CheckpointNotifications()
        self._kept = Retention(
            self._register,
            self._notifications,
            run,
            keep_good=settings.keep_good,
            link=settings.pin == "link",
        )
        self._verifier = CheckpointVerifier(
            self._kept,
            cwd,
            settings.verify,
            limit_s=limit_s,
            facts=facts or RunFacts(),
            code=code,
            data=tuple(data),
        )
        patterns = settings.glob
        owners = OwnershipResolver(self._register, patterns, cwd, run, runs)
        self._tracker = CheckpointTracker(
            self._register, patterns, cwd, settings.settle, owners, self._kept.holds.is_intact
        )
        self._restorer = Restorer(self._kept, owners, lambda: self.scan(closely=True))
        self._ready: list[Entry] = []
        self._position = RunPosition()
        self._judged: frozenset[str] = frozenset()
        self._polled_s = self._rest_until_s = self._urgent_until_s = -inf
        self._retested_s, self._share, self._soon_s = time.monotonic(), share, soon_s
        self._urgent_thread: threading.Thread | None = None
        self._patience_s, self._work_done, self._looked_s = 0.0, 0.0, -inf  # see `_be_patient`
        self._awaited: int | None = None  # a rollback waits for a checkpoint before this step
        self._candidates = (-1, 0)  # before which step, and how many without a verdict
        self._verifying = threading.Lock()  # one at a time
        self._closed, self._wake = threading.Event(), threading.Event()
        self.evaluator: CheckpointEvaluator | None = None
        self._threads = [
            self._thread("checkpoints", self.scan, self._wake),
            self._thread("verify", self.verify_next, self._closed),
        ]

    def _thread(self, name: str, work: Callable[[], bool], wake: threading.Event) -> Thread:
        return Thread(target=self._run, args=(work, wake), name=name, daemon=True)

    def add_evaluator(
        self, settings: Evaluate, cwd: Path, free_memory: Callable[[], int | None] = lambda: None
    ) -> None:
        """Evaluate what is verified, in a thread of its own; see `CheckpointEvaluator`."""
        self.evaluator = CheckpointEvaluator(self._kept, cwd, settings, free_memory, self._share)
        work = self.evaluator.evaluate_newest
        self._threads.append(self._thread("evaluate", work, self._closed))

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            self._start(thread)

    def close(self) -> None:
        """Stop; cancel a verification or copy under way. Safe to repeat."""
        self._closed.set()
        self._wake.set()
        self._kept.closed.set()
        self._verifier.process.close()
        if self.evaluator is not None:
            self.evaluator.process.close()
        self._restorer.discard_prepared()
        last_scan = Thread(target=self._scan_ended, name="last scan", daemon=True)
        self._start(last_scan)  # a thread, because the disk may hang
        until_s = time.monotonic() + CLOSE_S
        for thread in (*self._threads, self._urgent_thread, last_scan):
            if thread is not None and thread.is_alive():
                thread.join(timeout=max(0.0, until_s - time.monotonic()))
        self._kept.close()

    # ── for the loop ──────────────────────────────────────────────────────────────────────────────

    def on_save(self, event: Notice) -> None:
        """Take a notice `checkpoint-saved`. Of its data only `path` is required."""
        self._position = self._get_position()
        if (report := save_report(event, self._position)) is not None:
            self._tracker.on_save(report)
            self._wake.set()

    def scan_soon(self) -> None:
        """Something was written where checkpoints may be. Any thread; does not wait."""
        self._wake.set()

    def resume_after_crash(self, delivered: Mapping[str, bool]) -> None:
        """Continue for a supervisor that died, before `start`; report what it did not deliver.

        Args:
            delivered: by id, whether the newest event that the run took calls it good.
        """
        self._notifications.delivered |= delivered.keys()
        for entry in self._register.entries:
            ok = delivered.get(entry.id)
            if entry.state == VERIFIED and ok is not True:
                self._notifications.report_good(entry, first=ok is None)
            elif entry.state == BAD and ok is not False:
                self._notifications.report_bad(entry)
            elif entry.state == VANISHED and ok:
                self._notifications.report_unavailable(entry, "; ".join(entry.problems))

    def poll(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        if time.monotonic() >= self._polled_s + self._every_s:
            self._polled_s = time.monotonic()
            self._position = self._get_position()
            self._judged = frozenset(self._notifications.delivered) - self._position.on_trial
        return self._notifications.take_events()

    def verify_now(
        self,
        within_s: float = VERIFY_NOW_S,
        *,
        above: float = -inf,
        below: float = inf,
        patient: bool = False,
        newest: bool = False,
    ) -> None:
        """Verify what an ended job left, newest first.

        At normal priority and without pauses, and only checkpoints that may be of a step between
        `above` and `below`, both exclusive. Returns at once; see `is_verifying_now`. Once one is
        good, no older one is started after `soon_s`: large ones take long.

        Args:
            within_s: give up then. patient: not while the verifier works and none is good yet.
            newest: verify nothing that is older than the newest good one.
        """
        self._urgent_until_s, self._awaited = time.monotonic() + within_s, None
        self._patience_s = within_s if patient else 0.0
        self._urgent_thread = Thread(
            target=self._verify_ended, args=(above, below, newest), name="verify now", daemon=True
        )
        self._start(self._urgent_thread)

    def label_under_verification(self) -> str:
        """Return the checkpoint that is being verified, for people; "" for none."""
        entry = self._verifier.current
        return "" if entry is None else f"{entry.label} ({entry.bytes / 1e6:,.1f} MB)"

    def verify_awaited(self, before_step: int) -> None:
        """Verify a checkpoint of a step before this while the job runs: a rollback waits for it.

        At normal priority, newest first, until one is good; a verification at low priority is
        cancelled and repeated later. Returns at once; call it for as long as the rollback waits.
        """
        if self._urgent_thread is None or not self._urgent_thread.is_alive():
            self._awaited = before_step
            self._urgent_thread = Thread(
                target=self._verify_before, args=(before_step,), name="verify awaited", daemon=True
            )
            if not self._start(self._urgent_thread):
                self._awaited = None

    @property
    def is_verifying_awaited(self) -> bool:
        """Whether `verify_awaited` is under way; if not, `poll` has its result."""
        return self._awaited is not None

    def count_unverified(self, before_step: int) -> int | None:
        """Return how many without a verdict `verify_awaited` may still take, None if unknown.

        0 only when it has looked at all; its last verdict may still have to be polled.
        """
        step, remaining = self._candidates
        return (
            None
            if step != before_step or (not remaining and self.is_verifying_awaited)
            else remaining
        )

    @property
    def is_verifying_now(self) -> bool:
        """Whether `verify_now` is under way and in time; if not, `poll` has its result."""
        alive = self._urgent_thread is not None and self._urgent_thread.is_alive()
        if alive and self._patience_s and time.monotonic() >= self._looked_s + self._every_s:
            self._be_patient()
        return alive and self._is_urgent

    def _be_patient(self) -> None:
        """Postpone the end of `verify_now` if the verifier has worked since the last look."""
        self._looked_s = time.monotonic()
        work_s = self._verifier.process.activity_total()
        works = abs(work_s - self._work_done) >= 1.0  # a start or an end of one is work, too
        self._work_done = work_s if works else self._work_done
        if works and self._is_urgent and not any(map(_is_resumable, [*self._register.entries])):
            self._urgent_until_s = self._looked_s + self._patience_s

    def end_urgent_verifications(self) -> None:
        """Start no more urgent verifications: the job is about to run again."""
        self._urgent_until_s, self._patience_s, self._awaited = -inf, 0.0, None
        thread = self._urgent_thread
        if thread is not None and thread.native_id is not None:
            with suppress(OSError):  # already ended
                os.setpriority(os.PRIO_PROCESS, thread.native_id, NICE)
            self._verifier.process.lower_priority(NICE)

    @property
    def _is_urgent(self) -> bool:
        return time.monotonic() < self._urgent_until_s and not self._closed.is_set()

    def folder(self) -> Path | None:
        """Return where the newest checkpoint lies, None before the first one. Any thread."""
        entries = self._register.entries
        return Path(entries[-1].path).parent if entries else None

    def frame_values(self) -> dict[str, float]:
        """Return the metrics of one checkpoint that is in no frame yet, `{}` if there is none."""
        return self._notifications.frame()

    # ── for an action ─────────────────────────────────────────────────────────────────────────────

    def prepare_restore(self, name: str) -> None:
        """Make sure that a checkpoint can be restored, while the job still runs.

        It is intact at the job's path, or its pinned copy is and is copied beside it; newer files
        can be moved.

        Raises:
            StoreError: see `restore`; the job's own files are unchanged.
        """
        self._restorer.prepare_restore(name)

    def restore(self, name: str) -> RestoredCheckpoint:
        """Restore a verified checkpoint to the path where the job loads it; the job must not run.

        The job's own newer files (by step or by time of the save) and bad ones are moved away, so
        that a job that loads the newest loads this one. An unchanged file stays; else the pinned
        copy replaces it, if it has the verified hashes. Idempotent, and fast after `prepare`.

        Raises:
            StoreError: it is unknown, not verified, damaged, or cannot be written.
        """
        return self._restorer.restore(name)

    def checkpoint_origin(self, name: str) -> tuple[str, int, str | None]:
        """Return a checkpoint's path, its bytes, and the interpreter that wrote it if it is known.

        Raises:
            StoreError: it is unknown.
        """
        with self._kept.lock:
            entry = self._register.get(name)
        if entry is None:
            raise StoreError(f"checkpoint {name} is not known")
        return entry.path, entry.bytes, entry.python

    # ── threads ───────────────────────────────────────────────────────────────────────────────────

    def scan(self, *, closely: bool = False, ended: bool = False) -> bool:
        """Scan the disk once. Always returns False: there is no more work.

        Args:
            closely: check verified checkpoints as well. ended: the job has ended, so its files are
                complete.
        """
        with self._kept.lock:
            now_s, wall = time.monotonic(), system.wall_time()
            changes = self._tracker.scan(self._position, now_s, wall, closely=closely, ended=ended)
            for entry in changes.lost:
                self._kept.on_lost(entry)
            dropped = self._kept.update_holds(changes.ready)
            self._ready = self._kept.holds.verifiable_entries(self._register.entries, changes.ready)
            if changes.any or dropped:
                self._kept.write()
            for entry in changes.bad:
                self._notifications.report_bad(entry)
            for entry in changes.foreign:
                self._notifications.report_foreign(entry)
        return False

    def verify_next(self) -> bool:
        """Do the most urgent piece of work; return whether there was any."""
        self._kept.unpin_old(self._judged, self._position.suspects)
        if self._awaited is not None or time.monotonic() < self._rest_until_s:
            return False
        with self._verifying:
            start_s = time.monotonic()
            if self._kept.overwrites:  # the last scan is outdated soon for such paths
                self.scan()
            with self._kept.lock:
                ready = [entry for entry in self._ready if entry.state == FOUND]
                self._ready = ready[:-1]
            if ready:
                self._verifier.verify(ready[-1])
            elif self._retest_s and start_s - self._retested_s >= self._retest_s:
                self._retested_s = start_s
                self._verifier.retest_newest_pin()
            else:
                return False
        now_s = time.monotonic()
        self._rest_until_s = now_s + (now_s - start_s) * (1.0 / self._share - 1.0)
        return True

    def _verify_before(self, before_step: int) -> None:
        """See `verify_awaited`."""
        try:
            self._verifier.cancel_keeping_copy(before_step)
            while not self._verifying.acquire(timeout=LEAST_S):
                self._verifier.cancel_keeping_copy(
                    before_step
                )  # its process may just have been started
            try:
                self.scan()
                while self._awaited == before_step and not self._closed.is_set():
                    if not self._verify_newest_before(before_step):
                        break
                self._verifier.release_copies()
            finally:
                self._verifying.release()
        except Exception as error:  # the guard may fail, the run may not
            self._report_failure(error)
        finally:
            if self._awaited == before_step:
                self._awaited = None

    def _verify_newest_before(self, before_step: int) -> bool:
        """Verify the newest candidate; return whether to try another one."""
        with self._kept.lock:
            candidates = [e for e in self._register.entries if e.state in (FOUND, COPIED)]
            candidates = [e for e in candidates if e.earliest < before_step]
            able = [e for e in candidates if e in self._ready or e.state == COPIED]
            self._ready = [e for e in self._ready if e not in able[-1:]]
            self._candidates = before_step, len(candidates)
        if not able:
            return False
        sentence = f"checkpoint {able[-1].label} is verified at once"
        self._notifications.queue_note(f"{sentence}: a relaunch waits for it", once=sentence)
        self._verifier.verify(able[-1], awaited=True)
        return not _is_resumable(able[-1])

    def _verify_ended(self, above: float, below: float, newest: bool) -> None:
        """See `verify_now`; a verification under way, perhaps of a copy, finishes first."""
        start_s = time.monotonic()
        with self._kept.lock:
            self._scan_ended()
            entries = self._register.entries
            good = [n for n, e in enumerate(entries) if newest and e.present and _is_resumable(e)]
            ready = entries[good[-1] + 1 :] if good else entries
            ready = [e for e in ready if e in self._ready or e.state == COPIED]
            ready = [e for e in ready[::-1] if e.step > above and e.earliest < below]
        for newer, entry in enumerate(ready):
            late = newest or time.monotonic() > start_s + self._soon_s
            if not self._is_urgent or (late and any(_is_resumable(e) for e in ready[:newer])):
                return
            with self._verifying:
                if entry.state == FOUND:
                    self._verifier.verify(entry, urgent=True)

    def _scan_ended(self) -> None:
        """Find all files that the job left; the first scan may only see them."""
        self.scan(ended=True)
        self.scan(ended=True)

    def _start(self, thread: threading.Thread) -> bool:
        try:
            thread.start()
        except RuntimeError as error:  # at the limit of processes and threads
            self._report_failure(error)
            return False
        return True

    def _report_failure(self, error: Exception) -> None:
        _log.error("the checkpoint guard failed", exc_info=error)
        sentence = (
            f"the checkpoint guard failed: {error}; training goes on, but not every checkpoint is "
            "verified: see `supervise checkpoints RUN`"
        )
        self._notifications.queue_note(sentence, once=sentence)

    def _run(self, work: Callable[[], bool], wake: threading.Event) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # of this thread only
        while not self._closed.is_set():
            has_more, start_s = False, time.monotonic()
            try:
                has_more = work()
            except Exception as error:  # the guard may fail, the run may not
                self._report_failure(error)
            took_s = time.monotonic() - start_s
            if not has_more:  # a pattern over a large tree is scanned less often
                self._closed.wait(max(min(self._every_s, LEAST_S), took_s))
                wake.wait(max(self._every_s, IDLE * took_s))
            if wake is not self._closed:
                wake.clear()


def _is_resumable(entry: Entry) -> bool:
    """Whether a relaunch needs no other."""
    return entry.state == VERIFIED and entry.resumable != WEIGHTS_ONLY
