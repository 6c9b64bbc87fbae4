"""The standard streams of this process, so that no blocked reader of them can delay it.

Standard error is shared with the job and may be a pipe without a reader, a closed terminal or a
full disk. One thread writes to it with plain blocking writes (O_NONBLOCK would change it for the
job too). All others only queue; what does not fit is dropped and counted. Standard output is an
ordinary stream: a command that prints waits for a slow reader, as any program does. The process
ends by `leave`, without Python's last flush, which could block forever or change the exit code to
120.
"""

from __future__ import annotations

import io
import os
import select
import signal
import stat
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO, cast

import click

from ..system import Thread

PIPE_CLOSED = 128 + signal.SIGPIPE  # as a shell reports a program whose reader went away
CANNOT_WRITE = 74  # sysexits EX_IOERR
MAX_BYTES = 256 << 10  # that wait to be written
CHUNK_BYTES = 4096  # PIPE_BUF on Linux: written atomically to a pipe
STALL_S = 2.0  # `flush` gives up after that time without progress


@dataclass(eq=False)
class _Text:
    """One queued text; `lost` is the number of lines that are missing if it cannot be written."""

    data: bytes
    lost: int
    error: OSError | None = None
    is_finished: bool = False


class Stream(io.TextIOBase):
    """A text stream whose `write` never blocks and never raises.

    Args:
        fd: where to write; -1 is a closed stream.

    Attributes:
        shared: somebody else writes to the same place, and may have left a line unfinished.
    """

    shared = False
    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, fd: int, encoding: str | None = None) -> None:
        self._fd = fd
        self.encoding = encoding or self.encoding
        self._change = threading.Condition()
        self._queue: deque[_Text] = deque()
        self._waiting_bytes = 0
        self._partial = ""  # a line without its end
        self._lost = 0  # lines since the last successful write
        self._moved_s = 0.0  # when something was written, or the queue was empty
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> int:
        """Queue the whole lines of `text`; the rest waits for its end or for `flush`."""
        with self._change:
            lines, end, self._partial = (self._partial + text).rpartition("\n")
            self._put(lines + end)
        return len(text)

    def deliver(self, text: str) -> None:
        """Write `text` and wait until it is written. Raises OSError."""
        with self._change:
            put = self._put(text)
            self._change.wait_for(lambda: put.is_finished)
        if put.error is not None:
            raise put.error

    def flush(self) -> None:
        """Wait until all is written, or for STALL_S without progress; never raises."""
        with self._change:
            partial, self._partial = self._partial, ""
            self._put(partial)
            least_s = time.monotonic() + 0.1  # the process may have been stopped, with the writer
            while self._queue:
                if not self._begin() and self._write_what_fits():
                    continue
                left_s = max(self._moved_s + STALL_S, least_s) - time.monotonic()
                if left_s <= 0:
                    return
                self._change.wait(min(left_s, 0.1))

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._fd >= 0 and os.isatty(self._fd)

    def fileno(self) -> int:
        if self._fd < 0:
            raise io.UnsupportedOperation("the stream is closed")
        return self._fd

    # ── with the lock held ────────────────────────────────────────────────────────────────────────

    def _put(self, text: str) -> _Text:
        data = text.encode(self.encoding, self.errors)
        put = _Text(data, lost=data.count(b"\n") or 1)
        if data and self.shared:
            put.data = fresh_line_bytes(self._fd) + data
        if not data:
            put.is_finished = True
        elif self._queue and self._waiting_bytes + len(data) > MAX_BYTES:
            put.error, put.is_finished = BlockingIOError("the queue is full"), True
            self._lost += put.lost
        else:
            self._report_lost()
            self._append(put)
            self._begin()
        return put

    def _append(self, text: _Text) -> None:
        if not self._queue:
            self._moved_s = time.monotonic()
        self._queue.append(text)
        self._waiting_bytes += len(text.data)
        self._change.notify_all()

    def _report_lost(self) -> None:
        if self._lost:
            subject = "1 line is" if self._lost == 1 else f"{self._lost} lines are"
            notice = f"supervise: {subject} missing here: standard error could not be written\n"
            self._append(_Text(notice.encode(self.encoding, self.errors), self._lost))
            self._lost = 0

    def _settle(self, error: OSError | None) -> None:
        """Remove the first text: it was written, or cannot be."""
        text = self._queue.popleft()
        self._waiting_bytes -= len(text.data)
        self._moved_s = time.monotonic()
        text.error, text.is_finished = error, True
        if error is not None:
            self._lost += text.lost  # try the next text: a disk may have room again
        elif not self._queue:
            self._report_lost()
        self._change.notify_all()

    def _begin(self) -> bool:
        """Start the thread unless it runs; return False if no thread can start."""
        if self._thread is None:
            thread = Thread(target=self._run, name="stderr", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _write_what_fits(self) -> bool:
        """Without a thread: write what does not block. Return whether it made progress."""
        text = self._queue[0]
        if self._fd >= 0 and not _ready(self._fd, 0):
            return False
        try:
            text.data = text.data[os.write(self._fd, text.data[:CHUNK_BYTES]) :]
        except OSError as error:
            self._settle(error)
        else:
            self._moved_s = time.monotonic()
            if not text.data:
                self._settle(None)
        return True

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        # Else `stty tostop` would stop this process while the job is in the foreground.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue)
                data = self._queue[0].data
            error = self._write(data)
            with self._change:
                self._settle(error)

    def _write(self, data: bytes) -> OSError | None:
        remaining = memoryview(data)
        while remaining:
            try:
                remaining = remaining[os.write(self._fd, remaining[:CHUNK_BYTES]) :]
            except BlockingIOError:  # the job made it non-blocking, here too
                _ready(self._fd, None)
            except OSError as error:
                return error
            self._moved_s = time.monotonic()
        return None


def fresh_line_bytes(fd: int) -> bytes:
    """Return what begins an empty line of a terminal or a file, and nothing if it is on one.

    A progress bar leaves the cursor behind itself, where our line would begin. As many blanks as
    the terminal has columns end in the next line if they did not begin a line, else in the same one
    (a cursor waits behind the last column), and a carriage return goes to its begin: what the job
    wrote stays (the way of zsh's PROMPT_SP).
    """
    try:
        columns = os.get_terminal_size(fd).columns
    except OSError:  # no terminal
        return _line_end(fd)
    return b" " * columns + b"\r\x1b[K" if columns > 0 else b""


def _line_end(fd: int) -> bytes:
    """Return the end of the line that the newest byte of a file is in, nothing of a pipe."""
    with suppress(OSError):
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_size:
            with Path(f"/proc/self/fd/{fd}").open("rb") as file:
                file.seek(status.st_size - 1)
                return b"" if file.read(1) == b"\n" else b"\n"
    return b""


def share_terminal() -> None:
    """The job writes to this terminal, or file, from now on, perhaps a progress bar."""
    stream = sys.stderr
    if isinstance(stream, Stream):
        is_plain = os.environ.get("TERM", "dumb") == "dumb"
        stream.shared = not (stream.isatty() and is_plain)


def _ready(fd: int, timeout_ms: int | None) -> bool:
    """Wait until a write of CHUNK_BYTES would not block, or would fail at once."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(timeout_ms))


def replace_standard_streams() -> None:
    """Replace the standard streams of this process.

    A closed one becomes /dev/null, so that no file opened later gets its number. It stays closed
    for the job.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            if null != fd:
                os.dup2(null, fd, inheritable=False)
                os.close(null)
    if sys.stdin is None:
        sys.stdin = _null("r")
    if sys.stdout is None:
        sys.stdout = _null("w")
    stderr = sys.stderr
    sys.stderr = Stream(-1) if stderr is None else Stream(stderr.fileno(), stderr.encoding)


def _null(mode: str) -> TextIO:
    return cast(TextIO, Path(os.devnull).open(mode, encoding="utf-8"))


def exit_process(code: int) -> NoReturn:
    """End the process with `code`, or with the code of unwritable standard output."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        code = report_unwritable_stdout(error)
    sys.stderr.flush()
    os._exit(code)


def report_unwritable_stdout(error: OSError | ValueError) -> int:
    """Report why standard output cannot be written; return the exit code."""
    sys.stdout = _null("w")
    if isinstance(error, BrokenPipeError):
        return PIPE_CLOSED
    reason = error.strerror if isinstance(error, OSError) else str(error)
    click.echo(f"supervise: cannot write to standard output: {reason}", err=True)
    return CANNOT_WRITE
