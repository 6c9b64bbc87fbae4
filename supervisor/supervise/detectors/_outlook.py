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


def reach(
    staying: list[float], size: int, middle: tuple[float, float], factor: float, upper: bool
) -> float:
    """Return what the median plus (`upper` false: less) `factor` MADs is at least (at most).

    `middle`: the least and the greatest that the median can be, as from `medians`.

    Half of the window lies within one MAD of its median. Let a and b be the ends of those of them
    that stay: neighbours, half of the window less `count`. The MAD is no less than the longer way
    from the median to one of these; so median + factor * MAD is least when the median lies in their
    middle, and is b + (factor - 1) / 2 * (b - a) then. The least over all such pairs is looked for
    in strides of a fortieth of the window. `factor` is at least 1.

    Of the pairs whose middle is below all that the median can be, the last is the worst, and of
    those above it the first: at both ends a fifth is left out where that can be told.
    """
    stride, near = size // 40 or 1, len(staying) - ((size + 1) >> 1)
    end = len(staying) - near
    begin = end // 5
    last = end - begin
    if staying[begin] + staying[begin + near - 1] >= 2.0 * middle[0]:
        begin = 0
    if staying[last] + staying[last + near - 1] <= 2.0 * middle[1]:
        last = end
    more = 0.5 * (factor - 1.0)
    firsts = staying[begin + stride - 1 :: stride]
    pairs = zip(firsts, staying[begin + near - 1 : last + near : stride], strict=False)
    if upper:
        return min([b + more * (b - a) for a, b in pairs])
    return max([a - more * (b - a) for a, b in pairs])
