"""Messages that were not delivered before the end of their run.

`RUN/undelivered.json` contains them, each with the settings of its channel and without addresses or
secrets: whoever sends one later has them in the environment, as the run had. The user's next run
sends SEV0 and SEV1 ones from a thread of its own, and the end of an incident behind such a one:
else its alert would stay open. `supervise outbox flush` sends all. Nothing here delays the start,
the steps or the end of a job.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from .. import system
from ..core.model import formats
from ..core.model.formats import printable
from ..core.model.interfaces import CLOSED, Advice, Message, NotifyError, Step, introduce
from ..errors import InputError, StoreError
from ..notifiers import Sender, build_senders
from ..notifiers.outbox import Undelivered
from ..store import files, run_directory
from ..store.run_directory import RunDir
from ..system import Thread

UNDELIVERED_FILE = "undelivered.json"
MAX_AGE_S = 7 * 86_400.0  # of a message that the next run sends
HOUR_S = 3600.0
PAUSE_S = 60.0  # before the second round of a run; doubles up to an hour
PAGES = ("SEV0", "SEV1")

State = Literal["waits", "delivered", "refused"]


class LateMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An undelivered message of one channel.

    Attributes:
        settings: of the channel, as the policy has them.
        keys: of all messages merged into it; it is posted under the first one.
        due: time of its first delivery, UTC ISO-8601.
        attempts: tries so far.
        detail: the error of the newest try, or the answer of the receiver.
        is_follow_up: the run delivered an earlier message on its incident.
    """

    channel: str
    settings: Mapping[str, str | int | float | bool | list[str] | None]
    message: Message
    keys: tuple[str, ...]
    due: str
    attempts: int = 0
    detail: str = ""
    state: State = "waits"
    is_follow_up: bool = False

    @property
    def age_s(self) -> float:
        """Its age in seconds."""
        return (
            datetime.fromisoformat(system.wall_time()) - datetime.fromisoformat(self.due)
        ).total_seconds()

    @property
    def text(self) -> str:
        """One line for people and for an audit log."""
        message = self.message
        name = f"{self.channel}: {message.severity} message of run {message.run}"
        outcome = self.state if self.state == "delivered" else f"{self.state}, {self.detail}"
        text = f"{name}, due {_minute(self.due)}: {outcome}: {message.title}"
        return printable(text)

    def mark_late(self) -> Message:
        """Return the message with its lateness: people must not take it for news."""
        message, due = self.message, _minute(self.due)
        late = f"due {due} in run {message.run}, sent {formats.format_age(self.age_s)} later"
        previous = introduce("it said", message.next.whole)
        return replace(
            message,
            title=f"late, was due {due}: {message.title}",
            next=Advice(None, (Step("the run has ended since"), *previous)),
            facts=(("late", late), *message.facts),
        )


class Summary(msgspec.Struct, frozen=True):
    """An undelivered message in an audit log."""

    run: str
    channel: str
    severity: str
    title: str
    keys: tuple[str, ...]
    due: str
    attempts: int

    @classmethod
    def from_message(cls, late: LateMessage) -> Summary:
        """Return the summary of a message."""
        message = late.message
        return cls(
            message.run,
            late.channel,
            message.severity,
            message.title,
            late.keys,
            late.due,
            late.attempts,
        )


def write_undelivered(
    run: RunDir,
    undelivered: Sequence[Undelivered],
    notify: Mapping[str, Mapping[str, object]],
    print_line: Callable[[str], None],
) -> list[Summary]:
    """Write the messages into the directory of their run, and return them for its last record.

    Args:
        notify: channel -> its settings, as the policy has them.
        print_line: gets the reason where they cannot be written.
    """
    if not undelivered:
        return []
    messages = [
        msgspec.convert(
            {
                "channel": item.channel,
                "settings": notify[item.channel],
                "message": item.message,
                "keys": item.keys,
                "due": system.wall_time(item.age_s),
                "attempts": item.tries,
                "detail": item.error,
                "is_follow_up": item.is_follow_up,
            },
            LateMessage,
        )
        for item in undelivered
    ]
    try:
        _write(run.path, messages, durable=True)
    except OSError as error:
        number = formats.count_messages(len(messages))
        print_line(f"supervise: {number} not delivered and cannot be kept: {error.strerror}")
    return [Summary.from_message(message) for message in messages]


def read_undelivered(run: Path) -> list[LateMessage]:
    """Return all messages in the directory of a run, [] without the file. Raises StoreError."""
    path = run / UNDELIVERED_FILE
    try:
        return msgspec.json.decode(
            files.read_file(path, limit=files.MAX_JSON), type=list[LateMessage]
        )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be understood: {error}", hint=f"rm {path}") from error


def undelivered_messages(run: Path) -> list[LateMessage]:
    """Return the messages of a run that are still to be sent. Raises StoreError."""
    return [message for message in read_undelivered(run) if message.state == "waits"]


def runs_with_undelivered(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the runs of this user that may have undelivered messages, the newest first."""
    for path in run_directory.list_run_directories(environ).values():
        with suppress(OSError):
            if (path / UNDELIVERED_FILE).lstat().st_size:
                yield path


class _Route:
    """A channel, and the times at which it got messages within the last hour."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.sent_s: deque[float] = deque()
        self.not_before_s = 0.0

    def is_ready(self, now_s: float, *, limited: bool) -> bool:
        while self.sent_s and self.sent_s[0] <= now_s - HOUR_S:
            self.sent_s.popleft()
        limit = self.sender.per_hour if limited else None
        return now_s >= self.not_before_s and (limit is None or len(self.sent_s) < limit)


class Flush:
    """Sends the undelivered messages of runs, each to its own channel only.

    Args:
        environ: has the addresses and secrets of the channels.
        limited: send only SEV0 and SEV1 of the last days, and the ends of their incidents, at the
            hourly rate of each channel.
        stop: begin nothing more once it is set.
    """

    def __init__(self, environ: Mapping[str, str], *, limited: bool, stop: threading.Event) -> None:
        self._environ = environ
        self._limited = limited
        self._stop = stop
        self._routes: dict[str, _Route] = {}

    def send(self, run: Path) -> Iterator[LateMessage]:
        """Try each message of a run once; of a channel that fails, only the first one.

        Yields those that were tried, with their outcome.

        Raises:
            StoreError: the directory is not a run, others than the caller may have written it, or
                its messages cannot be read or marked as sent.
        """
        RunDir.open_own(run)
        with _claim(run) as is_ours:
            if not is_ours:
                return
            messages = read_undelivered(run)
            for index, message in enumerate(messages):
                if self._stop.is_set():
                    return
                if self.is_due(message, messages):
                    outcome = self._try(message)
                    if outcome is not None:
                        messages[index] = outcome
                        self._mark(run, messages)
                        yield outcome

    def is_due(self, late: LateMessage, of_run: Sequence[LateMessage]) -> bool:
        """Return whether this sends a message; `of_run`: all of its run, in their order."""
        if late.state != "waits" or not self._limited:
            return late.state == "waits"
        if late.message.severity in PAGES or late.age_s > MAX_AGE_S:
            return late.age_s <= MAX_AGE_S
        return late.message.kind == CLOSED and (
            late.is_follow_up or any(self._precedes(page, late) for page in of_run)
        )

    def _precedes(self, page: LateMessage, end: LateMessage) -> bool:
        """Return whether a page of the incident that ends was delivered late, or will be."""
        page_of, end_of = (page.channel, page.message.incident), (end.channel, end.message.incident)
        is_sent = page.state == "delivered" or (page.state == "waits" and page.age_s <= MAX_AGE_S)
        return page_of == end_of and page.message.severity in PAGES and is_sent

    def _mark(self, run: Path, messages: Sequence[LateMessage]) -> None:
        try:
            _write(run, messages, durable=False)
        except OSError as error:
            raise StoreError(f"cannot write {run / UNDELIVERED_FILE}: {error.strerror}") from error

    def _try(self, late: LateMessage) -> LateMessage | None:
        """Return the message with its outcome, None where its channel is to be spared."""
        try:
            route = self._route(late)
        except InputError as error:  # a variable is not set here: somebody else may have it
            return msgspec.structs.replace(late, detail=str(error))
        if not route.is_ready(time.monotonic(), limited=self._limited):
            return None
        sent_s = route.sent_s
        gap_s = sent_s[-1] + route.sender.gap_s - time.monotonic() if sent_s else 0.0
        if self._stop.wait(max(gap_s, 0.0)):
            return None
        late = msgspec.structs.replace(late, attempts=late.attempts + 1)
        try:
            detail = route.sender.send(late.mark_late(), key=late.keys[0])
        except NotifyError as error:
            if error.retry_after_s is None:
                return msgspec.structs.replace(
                    late, state="refused", detail=f"{error}; not tried again"
                )
            route.not_before_s = time.monotonic() + max(error.retry_after_s, PAUSE_S / 2)
            return msgspec.structs.replace(late, detail=str(error))
        except Exception as error:  # a bug in the notifier; its text might contain an address
            detail = f"{type(error).__name__} in the notifier"
            return msgspec.structs.replace(late, state="refused", detail=detail)
        sent_s.append(time.monotonic())
        return msgspec.structs.replace(late, state="delivered", detail=detail)

    def _route(self, late: LateMessage) -> _Route:
        settings = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in late.settings.items()
            if value is not None
        }
        key = json.dumps([late.channel, settings], sort_keys=True)
        if key not in self._routes:
            senders, warnings = build_senders({late.channel: settings}, self._environ)
            if not senders:
                raise InputError(warnings[0] if warnings else f"{late.channel} is no channel")
            self._routes[key] = _Route(senders[0])
        return self._routes[key]


class Courier:
    """Sends the SEV0 and SEV1 messages of earlier runs, and what ends them, while a run is watched.

    It has a thread of its own, which nobody waits for: a home directory may hang.

    Args:
        record: takes each message that was delivered or refused, for the audit log of this run.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        record: Callable[[LateMessage], None],
        print_line: Callable[[str], None],
    ) -> None:
        self._environ = environ
        self._record = record
        self._print_line = print_line
        self._stop = threading.Event()
        self._flush = Flush(environ, limited=True, stop=self._stop)
        self._unusable: set[Path] = set()

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
            while self.deliver_pending() and not self._stop.wait(pause_s):
                pause_s = min(2 * pause_s, HOUR_S)
        except Exception as error:  # the run goes on; the text might contain an address
            self._print_line(f"supervise: messages of earlier runs: {type(error).__name__}")

    def deliver_pending(self) -> bool:
        """Send what can be sent now; return whether anything remains for another round."""
        delivered: Counter[str] = Counter()
        remains = False
        for path in runs_with_undelivered(self._environ):
            if path in self._unusable:
                continue
            try:
                for outcome in self._flush.send(path):
                    if outcome.state == "waits":
                        continue
                    self._record(outcome)
                    if outcome.state == "delivered":
                        delivered[outcome.channel] += 1
                    else:
                        self._print_line(f"supervise: {outcome.text}")
                messages = read_undelivered(path)
                remains |= any(self._flush.is_due(message, messages) for message in messages)
            except StoreError as error:
                self._unusable.add(path)
                self._print_line(f"supervise: messages of an earlier run are not sent: {error}")
        for channel, number in delivered.items():
            self._print_line(
                f"supervise: {channel}: {formats.count_messages(number)} delivered late"
            )
        return remains


@contextmanager
def _claim(run: Path) -> Iterator[bool]:
    """Lock the messages of a run; False where another process sends them."""
    try:
        fd = files.open_file(run / f".{UNDELIVERED_FILE}.lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise StoreError(f"cannot lock {run / UNDELIVERED_FILE}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


def _write(run: Path, messages: Sequence[LateMessage], *, durable: bool) -> None:
    """Write the file. Raises OSError."""
    files.replace_file(run / UNDELIVERED_FILE, msgspec.json.encode(messages), durable=durable)


def _minute(wall: str) -> str:
    return f"{wall[:10]} {wall[11:16]} UTC"
