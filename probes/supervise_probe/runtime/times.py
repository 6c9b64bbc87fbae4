"""Times of the host by activity, added up by the patched functions."""

from __future__ import annotations

from typing import Callable, Optional


class Times:
    """Running sums in ns. A part that is 0 never was in any step.

    Attributes:
        input, forward, backward, optimizer, comm: since the process began.
        ended: all five when the newest optimizer's step ended.
        collectives: how many were called. show: takes that, an index into `wire.COLLECTIVES` and
            whether it runs; None while the process is no rank.
    """

    __slots__ = (
        "backward",
        "collectives",
        "comm",
        "ended",
        "forward",
        "input",
        "optimizer",
        "show",
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin at nothing: this is another process."""
        self.input = self.forward = self.backward = self.optimizer = self.comm = 0
        self.ended = 0, 0, 0, 0, 0
        self.collectives = 0
        self.show: Optional[Callable[[int, int, bool], None]] = None

    def enters(self, index: int) -> None:
        """A collective begins; it may never return."""
        self.collectives += 1
        if self.show is not None:
            self.show(self.collectives, index, True)

    def leaves(self, index: int) -> None:
        """It returned, or raised."""
        if self.show is not None:
            self.show(self.collectives, index, False)

    def waited(self, elapsed_ns: int, part: str) -> None:
        """`elapsed_ns` passed in a collective, inside `part`, which has not ended ("": in none)."""
        self.comm += elapsed_ns
        if part:
            setattr(self, part, getattr(self, part) - elapsed_ns)

    def inside(self) -> int:
        """Return what was counted so far in the parts that can run inside an optimizer's step."""
        return self.input + self.forward + self.backward + self.comm

    def end(self) -> None:
        """An optimizer's step ended."""
        self.ended = self.input, self.forward, self.backward, self.optimizer, self.comm

    def forward_since(self) -> bool:
        """Whether the outermost module was called since the newest optimizer's step."""
        return self.forward != self.ended[1]
