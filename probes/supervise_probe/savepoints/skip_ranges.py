"""Steps whose update is dropped: the batches that did the harm are passed over.

Weights and optimizer stay as they are, the loop and its data go on. Where it is known which batch a
step saw before, the batch decides and not the number: another one is trained on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Sequence

from ..errors import Refused

if TYPE_CHECKING:
    from ..collectors.batch import Collector as BatchCollector
    from ..context import ProbeContext
    from ..torch_state.optimizers import Optimizers
    from .step_history import StepHistory

MOST = 64  # ranges that are remembered


class Range(NamedTuple):
    """Steps `first` to `last`, and the fingerprints of their batches as far as they are known."""

    first: int
    last: int
    batches: Dict[int, float]


def parse(wanted: Any) -> Sequence[int]:
    """Return `[first, last]`.

    Raises:
        Refused: that is not what it is.
    """
    whole = isinstance(wanted, (list, tuple)) and all(type(step) is int for step in wanted)
    if not whole or len(wanted) != 2 or not 0 <= wanted[0] <= wanted[1]:
        raise Refused(f"skip must be the first and the last step, not {wanted!r}")
    return list(wanted)


class SkipRanges:
    """The steps that are skipped whenever they come.

    Attributes:
        ranges: of these steps, newest last.
    """

    def __init__(
        self,
        context: ProbeContext,
        batch: BatchCollector,
        optimizers: Optimizers,
        tape: StepHistory,
    ) -> None:
        self._position, self._batch = context.position, batch
        self._optimizers, self._tape = optimizers, tape
        self.ranges: List[Range] = []
        for wanted in context.config.skip:
            self.order(*parse(wanted))

    def order(self, first: int, last: int) -> None:
        """Skip the steps `first` to `last` from now on."""
        self.ranges.append(Range(first, last, self._tape.batches(first, last)))
        del self.ranges[:-MOST]

    def due(self) -> bool:
        """Whether the step under way is one of them. Its input has been looked at."""
        step = self._position.step
        return any(one.first <= step <= one.last and self._is_its(one) for one in self.ranges)

    def _is_its(self, one: Range) -> bool:
        seen = self._batch.newest()
        if seen is None or len(self._optimizers.living()) > 1:  # the hash is of a part only
            return True
        return self._position.step not in one.batches or seen in one.batches.values()
