"""What went into the model and the losses, until the backward begins; then it is looked at.

Right behind a forward the caches are cold, and a look costs ten times as much as next to the other
looks of the backward. Until then autograd itself holds the job to leaving these tensors as they
are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Tuple

if TYPE_CHECKING:
    from .guard import Guard

FORWARDS = 8  # forwards without a backward whose tensors are kept waiting


class Batches:
    """The inputs and targets of one process that were not looked at yet."""

    def __init__(self, guard: Guard, collectors: Dict[str, Any]) -> None:
        self._guard = guard
        self._batch, self._tokens = collectors["batch"], collectors["tokens"]
        self._flops = collectors["flops"]
        self._batch_part, self._tokens_part = guard.part("batch"), guard.part("tokens")
        self._sanity, self._sanity_part = collectors["batch_sanity"], guard.part("batch_sanity")
        self._inputs: List[Tuple[Any, ...]] = []
        self._targets: List[Tuple[Any, int]] = []
        self.called = False  # the outermost module was

    def inputs(self, values: Tuple[Any, ...]) -> None:
        """These go into the model."""
        self.called = True
        self._inputs.append(values)
        if len(self._inputs) > FORWARDS:
            self.look()

    def targets(self, target: Any, ignored: int) -> None:
        """A loss was taken against these class indices; `ignored` is none of them."""
        self._targets.append((target, ignored))
        if len(self._targets) > FORWARDS:
            self.look()

    def look(self) -> None:
        """Look at everything that waits."""
        if self._inputs:
            inputs, self._inputs = self._inputs, []
            self._guard.run(self._batch_part, self._look_at, inputs)
        if self._targets:
            targets, self._targets = self._targets, []
            self._guard.run(self._tokens_part, self._tokens.saw_targets, targets)

    def _look_at(self, inputs: List[Tuple[Any, ...]]) -> None:
        for values in inputs:
            hashed = self._batch.saw(values)
            if hashed is None:
                continue
            if hashed.is_floating_point():  # vectors
                self._flops.saw(hashed.shape[:-1])
                continue
            self._tokens.saw_inputs(self._flops.saw(hashed.shape))
            if self._sanity.due:
                self._guard.run(self._sanity_part, self._sanity.saw, hashed)
