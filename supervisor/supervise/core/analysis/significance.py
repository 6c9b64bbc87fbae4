"""How likely chance alone is: an exact tail, and the correction for asking many at once."""

from __future__ import annotations

import math
from collections.abc import Mapping


def binomial_tail(hits: int, tries: int, share: float) -> float:
    """Return the chance of at least `hits` in `tries` that each hit with probability `share`.

    The sum over j >= hits of C(tries, j) share^j (1 - share)^(tries - j), term by term.
    """
    rest = 1.0 - share
    terms = (
        math.comb(tries, j) * share**j * rest ** (tries - j) for j in range(max(0, hits), tries + 1)
    )
    return min(1.0, math.fsum(terms))


def normal_tail(z: float) -> float:
    """Return the chance that a standard normal number is above `z`."""
    return math.erfc(z / math.sqrt(2.0)) / 2.0


def survivors(found: Mapping[str, float], asked: int, alpha: float) -> list[str]:
    """Return what is significant at `alpha` for all questions together, the surest first.

    The step-down of Holm (Scandinavian Journal of Statistics 6, 1979, 65-70): the i-th smallest of
    m p-values must be at most alpha / (m - i + 1), and after the first that is not, none counts.

    Args:
        found: p-value of each question that may have an answer.
        asked: how many were asked in all; those that are not in `found` count as 1.
    """
    kept: list[str] = []
    for place, name in enumerate(sorted(found, key=lambda each: (found[each], each))):
        if found[name] > alpha / max(1, asked - place):
            break
        kept.append(name)
    return kept
