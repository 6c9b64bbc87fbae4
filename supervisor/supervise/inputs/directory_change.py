"""Detection of new names in a directory: one `stat` where a listing would cost a hundred times."""

from __future__ import annotations

import time
from pathlib import Path

RESCAN_NS = 1_000_000_000  # after this time it is listed anyway: a network file system may lag
FRESH_NS = 100_000_000  # a directory that changed so lately may change again within its clock


class DirectoryChange:
    """Remembers how a directory looked when it was listed last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed_ns = self._listed_ns = 0

    def due(self, now_ns: int) -> bool:
        """Return whether to list it now; the caller then does."""
        try:
            changed_ns = self._path.stat().st_mtime_ns
        except OSError:  # not made yet, or removed at the end
            return False
        if changed_ns == self._changed_ns and now_ns < self._listed_ns + RESCAN_NS:
            return False
        is_fresh = abs(time.time_ns() - changed_ns) < FRESH_NS
        self._changed_ns, self._listed_ns = (0 if is_fresh else changed_ns), now_ns
        return True
