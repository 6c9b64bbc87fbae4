"""Follows checkpoints from the first sight of a file to the moment in which all of it is there.

What the job tells is trusted for its step and its file, never for being complete. Looks at names,
sizes and times only; whoever owns it calls `look` about once a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import discovery
from .ownership import CONTESTED, FOREIGN, OwnershipResolver
from .registry import BAD, COPIED, FOUND, UNVERIFIED, VANISHED, VERIFIED, Entry, Register, Stamp
from .save_report import RunPosition, SaveReport

SETTLED_EVERY = 10  # looks between two at what was verified already: a network disk is slow
PATIENCE_S = 60.0  # for files that are missing, and for the last name of one that is renamed
METRICS = (
    *("train_loss_raw", "train_loss_ema", "val_loss", "grad_global_norm"),
    *("learning_rate", "tokens_seen"),
)
UNSEEN = "it went away before it was verified"
PART = "each rank wrote a file of its own; name their directory in job.checkpoints.glob"


@dataclass
class _Waiting:
    since_s: float
    told: bool = False
    mark: discovery.FileIdentity | None = None
    ranks: int = 1
    missed: bool = False


@dataclass
class Changes:
    """What one look came to.

    `ready` to be verified, `lost` from its path, found to be `bad`, or not the job's own (`alien`).
    """

    ready: list[Entry] = field(default_factory=list)
    lost: list[Entry] = field(default_factory=list)
    bad: list[Entry] = field(default_factory=list)
    alien: list[Entry] = field(default_factory=list)
    any: bool = False


class Watch:
    """Keeps the register's entries true to what is on the disk.

    Args:
        patterns: where checkpoints are; relative ones from `cwd`.
        settle_s: how long what nobody told of must have been still.
        owners: tells what of it is another job's.
        held: whether the files of an entry, as they were last seen, are held elsewhere too.
    """

    def __init__(
        self,
        register: Register,
        patterns: Sequence[str],
        cwd: Path,
        settle_s: float,
        owners: OwnershipResolver,
        held: Callable[[Entry], bool],
    ) -> None:
        self._register = register
        self._patterns = patterns
        self._cwd = cwd
        self._settle_s = settle_s
        self._owners = owners
        self._held = held
        self._told: deque[SaveReport] = deque()
        self._waiting: dict[str, _Waiting] = {}
        self._by_step: dict[tuple[int, int], dict[int, Entry]] = {}
        self._looks = 0
        if register.fresh:
            for path in discovery.matches(patterns, cwd):
                if look := discovery.stamp(path):
                    register.before[path] = look

    def told(self, saved: SaveReport) -> None:
        """The job tells of a save; the next look will find it. For any thread."""
        self._told.append(saved)

    def look(
        self,
        moment: RunPosition,
        now_s: float,
        wall: str,
        *,
        closely: bool = False,
        ended: bool = False,
    ) -> Changes:
        """Look at everything once.

        Args:
            now_s: of a clock that only goes forward.
            wall: UTC, for entries that are new.
            closely: also at what was verified already.
            ended: the job writes no more, so nothing has to settle.
        """
        changes = Changes()
        matched = discovery.matches(self._patterns, self._cwd)
        while self._told:
            self._take(self._told.popleft(), matched, now_s, changes)
        self._owners.look(matched)
        self._looks += 1
        closely = closely or self._looks % SETTLED_EVERY == 0
        for entry in [e for e in self._register.entries if e.there]:
            if entry.state == FOUND:
                self._follow(entry, now_s, 0.0 if ended else self._settle_s, changes)
            elif entry.how == FOREIGN:
                if closely and discovery.stamp(entry.path) != entry.stamp:
                    self._forget(entry, changes)
            elif (closely or entry.state == COPIED) and discovery.stamp(entry.path) != entry.stamp:
                self._lose(entry, changes)
        for entry in self._register.entries if closely else ():
            if entry.state in (COPIED, VERIFIED, BAD) and (entry.there or entry.pinned):
                self._disown(entry, changes)
        for path in matched:
            self._find(path, matched, moment, now_s, wall, changes)
        found = {e.id for e in self._register.entries if e.state in (FOUND, COPIED)}
        self._waiting = {name: w for name, w in self._waiting.items() if name in found}
        return changes

    # ── new ones ──────────────────────────────────────────────────────────────────────────────────

    def _find(
        self,
        path: str,
        matched: Sequence[str],
        moment: RunPosition,
        now_s: float,
        wall: str,
        changes: Changes,
    ) -> None:
        if self._register.at(path) is not None or discovery.whole(path, matched) != path:
            return
        look = discovery.stamp(path)
        if look is None or look == self._register.before.get(path):
            return
        entry = self._register.add(path, step=moment.step, attempt=moment.attempt, saved=wall)
        _see(entry, look)
        entry.values = _told_of(moment.values)
        self._waiting[entry.id] = _Waiting(now_s, ranks=moment.ranks)
        changes.any = True

    def _take(
        self, saved: SaveReport, matched: Sequence[str], now_s: float, changes: Changes
    ) -> None:
        named = discovery.named(saved.path, saved.mark) or saved.path
        path = discovery.whole(named, matched)
        entry = self._register.at(path) or self._by_inode(saved)
        self._owners.told(saved)
        if entry is not None and entry.how in (FOREIGN, CONTESTED):
            entry.state, entry.problems = FOUND, []
        if entry is not None and entry.state != FOUND:
            if discovery.stamp(entry.path) == entry.stamp:  # told of late, or by another rank too
                if entry.state == COPIED:
                    _name(entry, saved)
                self._part(saved, entry, changes)
                return
            self._lose(entry, changes)  # written anew, or its inode is another file's by now
            entry = None
        if entry is not None and self._replaced(entry, discovery.stamp(entry.path)):
            entry = None
        if entry is not None and discovery.is_partial(entry.name):
            waiting = self._waiting.get(entry.id)
            if waiting is not None and waiting.mark != saved.mark:
                entry = None  # the name is used again before the last one got its own
        if entry is None:
            entry = self._register.add(path)
            _see(entry, discovery.stamp(path) or ())
        _name(entry, saved)
        self._waiting[entry.id] = _Waiting(now_s, True, saved.mark, saved.ranks)
        self._part(saved, entry, changes)
        changes.any = True

    def _by_inode(self, saved: SaveReport) -> Entry | None:
        """Return what was found under another name before the job told of it."""
        if saved.mark is None:
            return None
        for entry in reversed(self._register.entries):
            if entry.there and len(entry.stamp) == 1 and entry.stamp[0][3] == saved.mark.look[-1]:
                near = Path(entry.path).parent == Path(saved.path).parent
                return entry if near and discovery.is_what(entry.path, saved.mark) else None
        return None

    def _part(self, saved: SaveReport, entry: Entry, changes: Changes) -> None:
        """Several ranks tell of one step: a file of each is no checkpoint."""
        ranks = self._by_step.setdefault((saved.attempt, saved.step), {})
        ranks[saved.rank] = entry
        while len(self._by_step) > 8:  # steps; ranks save at about the same time
            del self._by_step[next(iter(self._by_step))]
        if len({each.id for each in ranks.values()}) < 2:
            return
        for part in ranks.values():
            if part.state == VERIFIED:
                changes.lost.append(part)
            part.state, part.problems = UNVERIFIED, [PART]

    # ── known ones ────────────────────────────────────────────────────────────────────────────────

    def _follow(self, entry: Entry, now_s: float, settle_s: float, changes: Changes) -> None:
        waiting = self._waiting.setdefault(entry.id, _Waiting(now_s))
        look = discovery.stamp(entry.path)
        if look is None or discovery.is_partial(entry.name):
            named = discovery.named(entry.path, waiting.mark, entry.stamp)
            if named is not None and named != entry.path:
                entry.path, look = named, discovery.stamp(named)
                changes.any = True
        still_s = now_s - waiting.since_s
        if self._replaced(entry, look):
            changes.any = True
        elif look and set(look) < set(entry.stamp) and self._held(entry):
            pass  # a directory that is being removed
        elif look is None or discovery.is_partial(entry.name):
            # It was there once: gone is gone, unless it was just being renamed while we looked.
            gone = look is None and waiting.missed and (entry.stamp or waiting.mark)
            waiting.missed = look is None
            if gone or still_s >= PATIENCE_S or not waiting.told:
                entry.state, entry.problems = VANISHED, [UNSEEN]
                entry.there = False
                changes.any = True
        elif look != entry.stamp:
            waiting.since_s = now_s
            _see(entry, look)
        elif waiting.told or still_s >= settle_s:
            lacks = discovery.missing(entry.path, look, waiting.ranks)
            if self._disown(entry, changes):
                pass
            elif not lacks:
                changes.ready.append(entry)
            elif still_s >= max(PATIENCE_S, settle_s):
                entry.state, entry.problems = BAD, [lacks]
                changes.bad.append(entry)
                changes.any = True

    def _replaced(self, entry: Entry, look: Stamp | None) -> bool:
        """Whether what lies at its path is another one by now, or nothing, while it is held."""
        if not self._held(entry) or {row[1:] for row in look or ()} & {r[1:] for r in entry.stamp}:
            return False
        entry.there = False
        return True

    def _disown(self, entry: Entry, changes: Changes) -> bool:
        """Return whether it is not the job's own; then it is nothing to go back to, or to move."""
        how, why = self._owners.verdict(entry)
        if how:
            if entry.state == VERIFIED:
                changes.lost.append(entry)
            entry.state, entry.how, entry.problems = UNVERIFIED, how, [why]
            changes.alien.append(entry)
            changes.any = True
        return bool(how)

    def _forget(self, entry: Entry, changes: Changes) -> None:
        """What another job wrote there is gone; what it writes next is looked at anew."""
        entry.there = False
        if not entry.pinned:
            self._register.entries.remove(entry)
        changes.any = True

    def _lose(self, entry: Entry, changes: Changes) -> None:
        entry.there = False
        changes.lost.append(entry)
        changes.any = True


def _see(entry: Entry, look: Stamp) -> None:
    entry.stamp, entry.bytes = look, sum(size for _, size, _, _ in look)


def _name(entry: Entry, saved: SaveReport) -> None:
    entry.step, entry.attempt, entry.how = saved.step, saved.attempt, saved.how
    entry.saved, entry.seconds, entry.python = saved.wall, saved.seconds, saved.python
    entry.values, entry.probe_batch = _told_of(saved.values), saved.probe_batch


def _told_of(values: Mapping[str, float]) -> dict[str, float]:
    """Return what the register tells of a frame."""
    return {name: values[name] for name in METRICS if name in values}
