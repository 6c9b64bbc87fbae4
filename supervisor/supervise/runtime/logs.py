"""Log files: the job's output, the logs that the policy names, and the supervisor's own log.

**Named logs** (`job.logs`) are searched for lines of known failures. Files that are there when the
supervisor begins are read from their end, later ones from their beginning. A rotated file is read
to its end before the new one; a truncated one is read again from its start. A look takes a bounded
time and memory however fast a log grows: the rest is read later, and what lies too far back is
skipped. Control sequences are removed from lines, and long lines are cut.

**Output** (`--logs`) is copied and kept by `output_relay`, a process of a group of its own, so that
it outlives the supervisor. While the supervisor lives it holds both ends of all streams: if the
relay dies, another one continues where it ended, and the job notices nothing. A stream into a
regular file is left as it is. Two streams to one place, as after `2>&1`, stay one, so that their
order is kept. A terminal stays a terminal for the job.

**`supervisor.log`** has the errors of the supervisor, and what it showed at the terminal, as JSON:

    {"event", "level", "logger", "timestamp", "run", "incident"[, "exception"][, "dropped"]}

A record waits in a bounded queue for a thread that formats and writes it, without secrets. A disk
that hangs stops that thread alone: what finds the queue full is counted in the next line written.
"""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import queue
import re
import stat
import subprocess
import sys
import termios
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from ..core.model.failure import LOG_FAILURE, Failure, FailureClass, classify_failure
from ..core.model.redaction import Redactor
from ..store import files
from ..system import Thread
from . import output_relay

FILES = 32  # that are followed at once
PER_CLASS = 3  # lines of one class that are reported of one launch
BLOCK = 1 << 20
LOOK_S, LAST_LOOK_S = 0.05, 2.0  # how long one look may take; the last one, at the job's end
BEHIND = 64 << 20  # bytes; further back is skipped
LINE_BYTES = 4096
MOST_LINES = 64  # of one block that are looked at closely
SHOWN_CHARS = 500
LIST_NS = 5_000_000_000  # between two looks for new files
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(slots=True)
class _Followed:
    """One file: its descriptor and identity, how far it was read, and a line without an end."""

    fd: int
    identity: tuple[int, int]
    offset: int
    partial: bytes = b""


class LogFiles:
    """The log files of one run.

    Args:
        patterns: globs of the policy, relative to `directory`.
        directory: the job's working directory.
        classes: returns the classes that count now.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        directory: Path,
        classes: Callable[[], tuple[FailureClass, ...]],
    ) -> None:
        self._globs = [str(directory / pattern) for pattern in patterns]
        self._directory = directory
        self._classes = classes
        self._followed: dict[str, _Followed] = {}
        self._found: dict[str, int] = {}  # class -> lines of this launch
        self._listed_ns = 0
        self._patterns: list[re.Pattern[bytes]] = []

    def on_launch(self) -> None:
        """The job starts: what is in its logs already is of an earlier one."""
        self._found.clear()
        self._patterns = _patterns(self._classes()) if self._globs else []
        for path in self._paths():
            if path not in self._followed:
                self._follow(path, from_end=True)

    def poll(self, now_ns: int, *, last: bool = False) -> list[Failure]:
        """Return the lines that were found since the last call, as failures; never raises."""
        if not self._globs:
            return []
        until = time.monotonic() + (LAST_LOOK_S if last else LOOK_S)
        if last or now_ns >= self._listed_ns + LIST_NS:
            self._listed_ns = now_ns
            for path in self._paths():
                if path not in self._followed:
                    self._follow(path)
        failures: list[Failure] = []
        for path in list(self._followed):
            with suppress(OSError):  # a file system that fails: the next look tries again
                for line in self._lines(path, until, last=last):
                    failures += self._match(path, line, now_ns)
        return failures

    def close(self) -> None:
        """Close all files."""
        for followed in self._followed.values():
            os.close(followed.fd)
        self._followed.clear()

    def _paths(self) -> list[str]:
        paths: set[str] = set()
        for pattern in self._globs:
            paths.update(glob.iglob(pattern, recursive=True))  # noqa: PTH207, absolute too
        return sorted(paths)[:FILES]

    def _follow(self, path: str, *, from_end: bool = False) -> None:
        if len(self._followed) >= FILES:
            return
        with suppress(OSError):  # it vanished, or is no regular file
            fd = files.open_file(Path(path), foreign=True)
            status = os.fstat(fd)
            offset = status.st_size if from_end else 0
            self._followed[path] = _Followed(fd, (status.st_dev, status.st_ino), offset)

    def _lines(self, path: str, until: float, *, last: bool) -> Iterator[str]:
        """Yield the new lines that match, until there are none or the time is up."""
        followed = self._followed[path]
        size = os.fstat(followed.fd).st_size
        if size < followed.offset:
            followed.offset, followed.partial = 0, b""
        elif size - followed.offset > BEHIND:
            followed.offset, followed.partial = size - BEHIND, b""
        while time.monotonic() < until:
            block = os.pread(followed.fd, BLOCK, followed.offset)
            if not block:
                if last:
                    yield from _matching(self._patterns, followed.partial)
                self._rotated(path, followed)
                return
            followed.offset += len(block)
            text = followed.partial + block
            cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            followed.partial = text[
                max(cut, len(text) - LINE_BYTES) :
            ]  # of an endless line the newest
            yield from _matching(self._patterns, text[:cut])

    def _rotated(self, path: str, followed: _Followed) -> None:
        """Begin the file that has this name now, if that is another one."""
        with suppress(FileNotFoundError):
            now = Path(path).stat()
            if (now.st_dev, now.st_ino) != followed.identity:
                os.close(followed.fd)
                del self._followed[path]
                self._follow(path)

    def _match(self, path: str, line: str, now_ns: int) -> Iterator[Failure]:
        shown_path = os.path.relpath(path, self._directory)
        text = line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 1]}…"
        failure = classify_failure(
            Failure(LOG_FAILURE, message=text, file=shown_path, at_ns=now_ns, leading=True),
            self._classes(),
        )
        count = self._found[failure.cls] = self._found.get(failure.cls, 0) + 1
        if failure.cls and count <= PER_CLASS:
            yield failure


def _patterns(classes: Sequence[FailureClass]) -> list[re.Pattern[bytes]]:
    """Return what finds a line of any class; one that begins with letters takes 1 ms per MB."""
    return [re.compile(text.encode()) for failure_class in classes for text in failure_class.logs]


def _matching(patterns: Sequence[re.Pattern[bytes]], text: bytes) -> Iterator[str]:
    """Yield the lines in which a pattern is found, in their order, each once."""
    places = {}
    for pattern in patterns:
        for match in pattern.finditer(text):
            marks = (text.rfind(mark, 0, match.start()) for mark in (b"\n", b"\r"))
            places[max(marks) + 1] = match.span()
            if len(places) >= MOST_LINES:
                break
    for first, (start, end) in sorted(places.items()):
        ends = (text.find(mark, end) for mark in (b"\n", b"\r"))
        last = min((end_offset for end_offset in ends if end_offset >= 0), default=len(text))
        line = text[max(first, start - LINE_BYTES) : min(last, end + LINE_BYTES)]
        yield _CONTROL.sub("", _SEQUENCE.sub("", line.decode("utf-8", "replace"))).strip()


STREAMS = (1, 2)
LOWEST = 3  # above the standard streams
DEATHS, DEATHS_S = 3, 10.0  # so many relays that died in that time are enough; project default
DRAIN_S = 2.0  # for what a job that has ended had written last
OFLAG, LFLAG = 1, 3  # where output and local flags are in what tcgetattr returns
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Stream:
    """One stream: the job writes to `job`, the relay reads `source` and writes to `target`."""

    job: int
    source: int
    target: int


class JobOutput:
    """Relays what the job writes to stdout and stderr, from `start` until `close`.

    Attributes:
        outputs: descriptor of the job -> ours that it is to be; empty: nothing is relayed.
    """

    def __init__(self, path: Path) -> None:
        """Open the streams; `path` is the file that keeps them. Raises OSError."""
        self._path = path
        self._streams: list[_Stream] = []
        self.outputs: dict[int, int] = {}
        self._closing = False
        self._child: subprocess.Popen[bytes] | None = None
        places: dict[tuple[int, int, int], _Stream] = {}
        for fd in STREAMS:
            try:
                status = os.fstat(fd)
            except OSError:  # it is closed
                continue
            if stat.S_ISREG(status.st_mode):
                continue
            file_id = status.st_dev, status.st_ino, status.st_rdev
            if file_id not in places:
                places[file_id] = _open(fd)
            self.outputs[fd] = places[file_id].job
        self._streams = list(places.values())

    def start(self) -> None:
        """Start the relay, and whatever is needed when it dies. Raises OSError."""
        if not self._streams:
            return
        child = self._spawn(own_group=True)
        threading.Thread(target=self._keep_alive, args=(child,), name="output", daemon=True).start()

    def close(self, within_s: float = DRAIN_S) -> None:
        """The job has ended: let the relay come to its end, and wait for that a moment.

        Others that still have a stream open keep it running.
        """
        self._closing = True
        for stream in self._streams:
            os.close(stream.job)
        child = self._child
        with suppress(subprocess.TimeoutExpired):
            if child is not None:
                child.wait(within_s)

    def _spawn(self, *, own_group: bool) -> subprocess.Popen[bytes]:
        """Start a relay; a later one stays in our group, or it would pass for one of the job's."""
        command = [sys.executable, "-I", "-S", output_relay.__file__, str(self._path)]
        command += [f"{stream.source}:{stream.target}" for stream in self._streams]
        keep = [fd for stream in self._streams for fd in (stream.source, stream.target)]
        null = subprocess.DEVNULL
        group = 0 if own_group else None
        self._child = subprocess.Popen(
            command,
            env={},
            pass_fds=keep,
            process_group=group,
            stdin=null,
            stdout=null,
            stderr=null,
        )
        return self._child

    def _keep_alive(self, child: subprocess.Popen[bytes]) -> None:
        """Start another relay when one died; read the streams ourselves if that cannot be."""
        died: deque[float] = deque(maxlen=DEATHS)
        while True:
            child.wait()
            if self._closing:
                return
            _log.error("the relay of the job's output ended with code %s", child.returncode)
            died.append(time.monotonic())
            try:
                if len(died) == DEATHS and died[-1] - died[0] < DEATHS_S:
                    raise OSError("relays die as soon as they are started")
                child = self._spawn(own_group=False)
            except OSError:
                _log.exception("this process copies the output, and keeps it no more")
                for stream in self._streams:
                    args = (stream.source, stream.target, None)
                    threading.Thread(
                        target=output_relay.copy_stream, args=args, daemon=True
                    ).start()
                return


def _lifted(fd: int) -> int:
    """Return a descriptor that is none of the standard streams, one of which may be closed."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST)
    finally:
        os.close(fd)


def _open(fd: int) -> _Stream:
    """Open a stream in the place of `fd`: a pseudo terminal for a terminal, else a pipe."""
    target = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST)
    is_terminal = os.isatty(fd)
    source, job = map(_lifted, os.openpty() if is_terminal else os.pipe())
    if not is_terminal:
        return _Stream(job, source, target)
    with suppress(termios.error):  # of a terminal that hangs up: its size is missing then, too
        modes = termios.tcgetattr(target)
        modes[OFLAG] &= ~termios.OPOST  # the terminal itself does that
        modes[LFLAG] &= ~termios.ECHO
        termios.tcsetattr(job, termios.TCSANOW, modes)
    size = output_relay.read_terminal_size(target)
    if size is not None:
        fcntl.ioctl(source, termios.TIOCSWINSZ, size)
    return _Stream(job, source, target)


NAME = "supervisor.log"
MAX_WAITING = 256  # records; project default
MAX_BYTES, BACKUPS = 1 << 20, 3  # project defaults
CLOSE_S = 1.0  # for what still waits at the end

Line = MutableMapping[str, Any]


class SupervisorLog(logging.Handler):
    """Takes the records of all loggers of this package, between `start` and `stop`.

    Args:
        path: the file.
        run: id of the run.
        incident: returns the id of the open incident, None without one. Called on any thread.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        incident: Callable[[], str | None],
        redactor: Redactor,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(logging.INFO)
        self._path, self._max_bytes = path, max_bytes
        self._run = run
        self._incident = incident
        self._redactor = redactor
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._thread = Thread(target=self._work, name="supervisor.log", daemon=True)

    def start(self) -> None:
        """Begin; without a thread to spare nothing is logged."""
        try:
            self._thread.start()
        except RuntimeError:  # at the limit of processes and threads
            return
        logger = logging.getLogger(__package__.partition(".")[0])
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False

    def stop(self) -> None:
        """End, after `CLOSE_S` at the latest."""
        logging.getLogger(__package__.partition(".")[0]).removeHandler(self)
        if not self._thread.is_alive():
            return
        try:
            if self._dropped:
                final_record = {
                    "msg": "the log is incomplete",
                    "name": __name__,
                    "levelname": "WARNING",
                }
                record = logging.makeLogRecord({**final_record, "dropped": self._dropped})
                self._queue.put(record, timeout=CLOSE_S)
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:  # the disk hangs
            return
        self._thread.join(CLOSE_S)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record; never waits."""
        if record.exc_info:  # at once: a traceback would keep its frames alive
            record.exc_text = "".join(traceback.format_exception(*record.exc_info))
            record.exc_info = None
        record.incident, record.dropped = self._incident(), self._dropped
        try:
            self._queue.put_nowait(record)
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        record = self._queue.get()
        if record is None:
            return
        try:
            handler = _Rotating(
                self._path, maxBytes=self._max_bytes, backupCount=BACKUPS, delay=True
            )
            handler.setFormatter(self._formatter())
        except Exception:  # a broken installation costs the log, not the run
            return
        while record is not None:
            handler.handle(record)
            record = self._queue.get()
        with suppress(OSError):  # of what was buffered, on a full disk
            handler.close()

    def _formatter(self) -> logging.Formatter:
        import structlog  # here, where nobody waits for the import

        return structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                self._bind,
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                self._redact,
                structlog.processors.JSONRenderer(default=str),
            ],
        )

    def _bind(self, _logger: Any, _method: str, line: Line) -> Line:
        """Add what belongs to every line."""
        record: logging.LogRecord = line["_record"]
        line["run"], line["incident"] = self._run, getattr(record, "incident", None)
        if record.exc_text:
            line["exception"], record.exc_text = record.exc_text, None
        if dropped := getattr(record, "dropped", 0):
            line["dropped"] = dropped
        return line

    def _redact(self, _logger: Any, _method: str, line: Line) -> Line:
        clean: Line = self._redactor.tree(dict(line))
        return clean


class _Rotating(RotatingFileHandler):
    """Opens as all files of a run are opened, and is silent where the disk fails."""

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        fd = files.open_file(Path(self.baseFilename), flags)
        return os.fdopen(fd, "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Drop it."""
