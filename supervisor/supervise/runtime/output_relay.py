"""Copies the output of a job to where it would have gone, and keeps it; started by `logs`.

    python -I -S output_relay.py LOG SOURCE:TARGET...

It runs until nobody has the other end of any SOURCE open, and so outlives the supervisor. What is
kept goes through a queue of limited size to a thread of its own: a disk that is full or hangs costs
the log, never the job. A TARGET whose reader has gone is written to no more; the job is not told,
and trains on. One that is slow slows the job, as it would without us.

Where TARGET is a terminal, SOURCE is the master of a pseudo terminal: its size follows that of the
terminal, and the foreground is told (SIGWINCH) once it does.

Standard library only: it is started without our packages.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import sys
import termios
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

BLOCK = 1 << 16
LINE = 1 << 16  # bytes: a longer line is kept in pieces
MOST_WAITING = 8 << 20  # bytes that wait for the disk; project default
MOST_KEPT, FILES = 64 << 20, 4  # bytes of one file, and how many there are; project defaults
SIZE_S = 0.25  # between two looks at the size of a terminal
IGNORED = ("HUP", "INT", "QUIT", "PIPE", "TERM", "USR1", "USR2", "TSTP", "TTIN", "TTOU")


class OutputLog:
    """The file that keeps the output, and `.1` to `.3`, which hold what came before.

    Args:
        path: of the newest file; it is appended to.

    Attributes:
        waiting: bytes that wait for the disk. lost: bytes that were not kept since the last note.
    """

    def __init__(self, path: str, max_bytes: int = MOST_KEPT, waiting: int = MOST_WAITING) -> None:
        self._path = path
        self._most = max_bytes
        self._most_waiting = waiting
        self._queue: deque[bytes] = deque()
        self.waiting = self.lost = 0
        self._over = False
        self._change = threading.Condition()
        self._fd = -1
        self._size = 0
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Keep these bytes, unless too many wait already. Never waits for the disk."""
        if not data:
            return
        with self._change:
            if self.waiting + len(data) > self._most_waiting:
                self.lost += len(data)
                return
            if self.lost:
                note = (
                    f"\n[supervise: {self.lost} bytes were not kept: the disk did not take them]\n"
                )
                data, self.lost = note.encode() + data, 0
            self._queue.append(data)
            self.waiting += len(data)
            self._change.notify()

    def close(self, within_s: float) -> None:
        """Write what waits, as far as the disk takes it in that time."""
        with self._change:
            self._over = True
            self._change.notify()
        self._thread.join(within_s)

    def _write_all(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue or self._over)
                if not self._queue:
                    return
                data = self._queue.popleft()
                self.waiting -= len(data)
            try:
                self.write(data)
            except OSError:  # the disk is full, or gone
                with self._change:
                    self.lost += len(data)
                self._shut()

    def write(self, data: bytes) -> None:
        """Append to the file; begin another one when it is full. Raises OSError."""
        if self._fd < 0:
            self._fd = os.open(
                self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600
            )
            self._size = os.fstat(self._fd).st_size
        write_all(self._fd, data)
        self._size += len(data)
        if self._size >= self._most:
            self._shut()
            for number in range(FILES - 1, 0, -1):
                older = f"{self._path}.{number - 1}" if number > 1 else self._path
                with suppress(FileNotFoundError):
                    Path(older).replace(f"{self._path}.{number}")

    def _shut(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)
        self._fd = -1


def copy_stream(source: int, target: int, log: OutputLog | None) -> None:
    """Copy until nobody has the other end of `source` open."""
    has_reader, partial = True, b""
    while True:
        try:
            data = os.read(source, BLOCK)
        except OSError:  # EIO: nobody has the pseudo terminal open
            data = b""
        if log is not None:
            partial += data
            end = len(partial) if not data or len(partial) > LINE else last_line_end(partial)
            log.put(partial[:end])
            partial = partial[end:]
        if not data:
            return
        if has_reader:
            try:
                write_all(target, data)
            except OSError:  # a closed pipe or terminal, a full disk
                has_reader = False


def last_line_end(data: bytes) -> int:
    """Return where the last whole line ends, 0 without one; the carriage return of a bar counts.

    Two streams go into one log, and would cut each other's lines.
    """
    return max(data.rfind(b"\n"), data.rfind(b"\r")) + 1


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, also where somebody made `fd` non-blocking. Raises OSError."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])


def follow_size(source: int, terminal: int, over: threading.Event) -> None:
    """Give the pseudo terminal the size of the terminal, whenever that changes."""
    previous_size = read_terminal_size(terminal)
    while not over.wait(SIZE_S):
        size = read_terminal_size(terminal)
        if size in (previous_size, None):
            continue
        previous_size = size
        with suppress(OSError):
            fcntl.ioctl(source, termios.TIOCSWINSZ, size)
            os.killpg(os.tcgetpgrp(terminal), signal.SIGWINCH)


def read_terminal_size(terminal: int) -> bytes | None:
    """Return rows and columns as the kernel packs them, None if it is no terminal any more."""
    try:
        return fcntl.ioctl(terminal, termios.TIOCGWINSZ, struct.pack("4H", 0, 0, 0, 0))
    except OSError:
        return None


def main(path: str, streams: Iterable[str]) -> None:
    """Copy all streams to their ends."""
    for name in IGNORED:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    log, over, threads = OutputLog(path), threading.Event(), []
    for stream in streams:
        source, target = map(int, stream.split(":"))
        threads.append(threading.Thread(target=copy_stream, args=(source, target, log)))
        if os.isatty(target):
            args = (source, target, over)
            threading.Thread(target=follow_size, args=args, daemon=True).start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    log.close(within_s=10.0)
    os._exit(0)  # a thread may wait for a disk that hangs


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
