"""The clock. Only the edges may ask: the core hears of time inside events.

`monotonic_ns` is CLOCK_MONOTONIC, the clock of every `at_ns`: it is the same in the probe and here,
and no clock setting moves it. `wall` is for people and for the audit log.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

monotonic_ns = time.monotonic_ns


def wall(ago_s: float = 0.0) -> str:
    """Return the time of day as UTC ISO-8601 with milliseconds: `2031-05-04T03:02:01.123Z`.

    Args:
        ago_s: seconds before now.
    """
    then = datetime.now(UTC) - timedelta(seconds=ago_s)
    return then.isoformat(timespec="milliseconds").replace("+00:00", "Z")
