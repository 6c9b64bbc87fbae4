"""From raw codes to a reading that does not flicker: `for`, `m_of_n` and `clear`.

`for: k` is `m_of_n: [k, k]`: k breaching samples in a row. A reading becomes BREACH when at least m
of the last n known samples breached. It ends when that no longer holds and the sample is past
`clear`, the bound that replaces the threshold while the reading is BREACH. An UNKNOWN sample is not
counted: it neither advances nor resets anything, and is read as UNKNOWN.

After `rewind` the verdict starts anew: what was counted belonged to a life that was undone.
"""

from __future__ import annotations

import math

from ..core.model.decisions import BREACH, OK
from ._memory import Memory

LONGEST = 1024  # samples in `for` or `m_of_n`; the counter is one integer of that many bits


class Debounced(Memory):
    """A watch with `for`, `m_of_n` and `clear`; `bits` holds the last n breaches, newest lowest."""

    __slots__ = ("bits", "firing", "mask", "need")

    def __init__(self, need: int = 1, of: int = 1) -> None:
        self.need = need
        self.mask = (1 << of) - 1
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.acquit()

    def acquit(self) -> None:
        """Start the verdict anew."""
        self.bits = 0
        self.firing = False

    def settle(self, breach: bool, held: bool) -> int:
        """Count a known sample in and return the reading; `held`: it is not yet past `clear`."""
        bits = self.bits = (self.bits << 1 | breach) & self.mask
        if bits.bit_count() >= self.need:
            self.firing = True
        elif self.firing and not held:
            self.firing = False
        return BREACH if self.firing else OK


def quota(for_: int, m_of_n: tuple[int, int] | None) -> tuple[int, int]:
    """Return m and n."""
    return m_of_n if m_of_n is not None else (for_, for_)


def check_quota(for_: int, m_of_n: tuple[int, int] | None) -> list[tuple[str, str]]:
    """Return what is wrong with `for` and `m_of_n`, by YAML key."""
    if not 1 <= for_ <= LONGEST:
        return [("for", f"must be 1 to {LONGEST} samples, not {for_}")]
    if m_of_n is None:
        return []
    if for_ != 1:
        return [("m_of_n", "give `for` or `m_of_n`, not both")]
    m, n = m_of_n
    if not 1 <= m <= n <= LONGEST:
        return [("m_of_n", f"must be [m, n] with 1 <= m <= n <= {LONGEST}, not [{m}, {n}]")]
    return []


def check_bounds(
    bounds: dict[str, float | None], clear: float | None = None
) -> list[tuple[str, str]]:
    """Return what is wrong with a choice of exactly one bound, and with the side of `clear`.

    The names of upper bounds begin or end with `gt` or `gte`, those of lower ones with `lt`, `lte`.
    """
    given = [(name, value) for name, value in bounds.items() if value is not None]
    names = ", ".join(f"`{name}`" for name in bounds)
    if len(given) != 1:
        return [(given[1][0] if given else next(iter(bounds)), f"give exactly one of {names}")]
    name, bound = given[0]
    if not math.isfinite(bound):
        return [(name, f"must be a finite number, not {bound}")]
    if clear is None:
        return []
    if not math.isfinite(clear):
        return [("clear", f"must be a finite number, not {clear}")]
    upper = name.endswith(("gt", "gte"))
    if clear < bound if upper else clear > bound:
        return []
    return [("clear", f"must be {'below' if upper else 'above'} `{name}` ({bound}), not {clear}")]
