"""How far a median and its MAD reach at least, whatever the next samples are.

A window of n samples takes in `count` more, and as many leave. The ones that leave are known: what
is left are the n - count that stay (`Baseline.staying`). Of any k samples of the window at least
k - count stay. So both questions have an answer before the samples come, and a watch need not look
at a sample that is not even outside of that.
"""

from __future__ import annotations


def medians(staying: list[float], size: int, count: int) -> tuple[float, float]:
    """Return the least and the greatest that the median of the window can be."""
    half = size >> 1
    if size & 1:
        return staying[half - count], staying[half]
    least = 0.5 * staying[half - count - 1] + 0.5 * staying[half - count]
    return least, 0.5 * staying[half - 1] + 0.5 * staying[half]


def reach(staying: list[float], size: int, count: int, factor: float, upper: bool) -> float:
    """Return what the median plus (`upper` false: less) `factor` MADs is at least (at most).

    Half of the window lies within one MAD of its median. Let a and b be the ends of those of them
    that stay: neighbours, half of the window less `count`. The MAD is no less than the longer way
    from the median to one of these; so median + factor * MAD is least when the median lies in their
    middle, and is b + (factor - 1) / 2 * (b - a) then. The least over all such pairs is looked for
    in strides of a 32nd of the window. `factor` is at least 1.
    """
    near, stride = (size >> 1) - count, (size >> 5) or 1
    more = 0.5 * (factor - 1.0)
    pairs = zip(staying[stride - 1 :: stride], staying[near - 1 :: stride], strict=False)
    if upper:
        return min([b + more * (b - a) for a, b in pairs])
    return max([a - more * (b - a) for a, b in pairs])
