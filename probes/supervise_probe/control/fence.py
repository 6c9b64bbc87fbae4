"""A rank's side of a fence: what it has promised, and which step it means by its number."""

from __future__ import annotations

from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Deque, Dict, List, NamedTuple, Tuple

if TYPE_CHECKING:
    from ..runtime.position import Position

COMPARED = 16  # newest boundaries that the ranks compare before they act together
POLL_S = 0.0005  # between two looks for a verdict; it is mostly there already
MOST_WAIT_S = 30.0


class Fence(NamedTuple):
    """What a rank has promised.

    Attributes:
        id: of the file of its verdict. step: the boundary that is not passed without one.
        key, verb, args: of the command. wait_s: how long the rank waits there.
    """

    id: str
    step: int
    key: str
    verb: str
    args: Dict[str, Any]
    wait_s: float


class Boundaries:
    """The newest boundaries of a rank, each with the number of collectives of the whole job so far,
    and when it was.

    All ranks of the default group take part in each of its collectives. So ranks that have made
    another number of them by the end of one step do not mean the same step by its number. Where
    the number does not grow, as in a pipeline or a mesh with groups of its own, the times show
    whether the ranks wait for each other.
    """

    def __init__(self, torch: Any, position: Position) -> None:
        # No reference to a group is kept: it would outlive its end.
        self._groups: Any = getattr(torch.distributed, "GroupMember", None)
        self._position = position
        self._seen: Deque[Tuple[int, int, int]] = deque(maxlen=COMPARED)

    def cross(self) -> None:
        """A step has just ended: 0.8 us."""
        try:
            number = self._groups.WORLD._get_sequence_number_for_group()
        except (AttributeError, RuntimeError):  # there is no such group, or it does not count
            return
        self._seen.append((self._position.step - 1, number, monotonic_ns()))

    def newest(self) -> List[Tuple[int, int, int]]:
        """Return each step, the number of collectives by its end, and the time of that in ns of
        CLOCK_MONOTONIC, oldest first."""
        return list(self._seen)


def elapsed_s(since_ns: int) -> float:
    """Return the time since then, in seconds."""
    return (monotonic_ns() - since_ns) / 1e9
