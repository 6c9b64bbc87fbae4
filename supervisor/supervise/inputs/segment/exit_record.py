"""End of a job as its own processes recorded it, for a supervisor that cannot reap it."""

from __future__ import annotations

from pathlib import Path

from ...errors import SegmentError
from .reader import Segment


def recorded_end(shm_dir: Path, pid: int, start_ticks: int) -> int | None:
    """Return the returncode of the job whose first process was `pid`, None where nobody told.

    What that process itself wrote counts. A launcher writes nothing, but passes on what its ranks
    came to: when all that came after it say the same, that counts.

    Args:
        start_ticks: when that process was started, as in `/proc/<pid>/stat`.
    """
    newest: dict[int, tuple[int, int, int | None]] = {}  # rank -> made, pid, returncode
    for path in shm_dir.glob("rank-*.seg"):
        try:
            segment = Segment.open(path, lambda: 0)
            try:
                end = segment.end()
            finally:
                segment.close()
        except SegmentError:
            continue
        found = (segment.created_ns, segment.pid, None if end is None else end[0])
        if segment.start_ticks >= start_ticks:
            newest[segment.rank] = max(found, newest.get(segment.rank, found))
    for _, who, returncode in newest.values():
        if who == pid:
            return returncode
    ends = {returncode for _, _, returncode in newest.values()}
    return ends.pop() if len(ends) == 1 else None
