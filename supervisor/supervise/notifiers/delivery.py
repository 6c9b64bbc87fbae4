"""Delivery on one channel: its queue, quiet hours, rate limit, retries, and its health.

A thread of its own empties the queue: a slow channel delays no other.

Order: the incident with the most severe message first, then the fewest tries, then the oldest; of
one incident always the oldest, so that receivers see them in order. Waiting messages on one
incident are merged, but for a request, its end and the end of the run. More than `per_hour` in an
hour are held and become one digest; SEV0 may use twice that number, and a request is never held.
What is below SEV1 is held in quiet hours, too, but not beyond the end of the run. A failed try is
repeated with exponential backoff and jitter, or after the receiver's Retry-After, for `GIVE_UP_S`.
Every accepted message gets exactly one Result.

A channel has failed as soon as a message is given up, or when no try has succeeded for `FAILED_S`.
It has recovered with the next message that is delivered; the other channels get a message of both.
"""

from __future__ import annotations

import logging
import random
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import cast

from msgspec import Struct

from ..core import notices, run_notices
from ..core.model import formats
from ..core.model.interfaces import (
    APPROVAL,
    CLOSED,
    FINISHED,
    OPENED,
    UPDATED,
    WATCHER,
    Message,
    NotifyError,
    Severity,
)
from ..system import Thread
from ._channel_settings import Route, Sender

FAILED_S = 20.0  # more than the one timeout of a slow receiver (15 s); project default
_log = logging.getLogger(__name__)
MAX_WAITING = 256
GIVE_UP_S = 3600.0  # after the first try
MAX_BACKOFF_S = 60.0
HOUR_S = 3600.0
RANKS = {"SEV0": 0, "SEV1": 1, "SEV2": 2, "INFO": 3}
AWAKE = ("SEV0", "SEV1")  # not held in quiet hours
UNMERGED = (APPROVAL, CLOSED, FINISHED)  # kinds that stay messages of their own


class Backlog(Struct, frozen=True):
    """The number of messages that wait, and of those held for a digest."""

    waiting: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Trouble:
    """State of a failed channel.

    Attributes:
        since_s: start of the first failed try, on the monotonic clock.
        undelivered: messages given up since, and those that were tried and still wait.
        lost: messages given up.
        error: of the newest try; without addresses or secrets.
    """

    channel: str
    since_s: float
    undelivered: int
    lost: int
    error: str


@dataclass(slots=True)
class Health:
    """The record of one channel; callers hold the lock of its queue."""

    error: str = ""
    _since_s: float | None = None
    _lost: int = 0

    def on_try(self, now: float) -> None:
        """Record the start of a try."""
        self._since_s = now if self._since_s is None else self._since_s

    def on_answer(self, error: str | None) -> None:
        """Record the end of a try; None: the message was delivered."""
        self.error = error or ""
        if error is None:
            self._since_s, self._lost = None, 0

    def on_lost(self, count: int, error: str, now: float) -> None:
        """Record messages that were given up."""
        self.on_try(now)
        self._lost += count
        self.error = error

    def trouble(self, channel: str, waiting: int, now: float) -> Trouble | None:
        """Return the state if it has failed; `waiting`: messages tried and not given up."""
        since = self._since_s
        if since is None or not (self._lost or now - since >= FAILED_S):
            return None
        lost = self._lost
        return Trouble(channel, since, lost + waiting, lost, self.error or "no answer yet")


def build_failed_message(trouble: Trouble, template: Message, now: float) -> Message:
    """Return the message to the other channels; `template`: any message of the run."""
    lasted_s = now - trouble.since_s
    notice = run_notices.ChannelFailed(
        severity="SEV2",
        channel=trouble.channel,
        messages=formats.count_messages(trouble.undelivered),
        error=trouble.error,
        silent_s=lasted_s if lasted_s >= FAILED_S else None,
    )
    return _build(notice, template)


def build_recovered_message(trouble: Trouble, template: Message) -> Message:
    """Return the message after the next successful delivery."""
    notice = run_notices.ChannelRecovered(
        severity="SEV2", channel=trouble.channel, lost=trouble.lost
    )
    return _build(notice, template)


def _build(notice: notices.Notice, template: Message) -> Message:
    return replace(
        template,
        incident=None,
        kind=WATCHER,
        card=(),
        rules=(),
        facts=(),
        severity=cast(Severity, notice.severity),
        title=notice.title,
        news=notice.title,
        verdict=notice.verdict,
        why=notice.reason,
        next=notice.next.filled(template.directory, template.job or "COMMAND"),
        form=type(notice).__name__,
        subject="",
        to_all=False,
    )


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a delivery.

    Attributes:
        channel: name of the sender.
        keys: of all messages merged into it.
        detail: one line without addresses or secrets.
        tries: calls of the sender.
        request: id of the approval that the message asks for, "" for none.
    """

    channel: str
    keys: tuple[str, ...]
    ok: bool
    detail: str
    tries: int
    request: str = ""


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A message that was not delivered before the end of the run.

    Attributes:
        keys: of all messages merged into it; it is posted under the first one.
        age_s: seconds since it was due.
        error: of the newest try, "" without one.
        is_follow_up: an earlier message on its incident was delivered.
    """

    channel: str
    message: Message
    keys: tuple[str, ...]
    age_s: float
    tries: int
    error: str
    is_follow_up: bool = False


@dataclass(slots=True)
class Item:
    """A waiting message and the titles of those merged into it."""

    message: Message
    keys: list[str]
    ready_s: float
    number: int
    due_s: float  # on the monotonic clock
    tries: int = 0
    first_s: float = 0.0  # start of the first try
    error: str = ""  # of the newest try
    earlier: list[str] = field(default_factory=list)

    def add_earlier(self) -> None:
        """List the merged messages in this one."""
        if self.earlier:
            facts = (*self.message.facts, ("earlier", " · ".join(self.earlier[-3:])))
            self.message, self.earlier = replace(self.message, facts=facts), []

    def merge(self, message: Message, key: str) -> None:
        """Take the newer message, and keep what the receiver needs of this one.

        That is the worst severity, the kind of an opening message, the rule that fired, and what
        it found where the newer one is about less.
        """
        old = self.message
        graver = RANKS[old.severity] < RANKS[message.severity] and message.kind == UPDATED
        verdicts = (old.verdict if graver else "", message.verdict)
        self.earlier.append(old.title)
        self.keys.append(key)
        self.message = replace(
            message,
            kind=old.kind if old.kind == OPENED else message.kind,
            severity=min(old.severity, message.severity, key=RANKS.__getitem__),
            verdict="; ".join(dict.fromkeys(filter(None, verdicts))),
            why="; ".join(dict.fromkeys(filter(None, (old.why, message.why)))),
            to_all=old.to_all or message.to_all,
        )

    def can_merge(self, message: Message) -> bool:
        """Return whether a newer message on its incident may be merged into it.

        Not where somebody acknowledges it. Once tried it stays unchanged: the receiver may have it
        under this key.
        """
        alone = bool(message.acknowledged_by or self.message.acknowledged_by)
        return not (self.tries or alone or {self.message.kind, message.kind} & {*UNMERGED})

    @property
    def rank(self) -> int:
        return RANKS[self.message.severity]

    @property
    def order(self) -> tuple[int, int, int]:
        return self.rank, self.tries, self.number


class ChannelQueue:
    """Takes messages from any thread and sends them from its own."""

    def __init__(
        self,
        sender: Sender,
        on_result: Callable[[Result], None],
        monotonic: Callable[[], float],
        backoff_s: float,
        route: Route | None,
        wall: Callable[[], datetime],
    ) -> None:
        self.name = sender.name
        self._sender = sender
        self._on_result = on_result
        self._monotonic = monotonic
        self._backoff_s = backoff_s
        self._route = route
        self._wall = wall
        self._change = threading.Condition()
        self._items: list[Item] = []
        self._held: list[Item] = []
        self._busy: Item | None = None
        self._undelivered: deque[Item] = deque(maxlen=MAX_WAITING)  # a retry may deliver them
        self._sent: deque[float] = deque()  # when, within the last hour
        self._known: set[str | None] = set()  # incidents that this channel was notified of
        self._reached: set[str | None] = set()  # those of which a message was delivered
        self._health = Health()
        self._number = 0
        self._wait_until = 0.0
        self._retry_after = False  # the receiver asked for a pause, which SEV0 keeps too
        self._deadline: float | None = None  # set when draining
        self._closed = False
        self._emptied = threading.Event()
        self._thread = Thread(target=self._run, name=f"notify-{sender.name}", daemon=True)
        self._start_thread()

    def mark_known(self, incident: str | None) -> None:
        """Record that the receiver gets what is told of an incident."""
        with self._change:
            self._known |= {incident} - {None}

    def mark_reached(self, incident: str | None) -> None:
        """Record that the receiver was sent a message on an incident."""
        with self._change:
            self.mark_known(incident)
            self._reached |= {incident} - {None}

    def put(
        self, message: Message, key: str, *, force: bool = False, due_s: float | None = None
    ) -> bool:
        """Queue a message; returns at once, False if it is not for this channel.

        Args:
            force: ignore the channel's least severity.
            due_s: time of the first post, None for now.
        """
        rank, incident = RANKS[message.severity], message.incident
        with self._change:
            is_known = incident in self._known or rank <= RANKS[self._sender.min_sev]
            is_wanted = (
                force
                or message.to_all
                or (is_known and (self._route is None or self._route.accepts(message)))
            )
            if ending := self.is_ending:
                dropped: Item | None = Item(message, [key], 0.0, 0, self._due(due_s))
                detail = "the supervisor is ending"
            elif not is_wanted:
                return False
            elif not self._start_thread():
                dropped = Item(message, [key], 0.0, 0, self._due(due_s))
                detail = "no thread could be started"
            else:
                self.mark_known(incident)
                dropped, detail = self._queue(message, key, self._due(due_s)), "queue full"
                if (rank == 0 or message.kind == APPROVAL) and not self._retry_after:
                    self._wait_until = 0.0
                self._change.notify_all()
        if dropped is not None:
            self._report(dropped, False, detail, counts=not ending, final=not is_wanted)
        return True

    def backlog(self) -> Backlog:
        """Return how many messages wait."""
        with self._change:
            return Backlog(len(self._items) + bool(self._busy), len(self._held))

    @property
    def is_ending(self) -> bool:
        """Whether nothing can be queued any more."""
        return self._closed or self._deadline is not None

    def trouble(self) -> Trouble | None:
        """Return the state of a failed channel: messages are lost, or none was delivered lately."""
        with self._change:
            tried_once = [
                item for item in (self._busy, *self._items) if item is not None and item.tries
            ]
            waiting = sum(len(item.keys) for item in tried_once)
            return self._health.trouble(self.name, waiting, self._monotonic())

    def drain(self, deadline_s: float) -> None:
        """Send all waiting messages without pauses until `deadline_s` on the monotonic clock."""
        with self._change:
            self._deadline = deadline_s
            if not self._retry_after:
                self._wait_until = 0.0
            self._change.notify_all()

    def abort_join(self) -> None:
        """Let `join` return at once. Thread-safe."""
        self._emptied.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, then report undelivered messages."""
        if self._thread.ident is not None:
            self._emptied.wait(timeout_s)
        with self._change:
            self._closed = True
            busy, remaining = self._busy, [*self._items, *self._held]
            last_try = f"; last try: {self._health.error}" if self._health.error else ""
            self._items, self._held, self._busy = [], [], None
            self._change.notify_all()
        if busy is not None:
            self._report(busy, False, "no answer before the supervisor ended")
        for item in remaining:
            detail = "not delivered before the supervisor ended"
            self._report(item, False, detail + (last_try if item.tries else ""))

    def undelivered(self) -> list[Undelivered]:
        """End at once, and return the messages that were not delivered, in their order."""
        self.join(0.0)
        now = self._monotonic()
        with self._change:
            remaining = sorted(self._undelivered, key=lambda item: item.due_s)
            self._undelivered.clear()
        for item in remaining:
            item.add_earlier()
        return [
            Undelivered(
                self.name,
                item.message,
                tuple(item.keys),
                now - item.due_s,
                item.tries,
                item.error or ("no answer" if item.tries else ""),
                item.message.incident in self._reached,
            )
            for item in remaining
        ]

    # ── the queue; all with the lock held ─────────────────────────────────────────────────────────

    def _due(self, due_s: float | None) -> float:
        now = self._monotonic()
        return now if due_s is None else min(due_s, now)  # later than now: posted before a reboot

    def _queue(self, message: Message, key: str, due_s: float) -> Item | None:
        """Add a message, and return the one dropped for it."""
        now, incident = self._monotonic(), message.incident
        mine = [i for i in self._items if incident is not None and i.message.incident == incident]
        if message.severity == "SEV0" or message.kind == APPROVAL:
            for item in mine:  # they come before it
                item.ready_s = now
        if mine and (newest := max(mine, key=lambda item: item.number)).can_merge(message):
            newest.merge(message, key)
            return None
        self._number += 1
        at_once = incident is None or message.severity == "SEV0" or message.kind in UNMERGED
        ready_s = now if at_once else now + self._sender.group_s
        self._items.append(Item(message, [key], ready_s, self._number, due_s))
        if len(self._items) <= MAX_WAITING:
            return None
        least = max(self._items, key=lambda item: (item.rank, -item.number))
        self._items.remove(least)
        return least

    def _take(self) -> Item | None:
        """Wait for the next message to send; None at the end."""
        with self._change:
            while not self._closed:
                now = self._monotonic()
                if self._deadline is not None and now >= self._deadline:
                    return None
                item, wait_s = self._choose(now)
                if item is not None:
                    item.first_s = item.first_s if item.tries else now
                    item.tries += 1
                    self._busy = item
                    self._health.on_try(now)
                    return item
                if self._deadline is not None:
                    if not self._items and not self._held:
                        return None
                    if wait_s is None or now + wait_s > self._deadline:
                        return None  # after the deadline
                self._change.wait(wait_s)
        return None

    def _choose(self, now: float) -> tuple[Item | None, float | None]:
        """Return the message to send now, or how long to wait (None: until a change)."""
        if now < self._wait_until:
            return None, self._wait_until - now
        while self._sent and self._sent[0] <= now - HOUR_S:
            self._sent.popleft()
        draining = self._deadline is not None
        quiet_s = 0.0
        if self._route is not None and not draining:
            quiet_s = self._route.quiet_left_s(self._wall())
        while (chosen_item := self._next_ready(now, draining=draining)) is not None:
            self._items.remove(chosen_item)
            if self._room(chosen_item, quiet=quiet_s > 0.0):
                self._finish_text(chosen_item)
                return chosen_item, None
            self._held.append(chosen_item)
        limit = self._sender.per_hour
        if self._held and not quiet_s and (draining or limit is None or len(self._sent) < limit):
            digest, self._held = self._digest(), []
            return digest, None
        waits = [item.ready_s - now for item in self._oldest().values()]
        if self._held:
            waits.append(quiet_s or self._sent[0] + HOUR_S - now)
        return None, min(waits, default=None)

    def _oldest(self) -> dict[str | int, Item]:
        """Return the message that comes first of each incident; one on none is alone."""
        oldest: dict[str | int, Item] = {}
        for item in sorted(self._items, key=lambda item: item.number):
            oldest.setdefault(item.message.incident or item.number, item)
        return oldest

    def _next_ready(self, now: float, *, draining: bool) -> Item | None:
        """Return the message whose turn it is, None if none is ready."""
        worst: dict[str | int, int] = {}
        for item in self._items:
            key = item.message.incident or item.number
            worst[key] = min(item.rank, worst.get(key, item.rank))
        ready = {k: i for k, i in self._oldest().items() if draining or i.ready_s <= now}
        order = [(worst[k], item.tries, item.number, k) for k, item in ready.items()]
        return ready[min(order)[3]] if order else None

    def _room(self, item: Item, *, quiet: bool) -> bool:
        limit, incident = self._sender.per_hour, item.message.incident
        if item.message.kind == APPROVAL:
            return True
        if quiet and item.message.severity not in AWAKE:
            return False
        if limit is None:
            return True
        if item.rank == 0:
            return len(self._sent) < 2 * limit
        waits = any(item.message.incident == incident for item in self._held)
        return len(self._sent) < limit and (quiet or incident is None or not waits)

    def _finish_text(self, item: Item) -> None:
        """Complete the text before the first try; later it must stay the same under its key."""
        if item.tries:
            return
        item.add_earlier()
        limit = self._sender.per_hour
        if limit is not None and len(self._sent) == limit - 1:
            quiet = ("rate limit", f"{limit} messages this hour; further ones come as one digest")
            item.message = replace(item.message, facts=(*item.message.facts, quiet))

    def _digest(self) -> Item:
        items = sorted(self._held, key=lambda item: item.order)
        count = sum(len(item.keys) for item in items)
        titles = " · ".join(f"[{i.message.severity}] {i.message.title}" for i in items[:8])
        first = items[0].message
        messages = f"{count} message{'s' if count > 1 else ''}"
        digest = run_notices.Digest(severity=first.severity, messages=messages, titles=titles)
        message = _build(digest, first)
        self._number += 1
        keys = [key for item in items for key in item.keys]
        return Item(message, keys, 0.0, self._number, min(item.due_s for item in items))

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _start_thread(self) -> bool:
        """Start the thread once; False at the limit of threads, the next message tries again."""
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError:
                return False
        return True

    def _run(self) -> None:
        while (item := self._take()) is not None:
            retry_after_s: float | None = None
            try:
                detail, ok = self._sender.send(item.message, key=item.keys[0]), True
            except NotifyError as error:
                detail, ok, retry_after_s = str(error), False, error.retry_after_s
            except Exception as error:  # a bug there must not stop the channel
                # Only the type and place: the text may contain an address.
                trace = "".join(traceback.format_tb(error.__traceback__))
                _log.error("%s in the notifier of %s\n%s", type(error).__name__, self.name, trace)
                detail, ok = f"{type(error).__name__} in the notifier", False
            self._settle(item, ok, detail, retry_after_s)
        self._emptied.set()

    def _settle(self, item: Item, ok: bool, detail: str, retry_after_s: float | None) -> None:
        with self._change:
            if self._closed:
                return  # `join` has reported it
            self._busy = None
            item.error = "" if ok else detail
            now = self._monotonic()
            again = not ok and retry_after_s is not None and now - item.first_s < GIVE_UP_S
            self._health.on_answer(None if ok else detail)
            if ok:
                self.mark_reached(item.message.incident)
                self._sent.append(now)
                self._retry_after = False
                self._wait_until = now + (self._sender.gap_s if self._deadline is None else 0.0)
            elif again and retry_after_s is not None:
                doubled = self._backoff_s * 2 ** min(item.tries - 1, 30)
                pause_s = min(doubled, max(MAX_BACKOFF_S, self._backoff_s))
                pause_s *= random.uniform(0.5, 1.5)
                self._retry_after = retry_after_s > 0
                self._wait_until = now + max(retry_after_s, pause_s)
                self._items.append(item)
        if not again:
            self._report(item, ok, detail, final=retry_after_s is None)

    def _report(
        self, item: Item, ok: bool, detail: str, *, counts: bool = True, final: bool = False
    ) -> None:
        """Report the outcome of a message; `final`: a later try would fail too."""
        with self._change:
            if counts and not ok:
                self._health.on_lost(len(item.keys), detail, self._monotonic())
            if not (ok or final):
                self._undelivered.append(item)
        request = item.message.request
        result = Result(self._sender.name, tuple(item.keys), ok, detail, item.tries, request)
        with suppress(Exception):  # a failing listener must not stop the channel
            self._on_result(result)
