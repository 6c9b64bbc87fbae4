"""Follows each checkpoint from its first sight or report until all of its files are complete.

The job's reports are trusted for the step and the file, never for completeness. Reads names, sizes
and times only. The service calls `scan` about once a second.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from .. import system
from ..core.model.checkpoint_registry import is_partial
from ..core.model.events import Notice
from . import discovery
from .discovery import CONTESTED, FOREIGN, FileIdentity, OwnershipResolver
from .registry import (
    BAD,
    COPIED,
    FOUND,
    UNVERIFIED,
    VANISHED,
    VERIFIED,
    BatchFacts,
    Entry,
    RankCounters,
    Register,
    Stamp,
)

CLOSE_EVERY = 10  # scans between two close scans: a network disk is slow
PATIENCE_S = 60.0  # for missing files, and for the final name of a renamed one
VALUES = (
    *("train_loss", "train_loss_raw", "train_loss_ema", "val_loss", "grad_global_norm"),
    *("learning_rate", "tokens_seen"),
)
REMOVED = "it was removed before it was verified"
PART = "each rank wrote a file of its own; name their directory in job.checkpoints.glob"


@dataclass(frozen=True)
class RunPosition:
    """Where the run is.

    Attributes:
        step: of the newest frame, -1 before the first.
        values: of the newest frame of the leading rank.
        suspects: ids of checkpoints that must not be used for a rollback.
        ranks: world size.
        on_trial: ids of checkpoints that may still become suspect.
        first_steps: of the attempts after the first one.
    """

    step: int = -1
    attempt: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    suspects: frozenset[str] = frozenset()
    ranks: int = 1
    on_trial: frozenset[str] = frozenset()
    first_steps: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveReport:
    """One save that the job reported; see `resume.py` of the probe.

    Attributes:
        step: 0-based, the last whole optimizer step before it.
        identity: of the file, None if unknown.
    """

    path: str
    step: int
    attempt: int
    how: str
    rank: int
    ranks: int
    wall: str
    seconds: float | None = None
    identity: FileIdentity | None = None
    python: str | None = None
    probe_batch: BatchFacts | None = None
    evaluation: BatchFacts | None = None
    counters: RankCounters = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)


def save_report(event: Notice, position: RunPosition) -> SaveReport | None:
    """Return the content of a notice `checkpoint-saved`, None if it names no path.

    The notice has the step under way; the save contains the one before.
    """
    data: dict[str, Any] = dict(event.data)
    path, file, seconds = data.get("path"), data.get("file"), data.get("seconds")
    if not isinstance(path, str):
        return None
    identity = None
    if file:
        end_ns = time.time_ns() - (system.monotonic_ns() - event.at_ns)
        start_ns = -inf if seconds is None else end_ns - seconds * 1e9
        stat = (int(file["size"]), int(file["mtime_ns"]), int(file["inode"]))
        identity = FileIdentity(int(file["device"]), stat, start_ns, end_ns)
    return SaveReport(
        path=path,
        step=position.step if event.step is None else event.step - 1,
        attempt=int(data.get("attempt", position.attempt)),
        how=str(data.get("how", "its library")),
        rank=event.rank or 0,
        ranks=int(data.get("ranks", position.ranks)),
        wall=system.wall_time(),
        seconds=seconds,
        identity=identity,
        python=data.get("python"),
        probe_batch=data.get("probe_batch"),
        evaluation=data.get("evaluation"),
        counters=data.get("counters", {}),
        values=data.get("values") or position.values,
    )


@dataclass
class _Pending:
    since_s: float
    reported: bool = False
    identity: FileIdentity | None = None
    ranks: int = 1
    missed: bool = False


@dataclass
class Changes:
    """Result of one scan.

    Entries that are `ready` to be verified, `lost` from their path, `bad` because incomplete, or
    `foreign`: not the job's own.
    """

    ready: list[Entry] = field(default_factory=list)
    lost: list[Entry] = field(default_factory=list)
    bad: list[Entry] = field(default_factory=list)
    foreign: list[Entry] = field(default_factory=list)
    any: bool = False


class CheckpointTracker:
    """Updates the register's entries from the disk and the job's reports.

    Args:
        patterns: of checkpoint paths; relative ones start at `cwd`.
        settle_s: how long an unreported checkpoint must stay unchanged to count as complete.
        owners: decides which checkpoints are another job's.
        is_held: whether hard links keep the files of an entry as last seen.
    """

    def __init__(
        self,
        register: Register,
        patterns: Sequence[str],
        cwd: Path,
        settle_s: float,
        owners: OwnershipResolver,
        is_held: Callable[[Entry], bool],
    ) -> None:
        self._register = register
        self._patterns = patterns
        self._cwd = cwd
        self._settle_s = settle_s
        self._owners = owners
        self._held = is_held
        self._reports: deque[SaveReport] = deque()
        self._pending: dict[str, _Pending] = {}
        self._by_step: dict[tuple[int, int], dict[int, Entry]] = {}
        self._scans = 0
        if register.fresh:
            for path in discovery.find_matches(patterns, cwd):
                if current := discovery.stamp_files(path):
                    register.before[path] = current

    def on_save(self, report: SaveReport) -> None:
        """Queue a save that the job reported for the next scan. Thread-safe."""
        self._reports.append(report)

    def scan(
        self,
        position: RunPosition,
        now_s: float,
        wall: str,
        *,
        closely: bool = False,
        ended: bool = False,
    ) -> Changes:
        """Scan all paths once and update the register.

        Args:
            now_s: monotonic time.
            wall: UTC, for new entries.
            closely: check verified entries as well.
            ended: the job has ended, so files need not settle, and none is added.
        """
        changes = Changes()
        if not position.first_steps.items() <= self._register.first_steps.items():
            self._register.first_steps |= position.first_steps
            changes.any = True
        matched = discovery.find_matches(self._patterns, self._cwd)
        while self._reports:
            self._apply(self._reports.popleft(), matched, now_s, changes)
        self._owners.refresh(matched)
        self._scans += 1
        closely = closely or self._scans % CLOSE_EVERY == 0
        for entry in [e for e in self._register.entries if e.present]:
            if entry.state == FOUND:
                self._follow(entry, now_s, changes, ended=ended)
            elif entry.how == FOREIGN:
                if closely and discovery.stamp_files(entry.path) != entry.stamp:
                    self._forget(entry, changes)
            elif (closely or entry.state == COPIED) and discovery.stamp_files(
                entry.path
            ) != entry.stamp:
                self._lose(entry, changes)
        for entry in self._register.entries if closely else ():
            if entry.state in (COPIED, VERIFIED, BAD) and (entry.present or entry.pinned):
                self._disown(entry, changes)
        for path in matched:
            self._add(path, matched, position, now_s, wall, changes)
        unverified_ids = {e.id for e in self._register.entries if e.state in (FOUND, COPIED)}
        self._pending = {name: p for name, p in self._pending.items() if name in unverified_ids}
        return changes

    # ── new checkpoints ───────────────────────────────────────────────────────────────────────────

    def _add(
        self,
        path: str,
        matched: Sequence[str],
        position: RunPosition,
        now_s: float,
        wall: str,
        changes: Changes,
    ) -> None:
        if (
            self._register.entry_at(path) is not None
            or discovery.find_checkpoint_root(path, matched) != path
        ):
            return
        current = discovery.stamp_files(path)
        if current is None or current == self._register.before.get(path):
            return
        entry = self._register.add(path, step=position.step, attempt=position.attempt, saved=wall)
        _set_stamp(entry, current)
        entry.save = self._save_of(entry, now_s) if entry.step < 0 else 0
        entry.values = _registered(position.values)
        self._pending[entry.id] = _Pending(now_s, ranks=position.ranks)
        changes.any = True

    def _save_of(self, added: Entry, now_s: float) -> int:
        """Return the number of the save of a new entry without a step, see `Entry.save`.

        Its files are found in one scan, or the next one while the one before is still written.
        """
        before = self._register.entries[-2:-1]
        pending = self._pending.get(before[0].id) if before else None
        if pending is None or before[0].attempt != added.attempt or not before[0].save:
            return added.number
        is_beside = Path(before[0].path).parent == Path(added.path).parent
        is_written = is_beside and now_s - pending.since_s < self._settle_s
        return before[0].save if before[0].saved == added.saved or is_written else added.number

    def _apply(
        self, report: SaveReport, matched: Sequence[str], now_s: float, changes: Changes
    ) -> None:
        named = discovery.find_current_path(report.path, report.identity) or report.path
        path = discovery.find_checkpoint_root(named, matched)
        entry = self._register.entry_at(path) or self._by_inode(report)
        self._owners.on_save(report.identity)
        if entry is not None and entry.how in (FOREIGN, CONTESTED):
            entry.state, entry.problems = FOUND, []
        if entry is not None and entry.state != FOUND:
            if (
                discovery.stamp_files(entry.path) == entry.stamp
            ):  # a late report, or one of another rank
                if entry.state == COPIED:
                    _describe(entry, report)
                self._check_ranks(report, entry, changes)
                return
            self._lose(entry, changes)  # overwritten, or its inode was reused
            entry = None
        if entry is not None and self._replaced(entry, discovery.stamp_files(entry.path)):
            entry = None
        if entry is not None and is_partial(entry.name):
            pending = self._pending.get(entry.id)
            if pending is not None and pending.identity != report.identity:
                entry = None  # the temporary name was reused before the last file was renamed
        if entry is None:
            entry = self._register.add(path)
            _set_stamp(entry, discovery.stamp_files(path) or ())
        _describe(entry, report)
        self._pending[entry.id] = _Pending(now_s, True, report.identity, report.ranks)
        self._check_ranks(report, entry, changes)
        changes.any = True

    def _by_inode(self, report: SaveReport) -> Entry | None:
        """Return the entry found under another name before the job reported the save."""
        if report.identity is None:
            return None
        inode = report.identity.stat[-1]
        for entry in reversed(self._register.entries):
            if entry.present and len(entry.stamp) == 1 and entry.stamp[0][3] == inode:
                near = Path(entry.path).parent == Path(report.path).parent
                is_same = near and discovery.is_same_file(entry.path, report.identity)
                return entry if is_same else None
        return None

    def _check_ranks(self, report: SaveReport, entry: Entry, changes: Changes) -> None:
        """Mark files that several ranks wrote for one step: none is a complete checkpoint."""
        ranks = self._by_step.setdefault((report.attempt, report.step), {})
        ranks[report.rank] = entry
        while len(self._by_step) > 8:  # steps; ranks save at about the same time
            del self._by_step[next(iter(self._by_step))]
        if len({part.id for part in ranks.values()}) < 2:
            return
        for part in ranks.values():
            if part.state == VERIFIED:
                changes.lost.append(part)
            part.state, part.problems = UNVERIFIED, [PART]

    # ── known checkpoints ─────────────────────────────────────────────────────────────────────────

    def _follow(self, entry: Entry, now_s: float, changes: Changes, *, ended: bool) -> None:
        settle_s = 0.0 if ended else self._settle_s
        patience_s = 0.0 if ended else max(PATIENCE_S, settle_s)
        pending = self._pending.setdefault(entry.id, _Pending(now_s))
        current = discovery.stamp_files(entry.path)
        if current is None or is_partial(entry.name):
            named = discovery.find_current_path(entry.path, pending.identity, entry.stamp)
            if named is not None and named != entry.path:
                entry.path, current = named, discovery.stamp_files(named)
                changes.any = True
        still_s = now_s - pending.since_s
        if self._replaced(entry, current):
            changes.any = True
        elif current and set(current) < set(entry.stamp) and self._held(entry):
            pass  # the directory is being removed
        elif current is None or is_partial(entry.name):
            # A file that existed is removed, unless this scan caught it during a rename.
            removed = current is None and pending.missed and (entry.stamp or pending.identity)
            pending.missed = current is None
            if removed or still_s >= PATIENCE_S or not pending.reported:
                entry.state, entry.problems, entry.present = VANISHED, [REMOVED], False
                changes.any = True
        elif current != entry.stamp:
            pending.since_s = now_s
            _set_stamp(entry, current)
        elif pending.reported or still_s >= settle_s:
            lacks = discovery.find_missing_files(entry.path, current, pending.ranks)
            if self._disown(entry, changes):
                pass
            elif not lacks:
                changes.ready.append(entry)
            elif still_s >= patience_s:
                entry.state, entry.problems = BAD, [lacks]
                changes.bad.append(entry)
                changes.any = True

    def _replaced(self, entry: Entry, current: Stamp | None) -> bool:
        """Whether the files of a held entry were replaced or removed at its path."""
        if not self._held(entry) or {row[1:] for row in current or ()} & {
            r[1:] for r in entry.stamp
        }:
            return False
        entry.present = False
        return True

    def _disown(self, entry: Entry, changes: Changes) -> bool:
        """Return whether it is not the job's own; such a file is never restored or moved."""
        state, reason = self._owners.ownership_verdict(entry)
        if state:
            if entry.state == VERIFIED:
                changes.lost.append(entry)
            entry.state, entry.how, entry.problems = UNVERIFIED, state, [reason]
            changes.foreign.append(entry)
            changes.any = True
        return bool(state)

    def _forget(self, entry: Entry, changes: Changes) -> None:
        """Drop a changed file of another job; its next content is a new entry."""
        entry.present = False
        if not entry.pinned:
            self._register.entries.remove(entry)
        changes.any = True

    def _lose(self, entry: Entry, changes: Changes) -> None:
        entry.present = False
        changes.lost.append(entry)
        changes.any = True


def _set_stamp(entry: Entry, current: Stamp) -> None:
    entry.stamp, entry.bytes = current, sum(size for _, size, _, _ in current)


def _describe(entry: Entry, report: SaveReport) -> None:
    entry.step, entry.attempt, entry.how = report.step, report.attempt, report.how
    entry.saved, entry.seconds, entry.python = report.wall, report.seconds, report.python
    entry.values, entry.probe_batch = _registered(report.values), report.probe_batch
    entry.evaluation, entry.counters = report.evaluation, dict(report.counters)


def _registered(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a frame that the register records."""
    return {name: values[name] for name in VALUES if name in values}
