"""Writes events and decisions to disk, and stops acting when the disk fails.

If the log cannot be written, the run is still watched, but no action is taken. `trouble` says why,
from the first failure on. The journal ends there, since one with a gap could not be replayed, and
the audit log records that as far as it can still be written.

A disk without space is no such failure yet: both files have a reserve, see `check_space`.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..core.model.decisions import Decision, decision_record
from ..core.model.events import Event, Frame
from ..core.model.redaction import Redactor
from ..errors import FULL, StoreError, disk_full_reason
from .audit import RESERVE_BYTES, Audit
from .journal import MAX_RESERVE, Journal

# On disk before the next step, with the events that caused them.
SYNCED = frozenset({"intent", "commit", "abort", "in_doubt", "approval_requested", "approval"})
INCOMPLETE = "journal-incomplete"  # `what` of the note in the audit log
WATCHING = "watching only, no action will be taken"
THINNED = "journal-thinned"  # the same, where a limit made it shorter
AUDIT_RESERVE = 2 << 20  # bytes: a hundred incidents of twenty records; project default
LEAST = 64 << 10  # bytes of it: how the run ended must have room, whatever comes; project default
SHARE = 8  # the reserves take an eighth of what is free at most; project default


def incomplete_record(records: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the audit record of the event where the journal ends early, None if there is none.

    One of an earlier epoch does not count: the adopting supervisor continued from that event.
    """
    note, epoch = None, 0
    for r in records:
        note, epoch = (note if r["epoch"] == epoch else None), r["epoch"]
        if r["actor"] == "app" and (r.get("data") or {}).get("what") == INCOMPLETE:
            note = r
    return note


class Shortage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What must become free on a full disk.

    Attributes:
        mount, runs: quoted for a shell. seconds: for which the reserve lasts, where known.
    """

    need_bytes: int
    reserve_bytes: int
    mount: str
    runs: str
    seconds: int | None = None


class Recorder:
    """Writes the journal and the audit log of one run.

    Args:
        now: returns `(at_ns, wall)`.
        show: prints a line on the terminal.

    Attributes:
        on_record: called with each record that was written, as the log has it but for its chain.
        concluded: the record of the run's end was written; nothing may follow it.
    """

    def __init__(
        self,
        journal: Journal,
        audit: Audit,
        now: Callable[[], tuple[int, str]],
        show: Callable[[str], None],
    ) -> None:
        self._journal = journal
        self._audit = audit
        self._now = now
        self._show = show
        self._trouble: str | None = None
        self._step = -1  # of the newest frame
        audit.watch_journal(journal.missing)
        self._redactor = Redactor()
        self._reserves: tuple[int, int] | None = None  # bytes for the journal and the audit log
        self._since = 0, 0  # time, and bytes of the journal, when the reserves were made
        self.concluded = False
        self._no_space = ""  # how the disk said that it is full, "" while it is not
        self.on_record: Callable[[Mapping[str, Any]], None] = lambda record: None

    def redact(self, redactor: Redactor) -> None:
        """Redact secrets from notes from now on; events are redacted before."""
        self._redactor = redactor

    @property
    def has_journal_ended(self) -> bool:
        """Whether the journal has ended before the run: later decisions are not recorded."""
        return self._trouble is not None

    @property
    def trouble(self) -> str | None:
        """Why decisions may not be on disk, None if they are."""
        return self._trouble or self._audit.trouble

    @property
    def unwritten(self) -> int:
        """Number of events that wait to be written."""
        return self._journal.unwritten

    @property
    def no_space(self) -> str:
        """How the disk said that it has no more space, "" while it has some."""
        return self._no_space

    @property
    def reserve_bytes(self) -> tuple[int, int]:
        """What is left of the reserves of journal and audit log."""
        return self._journal.reserve_bytes, self._audit.reserve_bytes

    @property
    def head(self) -> str:
        """`size head` of the audit log, for messages: a later `--witness`."""
        size, head = self._audit.head
        return f"{size} {head}"

    @property
    def journal(self) -> dict[str, Any]:
        """Size and digest of the journal, for a record of the audit log."""
        return self._journal.head

    def record_event(self, event: Event, *, more_follow: bool = False) -> int | None:
        """Write an event and return its number; None if it could not be written.

        After a failure nothing more is written: a journal with a gap could not be replayed.

        Args:
            more_follow: others come at once; it may be written with them, by `flush` or before a
                decision.
        """
        if isinstance(event, Frame):
            self._step = event.step
        if self._audit.trouble is not None:
            self.record_failure(StoreError(self._audit.trouble))
        if self.has_journal_ended:
            return None
        return self._safely(
            lambda: (self._journal.add if more_follow else self._journal.append)(event)
        )

    def flush(self) -> bool:
        """Write the events that wait; return whether all that were taken are written."""
        if self._journal.unwritten and not self.has_journal_ended:
            self._safely(self._flush_journal)
        return not self.has_journal_ended

    def record_decision(self, decision: Decision, event: int | None, at_ns: int) -> int | None:
        """Write a decision of the engine, caused by journal event number `event`.

        Returns:
            The number of its audit record, None when it could not be written.
        """
        if event is not None and not self.flush():
            event = None
        body = decision_record(decision)
        kind, step = decision.kind, decision.step
        del body["kind"], body["step"]
        body["event"] = -1 if event is None else event
        if event is not None and decision.incident is not None:
            self._journal.cite_event(event)
        if kind in SYNCED:
            self._safely(self._sync_journal)
        return self._append(kind, "engine", at_ns, step, body, sync=kind in SYNCED)

    def note(self, kind: str, step: int, reason: str, data: Mapping[str, Any]) -> None:
        """Write a record of the supervisor itself, which replay does not compare."""
        clean = self._redactor
        body = {"reason": clean.text(reason), "data": clean.tree(data)}
        self._append(kind, "app", self._now()[0], step, body, sync=False)
        self.concluded |= kind == "run_end"

    def limit_journal(self, max_bytes: float | None) -> None:
        """Thin one piece of a journal that is over its limit, and record which. Call it often.

        What is on record first: a note that never became true is found out by the digests.
        """
        if max_bytes is None or self.has_journal_ended:
            return
        self._journal.limit(max_bytes)
        if self._journal.size_bytes <= max_bytes:
            return
        try:
            plan = self._journal.plan_next_thinning()
            if plan is None:
                return
            facts = plan.facts
            first, last = facts["events"]
            freed = facts["bytes_before"] - facts["bytes"]
            text = f"frames of events {first} to {last} removed: {freed} bytes over journal.max_gb"
            self.note("note", self._step, text, {"what": THINNED, **facts})
            self._journal.replace_piece(plan)
        except StoreError as error:
            self.record_failure(error)

    def check_space(self, path: Path) -> None:
        """Renew the reserves, and with that find out whether the disk is full. Call it often.

        Args:
            path: of the run; how large they can be depends on what is free there at first.
        """
        if self.has_journal_ended:
            return
        try:
            if self._reserves is None:
                share = shutil.disk_usage(path).free // SHARE
                self._reserves = min(MAX_RESERVE, share), min(AUDIT_RESERVE, max(share // 2, LEAST))
                self._since = self._now()[0], self._journal.size_bytes
            if self._no_space and shutil.disk_usage(path).free < 2 * self._missing_bytes():
                return
            self._journal.reserve(self._reserves[0])
            self._audit.reserve(self._reserves[1])
            self._audit.renew_reserve()
        except OSError as error:
            if error.errno in FULL:
                self.on_full(str(error.strerror))
        else:
            self._no_space = ""

    def shortage(self, path: Path) -> Shortage | None:
        """Return what must become free, and where; None, unless the disk is full."""
        if not self._no_space:
            return None
        mount, (journal, audit) = path.resolve(), self.reserve_bytes
        with suppress(OSError):
            while not mount.is_mount():
                mount = mount.parent
        seconds = (self._now()[0] - self._since[0]) / 1e9
        grown = self._journal.size_bytes - self._since[1]
        return Shortage(
            need_bytes=2 * self._missing_bytes(),
            reserve_bytes=journal + audit,
            mount=shlex.quote(str(mount)),
            runs=shlex.quote(str(path.parent)),
            seconds=round(journal * seconds / grown) if grown > 0 else None,
        )

    def _missing_bytes(self) -> int:
        """Return what the reserves lack."""
        reserve_sizes, (journal, audit) = self._reserves or (0, 0), self.reserve_bytes
        return max(0, reserve_sizes[0] - journal) + max(0, reserve_sizes[1] - audit) + RESERVE_BYTES

    def on_full(self, reason: str) -> None:
        """The disk has no space: the reserve beside the audit log is freed, and shared out."""
        if self._no_space:
            return
        self._no_space = reason
        self._audit.release_reserve()
        with suppress(OSError):
            self._journal.reserve(RESERVE_BYTES // 2)
            self._audit.reserve(RESERVE_BYTES // 4)

    def close(self) -> None:
        """Close both; failures were reported."""
        self.flush()
        try:
            self._journal.close()
        except OSError as error:  # a network file system may report it only now
            self.record_failure(StoreError(f"the journal cannot be closed: {error.strerror}"))
        self._audit.close()

    def record_failure(self, error: StoreError, consequence: str = WATCHING) -> None:
        """Record once why nothing more is recorded; `consequence`: what that means for the run."""
        if self._trouble is None:
            self._trouble = str(error)
            self._no_space = disk_full_reason(error) or self._no_space
            self._show(f"supervise: {error}; {consequence}")
            first = len(self._journal)
            text = f"the journal is incomplete from event {first} on: {error}; no action is taken"
            self.note("note", self._step, text, {"what": INCOMPLETE, "event": first})

    def _append(
        self, kind: str, actor: str, at_ns: int, step: int, body: Mapping[str, Any], *, sync: bool
    ) -> int | None:
        wall = self._now()[1]
        seq = self._safely(
            lambda: self._audit.append(
                kind, actor=actor, at_ns=at_ns, wall=wall, step=step, body=body, sync=sync
            )
        )
        if self._audit.trouble is not None:  # written with the last reserve
            self.record_failure(StoreError(self._audit.trouble))
        if seq is not None:
            head = {"seq": seq, "kind": kind, "actor": actor, "mono_ns": at_ns, "wall": wall}
            self.on_record({**head, "step": step, **body})
        return seq

    def _sync_journal(self) -> int:
        self._journal.sync()
        return len(self._journal)

    def _flush_journal(self) -> int:
        self._journal.flush()
        return len(self._journal)

    def _safely(self, write: Callable[[], int]) -> int | None:
        try:
            return write()
        except StoreError as error:
            self.record_failure(error)
            return None
