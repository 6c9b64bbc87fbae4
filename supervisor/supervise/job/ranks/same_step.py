"""Do all ranks mean the same step by its number? They compare their newest boundaries.

Every rank of the default group takes part in each of its collectives, so a number of them that
grows is a proof. One that stays the same proves nothing: the ranks of a pipeline send to each
other, those of a mesh have groups of their own, and processes that only share a launcher do
neither. Then the times count: ranks that wait for each other in each step are never a step apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Boundary = Sequence[int]  # step, number of collectives by its end, CLOCK_MONOTONIC in ns


class Objection(NamedTuple):
    """Why a command is not carried out.

    Attributes:
        lasting: it is how this job is made, so no other command will fare better.
    """

    why: str
    lasting: bool = False


def objection(boundaries: Mapping[int, Sequence[Boundary]]) -> Objection | None:
    """Return which ranks do not mean the same step by its number, None where all do."""
    first, *others = sorted(boundaries)
    for rank in others:
        found = _compare(first, boundaries[first], rank, boundaries[rank])
        if found is not None:
            return found
    return None


def _compare(
    first: int, mine: Sequence[Boundary], rank: int, theirs: Sequence[Boundary]
) -> Objection | None:
    ours = {step: (number, at) for step, number, at in mine}
    other = {step: (number, at) for step, number, at in theirs}
    common = sorted(ours.keys() & other.keys())
    if not common:
        why = f"nobody knows whether ranks {first} and {rank} mean the same step by its number"
        return Objection(why, lasting=not mine or not theirs)
    for step in common:
        if ours[step][0] != other[step][0]:
            return Objection(
                f"by the end of step {step} rank {first} had taken part in {ours[step][0]} "
                f"collectives of the job and rank {rank} in {other[step][0]}: they do not mean "
                "the same step by its number",
                lasting=True,
            )
    if ours[common[0]][0] == ours[common[-1]][0]:
        return _compare_times(first, ours, rank, other, common)
    return None


def _compare_times(
    first: int,
    ours: Mapping[int, tuple[int, int]],
    rank: int,
    other: Mapping[int, tuple[int, int]],
    common: Sequence[int],
) -> Objection | None:
    """They share no collective: has each ended a step before the other ended the next one?"""
    steps = [step for step in common if step + 1 in common]
    apart = [
        step
        for step in steps
        if ours[step][1] > other[step + 1][1] or other[step][1] > ours[step + 1][1]
    ]
    if steps and not apart:
        return None
    what = f"ranks {first} and {rank} take part in no collective of the whole job"
    if not steps:
        return Objection(f"{what}, and have made too few steps together to compare their times")
    return Objection(
        f"{what}, and do not wait for each other: in {len(apart)} of {len(steps)} steps one was a "
        "whole step ahead",
        lasting=True,
    )
