"""Wait for something in another process or thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


def slack() -> float:
    """Return how many processes wait for each processor, 1 to 6: all takes longer by that."""
    return min(6.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def wait_until(
    check: Callable[[], Any], what: str = "the condition", *, within_s: float = 60.0, every_s=0.01
) -> Any:
    """Return the first true result of `check`; fail after `within_s`, more on a loaded machine."""
    deadline = time.monotonic() + within_s * slack()
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(every_s)
    return found
