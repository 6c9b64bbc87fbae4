"""One training after the other in one process, as in a sweep or a cross-validation.

What the one before was like says nothing about the next. To the supervisor it is another program of
the same rank, as behind an `exec`: a segment of its own, and every baseline from nothing. Step
numbers go on.

A training is over when none of its optimizers lives and one steps that shares no parameter with
them. While an old one lives it is not told apart from a second optimizer, and the stages of one
model from one another are: they begin anew too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterable

if TYPE_CHECKING:
    from ..torch_state.records import OptimizerInfo

LEAST = 64  # steps; of a shorter one nobody knows what it was like. As the warm-up of `nano`


def another(before: Iterable[OptimizerInfo], new: OptimizerInfo, steps: int) -> bool:
    """Whether `new` is of another training than the optimizers `before` it, `steps` long."""
    old = list(before)
    return (
        steps >= LEAST
        and bool(old)
        and not any(each.reference() is not None or new.ids & each.ids for each in old)
    )
