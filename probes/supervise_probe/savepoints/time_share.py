"""Delay of the next savepoint, so that all of them take a given share of the time.

Costs are CPU times: on a busy host wall times are five times these, and would leave a job without a
savepoint for long. The first one is paid once: it allocates, and tries the model for the probe
batch.
"""

# Early ones are wanted before anything happens: so much of their time is free, 0.5 % of the first
# 20 s; nine of 11 ms, not one of 100 million parameters. Project default.
FREE_NS = 100_000_000


class TimeShare:
    """The waiting times of one process."""

    def __init__(self, share: float) -> None:
        """`share`: of the wall time that savepoints may take; 0: as much as they do."""
        self._share = share
        self._free_ns = FREE_NS
        self._newest_ns = -1  # none yet

    def wait_ns(self, cost_ns: int) -> int:
        """Return how long none is taken behind one of this cost, in ns.

        The cheaper one of the newest two counts: a single dear one was interrupted.
        """
        if not self._share or self._newest_ns < 0:
            self._newest_ns = 0
            return 0
        free, before = min(self._free_ns, cost_ns), self._newest_ns
        self._free_ns -= free
        self._newest_ns = cost_ns - free
        return self.owed_ns(min(before or self._newest_ns, self._newest_ns))

    def owed_ns(self, cost_ns: int) -> int:
        """Return the time of which this cost is the share, in ns."""
        return int(cost_ns / self._share) if self._share else 0
