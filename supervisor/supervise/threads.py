"""A thread that cannot be started is an error in time, also where memory is short.

`threading.Thread.start` waits without limit for the new thread to say that it runs. One that finds
no memory for its first call ends without a word, and who started it would wait for ever.
"""

from __future__ import annotations

import threading
from typing import Any

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
