"""Writes events and decisions to disk, and stops acting when the disk fails.

If the log cannot be written, the run is still watched, but no action is taken. `trouble` says why,
from the first failure on. The journal ends there, since one with a gap could not be replayed, and
the audit log records that as far as it can still be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core.model.decisions import Decision, record
from ..core.model.events import Event, Frame
from ..core.model.redaction import Redactor
from ..errors import StoreError
from .audit import Audit
from .journal import Journal

# On disk before the next step, with the events that caused them.
SYNCED = frozenset({"intent", "commit", "abort", "in_doubt", "approval_requested", "approval"})
INCOMPLETE = "journal-incomplete"  # `what` of the note in the audit log
THINNED = "journal-thinned"  # the same, where a limit made it shorter


def incomplete(records: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the audit record of the event where the journal ends early, None if there is none.

    One of an earlier epoch does not count: the adopting supervisor continued from that event.
    """
    found, epoch = None, 0
    for r in records:
        found, epoch = (found if r["epoch"] == epoch else None), r["epoch"]
        if r["actor"] == "app" and (r.get("data") or {}).get("what") == INCOMPLETE:
            found = r
    return found


class Recorder:
    """Writes the journal and the audit log of one run.

    Args:
        now: returns `(at_ns, wall)`.
        show: prints a line on the terminal.

    Attributes:
        on_record: called with each record that was written, as the log has it but for its chain.
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
        self.on_record: Callable[[Mapping[str, Any]], None] = lambda record: None

    def redact(self, redactor: Redactor) -> None:
        """Redact secrets from notes from now on; events are redacted before."""
        self._redactor = redactor

    @property
    def ended(self) -> bool:
        """Whether the journal has ended before the run: later decisions are not recorded."""
        return self._trouble is not None

    @property
    def trouble(self) -> str | None:
        """Why decisions may not be on disk, None if they are."""
        return self._trouble or self._audit.trouble

    @property
    def head(self) -> str:
        """`size head` of the audit log, for messages: a later `--witness`."""
        size, head = self._audit.head
        return f"{size} {head}"

    @property
    def journal(self) -> dict[str, Any]:
        """Size and digest of the journal, for a record of the audit log."""
        return self._journal.head

    def event(self, event: Event) -> int | None:
        """Write an event and return its number; None if it could not be written.

        After a failure nothing more is written: a journal with a gap could not be replayed.
        """
        if isinstance(event, Frame):
            self._step = event.step
        if self._audit.trouble is not None:
            self.failed(StoreError(self._audit.trouble))
        if self.ended:
            return None
        return self._safely(lambda: self._journal.append(event))

    def decision(self, decision: Decision, event: int | None, at_ns: int) -> int | None:
        """Write a decision of the engine, caused by journal event number `event`.

        Returns:
            The number of its audit record, None when it could not be written.
        """
        body = record(decision)
        kind, step = body.pop("kind"), body.pop("step")
        body["event"] = -1 if event is None else event
        if event is not None and decision.incident is not None:
            self._journal.cite(event)
        if kind in SYNCED:
            self._safely(self._sync_journal)
        return self._append(kind, "engine", at_ns, step, body, sync=kind in SYNCED)

    def note(self, kind: str, step: int, reason: str, data: Mapping[str, Any]) -> None:
        """Write a record of the supervisor itself, which replay does not compare."""
        clean = self._redactor
        body = {"reason": clean.text(reason), "data": clean.tree(data)}
        self._append(kind, "app", self._now()[0], step, body, sync=False)

    def limit_journal(self, max_bytes: float | None) -> None:
        """Thin one piece of a journal that is over its limit, and record which. Call it often.

        What is on record first: a note that never became true is found out by the digests.
        """
        if max_bytes is None or self.ended:
            return
        self._journal.limit(max_bytes)
        if self._journal.size_bytes <= max_bytes:
            return
        try:
            plan = self._journal.plan_thinning()
            if plan is None:
                return
            facts = plan.facts
            first, last = facts["events"]
            freed = facts["bytes_before"] - facts["bytes"]
            text = f"frames of events {first} to {last} removed: {freed} bytes over journal.max_gb"
            self.note("note", self._step, text, {"what": THINNED, **facts})
            self._journal.thin(plan)
        except StoreError as error:
            self.failed(error)

    def close(self) -> None:
        """Close both; failures were reported."""
        try:
            self._journal.close()
        except OSError as error:  # a network file system may report it only now
            self.failed(StoreError(f"the journal cannot be closed: {error.strerror}"))
        self._audit.close()

    def failed(self, error: StoreError) -> None:
        """Record once that the run directory cannot be written."""
        if self._trouble is None:
            self._trouble = str(error)
            self._show(f"supervise: {error}; watching only, no action will be taken")
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
            self.failed(StoreError(self._audit.trouble))
        if seq is not None:
            head = {"seq": seq, "kind": kind, "actor": actor, "mono_ns": at_ns, "wall": wall}
            self.on_record({**head, "step": step, **body})
        return seq

    def _sync_journal(self) -> int:
        self._journal.sync()
        return len(self._journal)

    def _safely(self, write: Callable[[], int]) -> int | None:
        try:
            return write()
        except StoreError as error:
            self.failed(error)
            return None
