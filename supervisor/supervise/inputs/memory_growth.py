"""Growth of a job's memory: a lower bound, from two windows. The greater one counts.

Both windows are cut into four parts of equal length, and each part has a level. What the level of a
part is above that of the part before is a rise: three rises. The bound is the least rise, less 10
times what the last rise is below the first, over the time from part to part; 0 at least. So a jump
is no growth, nor are sizes that go up and down, nor is a curve that flattens out.

The short window is for what fills the machine soon: 16 looks, the level is the median of a part.
Against noise, 4 times the scatter is taken off too, and the last rise may be lower than the first
by one scatter; the scatter is the mean distance of the sizes from their least-squares line. The
least of the newest 4 bounds is taken. It is 0 unless the second part is above all that was before
the window, and unless the memory that the machine has left would be used up at that rate within two
hours: loaders, caches and buffers fill quickly too, and stop.

The slow window is for all the rest: the lowest size in each of 40 minutes, the level is the lowest
of a part. A save, an evaluation or a buffer that is freed leaves the lowest size as it was, so they
neither look like growth nor hide it. A peak of minutes that a part begins with hides it for a time.
The window is full in minute 40 behind the first step.

Looks from before the first step, and 5 behind it, are left out: a model is loaded, compiled and
given its moments then.

What it does not see: memory in use that is shared (files in /dev/shm, batches that a DataLoader
hands over), for the sizes are less shared pages; growth in steps more than 10 minutes apart; growth
of the short window below an earlier peak, until the slow one tells it; the limit of a container.
What it sees wrongly: pages that a forked child shares with its parent count in both, so workers
that start look like growth; so does memory that fills steadily for 40 minutes before it is freed.

Source: own. 4 mean distances are some 3 standard deviations of normal noise; all of the numbers are
project defaults.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice, pairwise
from statistics import median

SETTLE = 5  # looks after the first step
WINDOW = 16  # looks: half a minute at one in two seconds
STEADY = 4  # bounds of the short window, of which the least counts
FIRST = SETTLE + WINDOW + STEADY - 1  # looks from the first step to the first bound
SOON_S = 7200.0  # project default: until a machine is full; the slow window is well within it
MINUTE_S, MINUTES = 60.0, 40
PARTS = 4
LEVEL = 5  # looks: a size that lasts shorter, as in a save, is not what there was before
SCATTER = 4.0  # mean distances from the line
SLOWING = 10.0  # times what the last rise is below the first

Points = Sequence[tuple[float, float]]  # seconds, bytes


class Growth:
    """The newest sizes of one job, since it settled."""

    def __init__(self) -> None:
        self._sizes: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._before: deque[float] = deque(maxlen=WINDOW)  # highest level before each look
        self._highest = 0.0
        self._quick: deque[float] = deque(maxlen=STEADY)  # newest bounds of the short window
        self._lowest: deque[tuple[float, float]] = deque(maxlen=MINUTES)  # begin, size
        self._available = 0.0
        self._settling = SETTLE

    def add(self, at_s: float, size: float, available: float) -> None:
        """The job has begun its steps; at `at_s` it had `size` bytes, the machine some left."""
        if self._settling:
            self._settling -= 1
            return
        self._available = available
        self._before.append(self._highest)
        self._sizes.append((at_s, size))
        level = median(y for _, y in islice(reversed(self._sizes), LEVEL))
        self._highest = max(self._highest, level)
        if len(self._sizes) == WINDOW:
            self._quick.append(quick(list(self._sizes), above=self._before[0]))
        if not self._lowest or at_s - self._lowest[-1][0] >= MINUTE_S:
            self._lowest.append((at_s, size))
        else:
            began, lowest = self._lowest[-1]
            self._lowest[-1] = began, min(lowest, size)

    def bound(self) -> float | None:
        """Return bytes a second that the job grows by at least; None in the first `FIRST` looks."""
        if len(self._quick) < STEADY:
            return None
        fast = min(self._quick)
        dangerous = fast > 0.0 and fast * SOON_S >= self._available
        slow = lasting(list(self._lowest)) if len(self._lowest) == MINUTES else 0.0
        return max(fast if dangerous else 0.0, slow)


def quick(points: Points, above: float) -> float:
    """Return the bound of the short window; 0.0 unless its second part is above `above`."""
    levels = [median(y for _, y in part) for part in parts(points)]
    return least(levels, scatter(points), apart(points)) if levels[1] > above else 0.0


def lasting(points: Points) -> float:
    """Return the bound of the slow window, of the lowest size in each minute."""
    levels = [min(y for _, y in part) for part in parts(points)]
    return least(levels, 0.0, apart(points))


def least(levels: Sequence[float], noise: float, apart_s: float) -> float:
    """Return the least rise a second, less noise and slowing; 0.0 for a clock that stands."""
    if apart_s <= 0.0:
        return 0.0
    rises = [after - before for before, after in pairwise(levels)]
    slowing = max(0.0, rises[0] - rises[-1] - noise)
    return max(0.0, min(rises) - SCATTER * noise - SLOWING * slowing) / apart_s


def parts(points: Points) -> list[Points]:
    """Return the window in parts of as many points each."""
    size = len(points) // PARTS
    return [points[i * size : (i + 1) * size] for i in range(PARTS)]


def apart(points: Points) -> float:
    """Return the seconds from one part to the next, on average."""
    return (parts(points)[-1][0][0] - points[0][0]) / (PARTS - 1)


def scatter(points: Points) -> float:
    """Return the mean distance of y from its least-squares line over x, in units of y."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    tilt = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return sum(abs(y - mean_y - tilt * (x - mean_x)) for x, y in points) / len(points)
