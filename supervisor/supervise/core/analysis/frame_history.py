"""The frames of one rank that are kept to answer questions about its loss.

References, not copies: appending one costs a few dozen nanoseconds and a frame of 64 metrics holds
about 2 kB, so 1.3 MB a rank. Evaluations are rare and kept apart, or they would have fallen out of
the frames long before four of them are together.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from ..model.events import Frame

LOSS = "train_loss_raw"
PROBES = ("fixed_probe_loss", "val_loss")  # the first that has enough values answers
FRAMES = 640  # the 266 before an onset, and as many as it takes to answer
EVALUATIONS = 64


class History:
    """Frames, oldest first, in ascending steps.

    Attributes:
        frames: append to it once per frame.
        probed: `(name, column)` of the evaluations that this rank publishes; with any, `probe`
            wants every frame too.
    """

    __slots__ = ("evaluations", "frames", "names", "probed")

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque(maxlen=FRAMES)
        self.evaluations: deque[tuple[str, int, float]] = deque(maxlen=EVALUATIONS)
        self.names: tuple[str, ...] = ()
        self.probed: tuple[tuple[str, int], ...] = ()

    def copy(self) -> History:
        twin = History()
        twin.frames, twin.evaluations = self.frames.copy(), self.evaluations.copy()
        twin.names, twin.probed = self.names, self.probed
        return twin

    def announce(self, names: tuple[str, ...], *, fresh: bool) -> None:
        """Bind names to columns. `fresh`: another process, whose frames are another story."""
        if fresh:
            self.evaluations.clear()
        if fresh or names[: len(self.names)] != self.names:  # or else columns have moved
            self.frames.clear()
        self.names = names
        self.probed = tuple((name, names.index(name)) for name in PROBES if name in names)

    def probe(self, frame: Frame) -> None:
        """Keep the evaluations of a frame."""
        for name, column in self.probed:
            value = frame.values[column] if column < len(frame.values) else None
            if value is not None and value - value == 0.0:
                self.evaluations.append((name, frame.step, value))

    def rewind(self, step: int) -> None:
        """The run goes on with `step`: forget what was seen from there on."""
        while self.frames and self.frames[-1].step >= step:
            self.frames.pop()
        while self.evaluations and self.evaluations[-1][1] >= step:
            self.evaluations.pop()

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return `(step, value)` of the frames kept, oldest first, where the value is finite."""
        if metric not in self.names:
            return []
        column = self.names.index(metric)
        rows = ((f.step, f.values[column]) for f in self.frames if column < len(f.values))
        return [(step, value) for step, value in rows if value is not None and value - value == 0.0]

    def has(self, metric: str, frames: int) -> bool:
        """Return whether the metric was finite in any of the newest `frames` frames."""
        if metric not in self.names:
            return False
        column = self.names.index(metric)
        for frame in islice(reversed(self.frames), frames):
            value = frame.values[column] if column < len(frame.values) else None
            if value is not None and value - value == 0.0:
                return True
        return False

    def runs(self, metric: str) -> bool:
        """Return whether the metric was finite in two frames running, newest looked at first."""
        if metric not in self.names:
            return False
        column, before = self.names.index(metric), False
        for frame in reversed(self.frames):
            value = frame.values[column] if column < len(frame.values) else None
            now = value is not None and value - value == 0.0
            if now and before:
                return True
            before = now
        return False
