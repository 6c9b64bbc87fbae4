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
    from ..probe import Probe
    from ..torch_state.records import Known

LEAST = 64  # steps; of a shorter one nobody knows what it was like. As the warm-up of `nano`


def another(before: Iterable[Known], new: Known, steps: int) -> bool:
    """Whether `new` is of another training than the optimizers `before` it, `steps` long."""
    old = list(before)
    return (
        steps >= LEAST
        and bool(old)
        and not any(each.reference() is not None or new.ids & each.ids for each in old)
    )


def begin(probe: Probe) -> None:
    """Another one begins with the step under way; what is known of that stays."""
    probe.publisher.flush()
    probe.rollbacks.close()
    probe.writer.close()
    probe.writer = None
    # What this launch was to begin with was for the one before.
    probe.config = probe.config._replace(first_step=0, resume=None, rewarm=None, skip=())
    for collector in probe.collectors.values():
        collector.rewind(probe.pristine)
    if probe.open():
        number = probe.boundary.number
        probe.notice("note", f"another training begins with step {number}: the one before is over")
