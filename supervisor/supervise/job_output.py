"""Keeps the output of a job (`--logs`) without standing in its way: see `output_relay`.

The relay is a process that outlives us, in a group of its own, so that what ends us leaves it
alone. While we live we hold both ends of all streams: if the relay dies, another one continues
where it ended, and the job notices nothing. After our death the relay is the only reader.

A stream that goes into a regular file is kept there already, and left as it is. Two that go to the
same place, as after `2>&1`, stay one, so that their order is kept. For the job, a terminal stays a
terminal.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import output_relay

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
                seen = os.fstat(fd)
            except OSError:  # it is closed
                continue
            if stat.S_ISREG(seen.st_mode):
                continue
            place = seen.st_dev, seen.st_ino, seen.st_rdev
            if place not in places:
                places[place] = _open(fd)
            self.outputs[fd] = places[place].job
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
                    threading.Thread(target=output_relay.copy, args=args, daemon=True).start()
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
    size = output_relay.size_of(target)
    if size is not None:
        fcntl.ioctl(source, termios.TIOCSWINSZ, size)
    return _Stream(job, source, target)
