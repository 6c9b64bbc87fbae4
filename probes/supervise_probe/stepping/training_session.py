"""One training after the other in one process, as in a sweep or a cross-validation.

What the one before was like says nothing about the next. To the supervisor it is another program of
the same rank, as behind an `exec`: a segment of its own, and every baseline from nothing. Step
numbers go on.

A training is over when none of its optimizers lives and one steps that shares no parameter with
them. While an old one lives it looks like a second optimizer. Stages of one model
are sessions of their own too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterable

if TYPE_CHECKING:
    from ..torch_state.records import OptimizerInfo

LEAST = 64  # steps; a shorter one says too little. As the warm-up of `nano`


def another(before: Iterable[OptimizerInfo], new: OptimizerInfo, steps: int) -> bool:
    """Whether `new` is of another training than the optimizers `before` it, `steps` long."""
    old = list(before)
    return (
        steps >= LEAST
        and bool(old)
        and not any(each.reference() is not None or new.ids & each.ids for each in old)
    )
