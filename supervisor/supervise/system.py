"""The clock, the terminal, threads and child processes of the supervisor.

`monotonic_ns` is CLOCK_MONOTONIC, the clock of every `at_ns`: it is the same in the probe and here,
and no clock setting moves it. `wall` is for people and for the audit log. The core gets the time
inside events.

`threading.Thread.start` waits without limit for the new thread to say that it runs. One that finds
no memory for its first call ends without a word, and its starter would wait for ever; `Thread`
raises an error in time.

A child is an outside tool: git, py-spy, the verifier. It may hang, and may have started others that
hold its pipes. Each one is run by `process_reaper`, which kills all of it when it ends, when its
time is up, when we hang up, and when we die, of SIGKILL too. They stay in our process group, which
tells them from the job's processes.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

from . import process_reaper

monotonic_ns = time.monotonic_ns


def wall_time(ago_s: float = 0.0) -> str:
    """Return the time of day as UTC ISO-8601 with milliseconds: `2031-05-04T03:02:01.123Z`.

    Args:
        ago_s: seconds before now.
    """
    then = datetime.now(UTC) - timedelta(seconds=ago_s)
    return then.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def terminal_columns(stream: TextIO) -> int:
    """Return the columns of a terminal, 0 for anything else."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


# A command is not broken: a person pastes it. It ends before a new clause.
COMMAND = re.compile(r"supervise(?: --?\w| [a-z]).*?(?=;|, | · | or supervise | \(|\)|$)")
AT_MARGIN = re.compile(r"(?<=\S) {3,}(?=[A-Z ]{4,20}$)")  # before a status
LABEL = re.compile(r"\s*\S+(?: \S+)?\s{2,}")  # `Cause  text`: the text begins in a column


def wrap(line: str, width: int) -> list[str]:
    """Return a line in pieces of at most `width` columns where it has spaces; 0: as it is.

    A word, a path and a command stay in one piece. What follows is indented as the text is.
    """
    gap = AT_MARGIN.search(line)
    if gap and width < len(line) <= width + len(gap[0]) - 2:
        return [line.replace(gap[0], " " * (len(gap[0]) - len(line) + width), 1)]
    if not width or len(line) <= width:
        return [line]
    label = LABEL.match(line)
    indent = len(label[0]) if label else len(line) - len(line.lstrip()) + 2
    indent = indent if indent <= width // 3 else 2
    whole = COMMAND.sub(lambda command: command[0].replace(" ", "\0"), line)
    pieces = textwrap.wrap(
        whole,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )
    return [piece.replace("\0", " ") for piece in pieces]


START_S = 3.0  # a thread runs within milliseconds; project default


class _Started(threading.Event):
    """Says whether the thread runs; who waits too long gives it up, and then it never does."""

    def __init__(self) -> None:
        super().__init__()
        self._settling = threading.Lock()
        self.given_up = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the thread. Raises RuntimeError, as at the limit of threads."""
        if not self.given_up and super().wait(START_S if timeout is None else timeout):
            return True
        with self._settling:
            if self.is_set():
                return True
            self.given_up = True
        raise RuntimeError("can't start new thread: it has not begun")

    def set(self) -> None:
        """Let who waits go on."""
        with self._settling:
            super().set()


class Thread(threading.Thread):
    """As `threading.Thread`; `start` raises RuntimeError within START_S where it cannot."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._started = _Started()

    def run(self) -> None:
        """Do the work, unless who started it went on without it."""
        if not self._started.given_up:
            super().run()


END_S = 2.0  # a tree that was killed is gone in milliseconds, unless it is stuck in the kernel

_running: set[Child] = set()
_lock = threading.Lock()


class Child(subprocess.Popen[bytes]):
    """A tool under its reaper; `returncode` is the tool's, `pid` the reaper's."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        """Start it. Raises OSError: it is not there, or cannot be started."""
        if shutil.which(argv[0], path=(os.environ if env is None else env).get("PATH")) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
        lifeline, line = os.pipe()
        self._line: int | None = line
        command = [sys.executable, "-I", "-S", process_reaper.__file__, str(lifeline), *argv]
        try:
            super().__init__(command, env=env, pass_fds=[lifeline], **options)
        except BaseException:
            self.hang_up()
            raise
        finally:
            os.close(lifeline)
        with _lock:
            _running.add(self)

    def hang_up(self) -> None:
        """Have all of it killed; does not wait. For any thread, safe to repeat."""
        with _lock:
            line, self._line = self._line, None
            _running.discard(self)
        if line is not None:
            os.close(line)

    def end(self) -> None:
        """Have all of it killed, and wait for that, `END_S` at most."""
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self.wait(END_S)
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def talk(self, request: bytes | None, within_s: float) -> tuple[bytes, bytes]:
        """Send `request`; return stdout and stderr once it has ended.

        Raises:
            subprocess.TimeoutExpired: it took longer; all of it was killed.
        """
        try:
            return self.communicate(request, timeout=within_s)
        finally:
            self.end()


def run_tool(
    argv: Sequence[str],
    *,
    within_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a tool to its end, without input.

    Raises:
        OSError: it is not there, or cannot be started.
        subprocess.TimeoutExpired: it took longer; all of it was killed.
    """
    pipe = subprocess.PIPE
    child = Child(argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    out, error = child.talk(None, within_s)
    return subprocess.CompletedProcess(list(argv), child.returncode, out, error)


def end_tools() -> None:
    """Have all that runs now killed; whoever waits for one is told that it was."""
    with _lock:
        running = list(_running)
    for child in running:
        child.hang_up()
