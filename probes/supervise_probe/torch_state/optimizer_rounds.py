"""The optimizers of one step: those that are stepped with no backward in between.

A round is over after the optimizer that ended the last one. If that one does not come, it is over
at the next backward, or when one of its optimizers comes a second time; that is late.

An optimizer that is new to the round may bring a backward inside its closure, and then begins a
step of its own. That shows inside the closure: until there nothing is counted to either of them.
"""

from __future__ import annotations

from typing import List, Sequence

PATIENCE = 8  # rounds without the last optimizer before the order is learned again


class Round:
    """The round under way, and what is known of those before.

    Attributes:
        members: ids of its optimizers so far, in order. before: those of the round before.
    """

    __slots__ = ("_last", "_misses", "before", "members")

    def __init__(self) -> None:
        self.members: List[int] = []
        self.before: List[int] = []
        self._last = 0  # id of the optimizer that ends a round; 0: not known yet
        self._misses = 0

    def ends(self) -> bool:
        """Whether the newest member is the one that ends a round."""
        return self.members[-1] == self._last

    def joins_late(self, key: int) -> None:
        """An optimizer belongs to the round before: wait for it the next time."""
        self.before.append(key)
        self._last = key
        self._misses = 0

    def close(self, on_time: bool) -> None:
        """It is over, and the next one begins."""
        self.before, self.members = self.members, []
        if on_time:
            self._last = self.before[-1]
            self._misses = 0
            return
        self._misses += 1
        if not self._last or self._misses >= PATIENCE:
            self._last = self.before[-1]
            self._misses = 0

    def expect(self, key: int, before: Sequence[int] = ()) -> None:
        """Rounds end with this optimizer from now on (0: that is to be learned)."""
        self._last, self.before = key, list(before)
        self._misses = 0
