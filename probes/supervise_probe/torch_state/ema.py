"""Averages over the steps so far, in a few numbers each, which a rollback can put back exactly.

Pure arithmetic; knows no metric and no torch.
"""

from __future__ import annotations

from typing import Dict, Mapping, Optional


class Average:
    """Exponential moving average without the bias of its start: m_t / (1 - decay^t).

    Args:
        name: of its numbers in a state.
        decay: weight of the past, such as 0.99.

    Attributes:
        value: the average; None before the first value.
    """

    __slots__ = ("_decay", "_keys", "_new", "_sum", "_weight", "value")

    def __init__(self, name: str, decay: float) -> None:
        self._decay = decay
        self._new = 1.0 - decay
        self._sum = self._weight = 0.0
        self._keys = name + ".sum", name + ".weight"
        self.value: Optional[float] = None

    def add(self, value: float) -> None:
        """Take one more value, which must be finite."""
        total = self._sum = self._decay * self._sum + self._new * value
        weight = self._weight = self._decay * self._weight + self._new
        self.value = total / weight

    def save(self, state: Dict[str, float]) -> None:
        """Add its numbers to `state`."""
        total, weight = self._keys
        state[total], state[weight] = self._sum, self._weight

    def load(self, state: Mapping[str, float]) -> None:
        """Put back what `save` wrote."""
        total, weight = self._keys
        self._sum, self._weight = state.get(total, self._sum), state.get(weight, self._weight)
        self.value = self._sum / self._weight if self._weight else None


class Window:
    """Share of the last `size` steps in which something happened; of all steps while fewer.

    Attributes:
        percent: the share; 0 before the first step.
    """

    __slots__ = ("_bits", "_count", "_hits", "_keys", "_mask", "_size", "percent")

    def __init__(self, name: str, size: int) -> None:
        self._size, self._mask = size, (1 << size) - 1
        self._bits = self._count = self._hits = 0
        self._keys = name + ".bits", name + ".count"
        self.percent = 0.0

    def add(self, happened: bool) -> None:
        """One more step."""
        bits = self._bits
        if self._count < self._size:
            self._count += 1
        if not bits and not happened:
            return
        bits = bits << 1 | happened
        self._hits += happened - (bits >> self._size)
        self._bits = bits & self._mask
        self.percent = 100.0 * self._hits / self._count

    def save(self, state: Dict[str, float]) -> None:
        """Add its numbers to `state`: a whole number of `size` bits, and how many of them count."""
        bits, count = self._keys
        state[bits], state[count] = self._bits, self._count

    def load(self, state: Mapping[str, float]) -> None:
        """Put back what `save` wrote."""
        bits, count = self._keys
        self._bits, self._count = int(state.get(bits, 0)), int(state.get(count, 0))
        self._hits = bin(self._bits).count("1")
        self.percent = 100.0 * self._hits / self._count if self._hits else 0.0
