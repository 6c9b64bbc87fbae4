"""Work beside the training: one thread of the lowest priority, there only while there is work.

Rule 1: a task reads what the training no longer changes, and takes no step's time but the
interpreter's lock for moments.
Rule 2: at the exit of the process the thread is waited for: one that is inside torch while Python
goes away would take the job's exit code with it.
"""

import os
import threading
from collections import deque
from typing import Any, Callable, Deque, List, Optional, Tuple

LOWEST = 19  # nice value; on Linux it is the thread's own


class Background:
    """Tasks in order of arrival.

    Attributes:
        failures: what tasks raised, as sentences; whoever reports them empties it.
    """

    def __init__(self) -> None:
        self.failures: List[str] = []
        self._tasks: Deque[Tuple[Callable[..., Any], Tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._thread: Optional[threading.Thread] = None

    @property
    def busy(self) -> bool:
        """Whether a task is running or waiting."""
        return self._thread is not None

    def do(self, task: Callable[..., Any], *args: Any) -> None:
        """Call `task(*args)` soon, in the thread."""
        with self._lock:
            self._tasks.append((task, args))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="supervise-background", daemon=True
                )
                self._thread.start()

    def close(self, wait_s: float) -> bool:
        """Forget what waits, and wait for what runs; whether it has ended."""
        with self._lock:
            self._tasks.clear()
            thread = self._thread
        if thread is not None:
            thread.join(wait_s)
        return not self.busy

    def _work(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        except (OSError, AttributeError):  # then it runs as the others do
            pass
        while True:
            with self._lock:
                if not self._tasks:
                    self._thread = None
                    return
                task, args = self._tasks.popleft()
            try:
                task(*args)
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            del task, args  # what it held must not wait for the next task
