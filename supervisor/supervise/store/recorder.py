"""Events and decisions on their way to disk, with one answer to a disk that fails.

A run goes on being watched when its log cannot be written; what stops is acting. `trouble` says
why, from the first failure on. The journal ends there, since one with a hole could not be replayed,
and the audit log says so as far as it can still be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core.model.decisions import Decision
from ..core.model.events import Event, Frame
from ..core.model.json_form import record
from ..core.model.redaction import Redactor
from ..errors import StoreError
from .audit import Audit
from .journal import Journal

# On disk before anything follows, together with the events that led to them.
SYNCED = frozenset({"intent", "commit", "abort", "in_doubt", "approval_requested", "approval"})
INCOMPLETE = "journal-incomplete"  # `what` of the note in the audit log


def incomplete(records: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the audit record that says from which event on the journal lacks all, if any does.

    One of an earlier epoch does not count: the supervisor that took over went on from that event.
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
        tell: shows a line to the person at the terminal.
    """

    def __init__(
        self,
        journal: Journal,
        audit: Audit,
        now: Callable[[], tuple[int, str]],
        tell: Callable[[str], None],
    ) -> None:
        self._journal = journal
        self._audit = audit
        self._now = now
        self._tell = tell
        self._trouble: str | None = None
        self._step = -1  # the newest that was heard of
        audit.beside(journal.gone)
        self._redactor = Redactor()

    def redact(self, redactor: Redactor) -> None:
        """Take the secrets of the job out of notes from now on; an event comes without them."""
        self._redactor = redactor

    @property
    def ended(self) -> bool:
        """Whether the journal has ended before the run did: what is judged now is in no record."""
        return self._trouble is not None

    @property
    def trouble(self) -> str | None:
        """Why decisions cannot be relied on to be on disk, None while all is well."""
        return self._trouble or self._audit.trouble

    @property
    def head(self) -> str:
        """`size root` of the audit log: whoever gets it in a message is a witness."""
        size, root = self._audit.head
        return f"{size} {root}"

    @property
    def journal(self) -> dict[str, Any]:
        """Size and digest of the journal, for a record of the audit log."""
        return self._journal.head

    def event(self, event: Event) -> int | None:
        """Number and write an event; None when it could not be written.

        After a failure no more is written: a journal with a hole could not be replayed.
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
        if kind in SYNCED:
            self._safely(self._sync_journal)
        return self._append(kind, "engine", at_ns, step, body, sync=kind in SYNCED)

    def note(self, kind: str, step: int, reason: str, data: Mapping[str, Any]) -> None:
        """Write a record of our own, which replay does not compare."""
        clean = self._redactor
        body = {"reason": clean.text(reason), "data": clean.tree(data)}
        self._append(kind, "app", self._now()[0], step, body, sync=False)

    def close(self) -> None:
        """Close both; what could not be written was told."""
        try:
            self._journal.close()
        except OSError as error:  # a network file system may tell only now
            self.failed(StoreError(f"the journal cannot be closed: {error.strerror}"))
        self._audit.close()

    def failed(self, error: StoreError) -> None:
        """Take note that the run directory cannot be written; says so once."""
        if self._trouble is None:
            self._trouble = str(error)
            self._tell(f"supervise: {error}; watching only, no action will be taken")
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
        if self._audit.trouble is not None:  # written, but from the reserve: there is no more
            self.failed(StoreError(self._audit.trouble))
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
