"""Outside tools that we run ourselves: git, py-spy, the verifier. They end with us, as a tree.

A tool may hang, and may have started others that hold its pipes. Each one is run by a `reaper`,
which kills all of it when it ends, when its time is up, when we hang up, and when we die, of
SIGKILL too. They stay in our process group, which is how they are told from the job's processes.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import process_reaper

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


def run(
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


def end_all() -> None:
    """Have all that runs now killed; whoever waits for one is told that it was."""
    with _lock:
        running = list(_running)
    for child in running:
        child.hang_up()
