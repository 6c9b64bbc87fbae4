"""What every watch here shares: copying, and one rule about step ids.

A step id must be newer than the last one. A sample of an older or equal step is not taken: the
reading is UNKNOWN and nothing is remembered. So a frame that comes twice changes nothing, and a run
that goes back without `rewind` turns blind, which people get to hear of, and never looks healthy.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from ..core.model.decisions import UNKNOWN
from ..core.model.interfaces import Watch
from ._baseline import Baseline, Freeze

MUTABLE = (list, Baseline, Freeze)
NEVER = -1  # the last step of a watch that has seen none


class Memory(Watch):
    """A watch whose slots hold plain values, lists of plain values, and baselines.

    Attributes:
        last: newest step taken, NEVER before the first.
    """

    __slots__ = ("last",)
    _slots: ClassVar[tuple[str, ...]] = ()
    last: int

    def __init_subclass__(cls) -> None:
        cls._slots = tuple(name for base in cls.__mro__ for name in getattr(base, "__slots__", ()))

    def __init__(self) -> None:
        self.reset()

    def copy(self) -> Self:
        """Return an independent copy."""
        twin = object.__new__(type(self))
        for name in self._slots:
            value: Any = getattr(self, name)
            setattr(twin, name, value.copy() if isinstance(value, MUTABLE) else value)
        return twin

    def reset(self) -> None:
        """Forget everything; subclasses add their own."""
        self.raw = UNKNOWN
        self.last = NEVER
