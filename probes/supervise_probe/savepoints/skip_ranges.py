"""Steps whose update is dropped: the batches that did the harm are skipped when they come again.

Weights and optimizer do not change, the loop and its data go on. Where the fingerprint of a step's
batch is known, the fingerprint decides and not the step number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Sequence

from ..errors import Refused

if TYPE_CHECKING:
    from ..collectors.batch import BatchCollector
    from ..context import ProbeContext
    from ..torch_state.records import Optimizers
    from .step_history import StepHistory

RANGES_MAX = 64


class Range(NamedTuple):
    """Steps `first` to `last`, and the fingerprints of their batches as far as they are known."""

    first: int
    last: int
    batches: Dict[int, float]


def parse(text: Any) -> Sequence[int]:
    """Return `[first, last]`.

    Raises:
        Refused: it is no such pair.
    """
    is_list = isinstance(text, (list, tuple)) and all(type(step) is int for step in text)
    if not is_list or len(text) != 2 or not 0 <= text[0] <= text[1]:
        raise Refused(f"skip must be the first and the last step, not {text!r}")
    return list(text)


class SkipRanges:
    """The steps that are skipped.

    Attributes:
        ranges: of these steps, newest last.
    """

    def __init__(
        self,
        context: ProbeContext,
        batch: BatchCollector,
        optimizers: Optimizers,
        history: StepHistory,
    ) -> None:
        self._position, self._batch = context.position, batch
        self._optimizers, self._history = optimizers, history
        self.ranges: List[Range] = []
        for skip in context.config.skip:
            self.add(*parse(skip))

    def add(self, first: int, last: int) -> None:
        """Skip the steps `first` to `last` from now on."""
        self.ranges.append(Range(first, last, self._history.batches(first, last)))
        del self.ranges[:-RANGES_MAX]

    def due(self) -> bool:
        """Whether the current step, whose input was seen, is one of them."""
        step = self._position.step
        return any(
            span.first <= step <= span.last and self._has_batch_of(span) for span in self.ranges
        )

    def _has_batch_of(self, span: Range) -> bool:
        fingerprint = self._batch.newest()
        if (
            fingerprint is None or len(self._optimizers.living()) > 1
        ):  # the fingerprint covers a part only
            return True
        return self._position.step not in span.batches or fingerprint in span.batches.values()
