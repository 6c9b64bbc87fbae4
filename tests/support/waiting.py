"""Wait for something in another process or thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


def wait_until(
    check: Callable[[], Any], what: str = "the condition", *, within_s: float = 60.0, every_s=0.01
) -> Any:
    """Return the first true result of `check`; fail after `within_s`, more on a loaded machine."""
    load = min(6.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
    deadline = time.monotonic() + within_s * load
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(every_s)
    return found
