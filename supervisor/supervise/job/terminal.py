"""The terminal, lent to the job while it runs in the foreground.

The job has a process group of its own and we hand it the terminal, so that Ctrl-C, Ctrl-Z and
window changes reach it once and directly, as without us. Ctrl-Z then stops the job but not us; we
take the terminal back and stop our own group, which is what the shell waits for. When the shell
continues us, the terminal goes back to the job and the job is continued.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Terminal:
    """The controlling terminal of this process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def find(cls) -> Terminal | None:
        """Return the controlling terminal, or None when there is none (a service, CI, a pipe)."""
        try:
            return cls(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        except OSError:
            return None

    def foreground(self) -> int:
        """Return the process group in the foreground, 0 when the terminal is gone."""
        try:
            return os.tcgetpgrp(self._fd)
        except OSError:
            return 0

    def ours(self) -> bool:
        """Return whether our own group is in the foreground: what is typed comes to us."""
        return self.foreground() == os.getpgrp()

    def lend(self, group: int) -> bool:
        """Put `group` in the foreground if it is ours to give; return whether it is there now."""
        if self.foreground() not in (os.getpgrp(), group):
            return False
        return self._put(group)

    def take_back(self, group: int) -> None:
        """Put our own group in the foreground if `group` is there, or a group that is no more."""
        front = self.foreground()
        if front == group or (front not in (0, os.getpgrp()) and not _exists(front)):
            self._put(os.getpgrp())

    def follow(self, group: int, to: int) -> None:
        """The job left `group` for `to`: that takes its place, or we do if it left the session."""
        if self.foreground() == group:
            self._put(to) or self._put(os.getpgrp())

    def close(self) -> None:
        """Close our descriptor; the terminal itself stays."""
        os.close(self._fd)

    def _put(self, group: int) -> bool:
        with _unstoppable():
            try:
                os.tcsetpgrp(self._fd, group)
            except OSError:  # the group has just ended, or the terminal hung up
                return False
        return True


def stop_ourselves(signum: int) -> None:
    """Stop our whole process group as the terminal would have; returns when it is continued.

    In an orphaned process group, where no shell could continue us, the kernel discards the signal
    and this returns at once.
    """
    before = signal.signal(signum, signal.SIG_DFL)
    try:
        os.kill(0, signum)
    finally:
        signal.signal(signum, before)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def _unstoppable() -> Iterator[None]:
    """Changing the foreground from the background would stop us (SIGTTOU)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
