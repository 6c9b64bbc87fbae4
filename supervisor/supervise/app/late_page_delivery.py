"""Pages that nobody got before their run ended: kept in the user's spool, and sent from there.

At the end of a run `keep` puts them there. The user's next run sends them with a thread of its own
(`Courier`), or `supervise outbox flush` does. Nothing here may delay a job's start, run or end: the
spool lies in a home directory, which may be full, read-only or on a server that does not answer.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..core.model.interfaces import Message, NotifyError
from ..errors import InputError, StoreError
from ..inputs import clock
from ..notifiers import Sender, destination, reopen
from ..outputs.outbox import Undelivered
from ..store.late_page_spool import Page, Spool, spool_directory
from ..threads import Thread

KEEP_S = 2.0  # of the end of a run
DAYS = 7
DAY_S = 86_400.0
HOUR_S = 3600.0
PAUSE_S = 60.0  # of a courier before its second round; doubles up to an hour

Tell = Callable[[str], None]
Wall = Callable[[], str]


def keep(
    found: Sequence[Undelivered],
    notify: Mapping[str, Mapping[str, Any]],
    env: Mapping[str, str],
    tell: Tell,
    within_s: float = KEEP_S,
) -> dict[str, Any]:
    """Put pages into the spool; return what the last record of the run says of them.

    Says on the terminal what could not be kept. Raises nothing, and returns after `within_s` at the
    latest.

    Args:
        notify: channel -> its keys, as the policy has them.
    """
    if not found:
        return {}
    kept: list[dict[str, Any]] = []
    trouble = [f"no answer from the disk within {within_s:g} s"]
    task = partial(_keep, found, notify, env, tell, kept, trouble)
    thread = Thread(target=task, name="spool", daemon=True)
    try:
        thread.start()
        thread.join(within_s)
    except RuntimeError as error:  # no more threads
        trouble[0] = str(error)
    told, lost, why = list(kept), len(found) - len(kept), trouble[0]
    if not lost:
        return {"spooled": told}
    tell(f"supervise: {pages(lost)} not delivered and cannot be kept for later: {why}")
    return {"spooled": told, "not_spooled": {"count": lost, "reason": why}}


def _keep(
    found: Sequence[Undelivered],
    notify: Mapping[str, Mapping[str, Any]],
    env: Mapping[str, str],
    tell: Tell,
    kept: list[dict[str, Any]],
    trouble: list[str],
) -> None:
    try:
        with Spool.open(spool_directory(env), clock.wall, make=True) as spool:
            assert spool is not None
            for each in found:
                to = destination(each.channel, notify[each.channel], env)
                due = clock.wall(each.age_s)
                page = Page(each.channel, each.message, each.keys, due, to, each.tries, each.error)
                try:
                    spool.put(page)
                    kept.append(page.facts())
                except StoreError as error:
                    trouble[0] = _said(error)
            if gone := spool.trim(found[0].message.run):
                tell(f"supervise: the outbox is full: {pages(gone)} dropped, the oldest SEV1 first")
    except StoreError as error:
        trouble[0] = _said(error)
    except Exception as error:  # our own fault; its text might hold an address
        trouble[0] = f"{type(error).__name__} in the spool"


def _said(error: StoreError) -> str:
    return f"{error}; {error.hint}" if error.hint else str(error)


@dataclass(frozen=True)
class Outcome:
    """What came of one page: `what` is delivered, refused, dropped, "set aside" or waits."""

    what: str
    page: Page
    detail: str

    @property
    def text(self) -> str:
        """One line for people and for an audit log."""
        message = self.page.message
        name = f"{self.page.channel}: {message.severity} page of run {message.run}"
        how = self.what if self.what == "delivered" else f"{self.what}, {self.detail}"
        text = f"{name}, due {_stamp(self.page.due)}: {how}: {message.title}"
        return "".join(c if c.isprintable() else " " for c in text)


@dataclass
class _Route:
    """One destination, and how much it has got."""

    sender: Sender
    sent: deque[float] = field(default_factory=deque)  # when, within the last hour
    not_before: float = 0.0

    def ready(self, now: float, *, limited: bool) -> bool:
        while self.sent and self.sent[0] <= now - HOUR_S:
            self.sent.popleft()
        most = self.sender.per_hour if limited else None
        return now >= self.not_before and (most is None or len(self.sent) < most)


class Flush:
    """Sends what waits in the spool, each page to its own channel only.

    Args:
        by: who sends, for the log: the id of a run, or a word.
        limited: keep to the number of messages an hour that each channel takes.
        stop: begin nothing more once it is set.
    """

    def __init__(
        self, by: str, *, limited: bool, stop: threading.Event, wall: Wall = clock.wall
    ) -> None:
        self._by = by
        self._limited = limited
        self._stop = stop
        self._wall = wall
        self._routes: dict[str, _Route] = {}
        self._done: set[str] = set()  # settled by us; a file that stays is not sent again

    def once(self, spool: Spool) -> Iterator[Outcome]:
        """Try each page that waits once; of a destination that fails, only the first one.

        Raises:
            StoreError: the spool cannot be used (any more).
        """
        for name in spool.names():
            if self._stop.is_set():
                return
            if name in self._done:
                continue
            with spool.claim(name) as page:
                outcome = None if page is None else self._handle(spool, page)
            if outcome is not None:
                yield outcome

    def _handle(self, spool: Spool, page: Page) -> Outcome | None:
        if page.age_s(self._wall()) > DAYS * DAY_S:
            return self._settled(spool, page, "dropped", f"not delivered within {DAYS} days")
        try:
            route = self._route(page.to)
        except InputError as error:
            return self._settled(spool, page, "refused", str(error))
        if not route.ready(time.monotonic(), limited=self._limited):
            return None
        gap_s = route.sent[-1] + route.sender.gap_s - time.monotonic() if route.sent else 0.0
        if self._stop.wait(max(gap_s, 0.0)):
            return None
        try:
            detail = route.sender.send(marked(page, self._wall()), key=page.keys[0])
        except NotifyError as error:
            if error.retry_after_s is None:
                return self._settled(spool, page, "refused", f"{error}; not tried again")
            route.not_before = time.monotonic() + max(error.retry_after_s, PAUSE_S / 2)
            spool.record_failure(page, str(error))
            return Outcome("waits", page, str(error))
        except Exception as error:  # a bug in the notifier; its text might hold an address
            return self._settled(spool, page, "refused", f"{type(error).__name__} in the notifier")
        route.sent.append(time.monotonic())
        return self._settled(spool, page, "delivered", detail)

    def _settled(self, spool: Spool, page: Page, what: str, detail: str) -> Outcome:
        page = replace(page, attempts=page.attempts + (what != "dropped"))
        self._done.add(page.name)
        try:
            spool.settle(page, what, detail, self._by)
        except StoreError as error:  # what is sent is sent
            detail = f"{detail}; {error}"
        return Outcome(what, page, detail)

    def _route(self, to: Mapping[str, Any]) -> _Route:
        key = json.dumps(to, sort_keys=True)
        if key not in self._routes:
            self._routes[key] = _Route(reopen(to))
        return self._routes[key]


def marked(page: Page, wall: str) -> Message:
    """Return the message with its lateness: people must not take it for news."""
    message, due = page.message, _stamp(page.due)
    late = f"due {due} in run {message.run}, sent {age(page.age_s(wall))} later"
    then = f"; it said: {message.next}" if message.next else ""
    return replace(
        message,
        title=f"late, was due {due}: {message.title}",
        next=f"the run has ended since{then}",
        facts=(("late", late), *message.facts),
    )


class Courier:
    """Sends from the spool while a run is watched, on a thread that nobody waits for.

    Args:
        note: takes a line and its facts for the audit log of this run.
    """

    def __init__(
        self,
        by: str,
        env: Mapping[str, str],
        note: Callable[[str, Mapping[str, Any]], None],
        tell: Tell,
    ) -> None:
        self._env = env
        self._note = note
        self._tell = tell
        self._stop = threading.Event()
        self._flush = Flush(by, limited=True, stop=self._stop)
        self._aside: set[str] = set()

    def start(self) -> None:
        """Begin, and return at once."""
        with suppress(RuntimeError):  # no more threads: the next run sends them
            Thread(target=self._run, name="courier", daemon=True).start()

    def stop(self) -> None:
        """Begin nothing more; a post that is under way goes on while the process lives."""
        self._stop.set()

    def _run(self) -> None:
        pause_s = PAUSE_S
        try:
            while self._round() and not self._stop.wait(pause_s):
                pause_s = min(2 * pause_s, HOUR_S)
        except StoreError as error:
            self._tell(f"supervise: pages of earlier runs cannot be sent: {error}")
        except Exception as error:  # the run goes on; its text might hold an address
            self._tell(f"supervise: pages of earlier runs: {type(error).__name__}")

    def _round(self) -> bool:
        """Send what can be sent now; return whether anything waits."""
        try:
            path = spool_directory(self._env)
        except StoreError:
            return False  # nothing can have been kept there
        with Spool.open(path, clock.wall) as spool:
            if spool is None:
                return False
            delivered: Counter[str] = Counter()
            for outcome in self._flush.once(spool):
                if outcome.what == "waits":
                    continue
                facts = {**outcome.page.facts(), "outcome": outcome.what}
                self._note(outcome.text, facts)
                if outcome.what == "delivered":
                    delivered[outcome.page.channel] += 1
                else:
                    self._tell(f"supervise: {outcome.text}")
            for channel, count in delivered.items():
                self._tell(f"supervise: {channel}: {pages(count)} delivered late, of earlier runs")
            for name in sorted(set(spool.aside) - self._aside):
                self._tell(f"supervise: {path / name} set aside: {spool.aside[name]}")
            self._aside |= set(spool.aside)
            return bool(spool.names())


def pages(count: int) -> str:
    """Return "1 page was", "2 pages were"."""
    return f"{count} page was" if count == 1 else f"{count} pages were"


def age(seconds: float) -> str:
    """Return a time in the largest unit that has at least two of it."""
    for unit, size in (("d", DAY_S), ("h", HOUR_S), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def _stamp(wall: str) -> str:
    return f"{wall[:10]} {wall[11:16]} UTC"
