"""A sleep that ends early: for a call from another thread, a signal, or the end of the job.

Nothing is polled meanwhile."""

from __future__ import annotations

import math
import os
import select
from contextlib import suppress

from .process import Process

BLIND_S = 0.02  # longest sleep where the kernel gives no pidfd; project default
_DRAIN_BYTES = 4096


class Wakeup:
    """Wakes one thread, which is the only one that may call `wait` and `close`.

    Attributes:
        fd: the non-blocking end that is written to; `signal.set_wakeup_fd` takes it.
    """

    def __init__(self) -> None:
        self._read, self.fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._process: Process | None = None
        self._pidfd: int | None = None

    def set(self) -> None:
        """Wake the thread, or let its next `wait` return at once. Any thread; never blocks."""
        with suppress(OSError):  # a full pipe wakes as well
            os.write(self.fd, b"\0")

    def wait(self, timeout_s: float, process: Process | None = None) -> bool:
        """Sleep for at most `timeout_s`; return whether something happened.

        Args:
            process: its end wakes the thread, once.
        """
        if process is not self._process:
            self._watch(process)
        if process is not None and self._pidfd is None and process.returncode is None:
            timeout_s = min(timeout_s, BLIND_S)
        ready = {fd for fd, _ in self._poll.poll(math.ceil(max(0.0, timeout_s) * 1e3))}
        if self._read in ready:
            with suppress(OSError):
                os.read(self._read, _DRAIN_BYTES)
        if self._pidfd in ready:
            self._release()
        return bool(ready)

    def close(self) -> None:
        """Close the descriptors."""
        self._release()
        os.close(self._read)
        os.close(self.fd)

    def _watch(self, process: Process | None) -> None:
        self._release()
        self._process = process
        if process is None or process.returncode is not None:
            return
        with suppress(OSError):  # gone already, or pidfds are forbidden here
            self._pidfd = os.pidfd_open(process.pid)
            self._poll.register(self._pidfd, select.POLLIN)

    def _release(self) -> None:
        if self._pidfd is not None:
            self._poll.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
