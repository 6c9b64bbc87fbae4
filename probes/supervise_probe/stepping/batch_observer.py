"""Inputs of the model and of the losses, collected until the backward pass begins.

Right behind a forward the caches are cold, and a look costs ten times as much as next to the other
looks of the backward. Until then autograd itself holds the job to leaving these tensors as they
are.

A job may look at a loss and go on without a backward. Then the graph of the loss is gone when the
next backward begins, while all that takes part in that one are there: what `cross_entropy` and
`nll_loss` return is marked, and what was left out is not looked at. Other losses are not marked.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Optional

from ..collectors.progress import LossCall

if TYPE_CHECKING:
    from ..collectors.batch import BatchCollector
    from ..collectors.batch import BatchSanityCollector as SanityCollector
    from ..collectors.loss import DiscardsCollector
    from ..collectors.progress import TokensCollector
    from ..collectors.timing_and_mfu import FlopsCollector
    from ..runtime.guard import Guard
    from ..runtime.scalars import Number

FORWARDS = 8  # forwards without a backward whose tensors are kept waiting
KEY = "supervise"  # in the metadata of a node of the graph


class _Mark:
    """Lives as long as the node that it is attached to: held by nothing else."""

    __slots__ = ("__weakref__",)


Call = tuple[tuple[Any, ...], dict[str, Any]]
NOTHING: Call = (), {}
Loss = tuple["Optional[weakref.ref[_Mark]]", int]  # its mark, and how many inputs came before it


def _marked(loss: Any) -> "weakref.ref[_Mark]":
    mark = loss.grad_fn.metadata[KEY] = _Mark()
    return weakref.ref(mark)


class BatchObserver:
    """The inputs and targets of one process that were not looked at yet."""

    def __init__(
        self,
        guard: Guard,
        batch: BatchCollector,
        tokens: TokensCollector,
        flops: FlopsCollector,
        sanity: SanityCollector,
        discards: DiscardsCollector,
    ) -> None:
        self._guard = guard
        self._batch, self._tokens, self._flops = batch, tokens, flops
        self._batch_part, self._tokens_part = guard.part("batch"), guard.part("tokens")
        self._sanity, self._sanity_part = sanity, guard.part("batch_sanity")
        self._discards, self._discards_part = discards, guard.part("discards")
        self._value = tokens.scalars.value
        self._inputs: list[Call] = []
        self._targets: list[LossCall] = []
        self._losses: list[Loss] = []  # one of each of the targets

    def add_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """These go into the model."""
        self._inputs.append(
            self._guard.run(self._batch_part, self._copied, args, kwargs) or NOTHING
        )
        if len(self._inputs) > FORWARDS:
            self._no_backward()

    def _copied(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the tensors of a call without what they were computed from, which is large."""
        values = self._batch.inputs.detached_tensors((*args, *kwargs.values()) if kwargs else args)
        return values[: len(args)], dict(zip(kwargs, values[len(args) :]))

    def add_targets(
        self, target: Any, ignored: int, loss: Any, reduction: str, result: Any
    ) -> None:
        """A loss was taken against these class indices; `ignored` is none of them.

        Args:
            loss: None where it says nothing that its graph is gone.
            reduction: `mean` or `sum` where `result` is that of the targets' own losses.
        """
        read = self._guard.run(self._tokens_part, self._read, loss, reduction, result)
        mark, value = read or (None, None)
        self._targets.append(LossCall(target, ignored, reduction == "sum", value))
        self._losses.append((mark, len(self._inputs)))
        if len(self._targets) > FORWARDS:
            self._no_backward()

    def _read(
        self, loss: Any, reduction: str, result: Any
    ) -> tuple[Optional[weakref.ref[_Mark]], Optional[Number]]:
        """Return the mark of a loss, and its value at once: the job may divide it in place."""
        mark = None if loss is None else _marked(loss)
        return mark, self._value(result) if reduction in ("mean", "sum") else None

    @property
    def has_inputs(self) -> bool:
        """Whether anything went into the model since the newest backward."""
        return bool(self._inputs)

    def before_backward(self) -> None:
        """A backward begins: look at what it can be of.

        If the graphs of all losses are gone, that says nothing: some compute their gradient in
        their forward.
        """
        if len(self._losses) > 1:
            self._guard.run(self._tokens_part, self._leave_out, False)
        self.observe_waiting()

    def before_backward_of_nan(self, losses: list[Any]) -> None:
        """These add up to NaN, and their graphs are still there."""
        self._guard.run(self._tokens_part, self._tokens.inspect_nan, losses)

    def before_update(self, backward: bool) -> None:
        """An optimizer is about to step; what waits has had no `backward`, if there was one."""
        if backward and self._losses:
            self._guard.run(self._tokens_part, self._leave_out, True)
        self.observe_waiting()

    def _leave_out(self, even_all: bool) -> None:
        """Drop losses whose graph is gone, and what went into the model for them alone."""
        lives = [mark is None or mark() is not None for mark, _ in self._losses]
        if all(lives) or not (even_all or any(lives)):
            return
        self._guard.run(self._discards_part, self._count_left_out)
        ends = [end for _, end in self._losses]
        needed = {end for end, lives_on in zip(ends, lives) if lives_on}
        inputs, begin = [], 0
        for end in sorted({*ends, len(self._inputs)}):
            if end in needed or end > ends[-1]:
                inputs += self._inputs[begin:end]
            begin = end
        self._inputs = inputs
        self._targets = [target for target, lives_on in zip(self._targets, lives) if lives_on]

    def _count_left_out(self) -> None:
        """Hand on the losses whose graph is gone, one of each forward."""
        unclaimed: dict[int, Number] = {}
        for (mark, end), (*_, value) in zip(self._losses, self._targets):
            if mark is not None and mark() is None and value is not None:
                unclaimed[end] = unclaimed.get(end, 0.0) + value
        self._discards.add_discarded_losses(unclaimed.values())

    def _no_backward(self) -> None:
        """Forwards come, and no backward, as of a job that leaves out all of its batches."""
        self._guard.run(self._discards_part, self._count_left_out)
        self._guard.run(self._discards_part, self._discards.record_forward_only)
        self.observe_waiting()

    def observe_waiting(self) -> None:
        """Look at everything that waits."""
        self._losses.clear()
        if self._inputs:
            inputs, self._inputs = self._inputs, []
            self._guard.run(self._batch_part, self._look_at, inputs)
        if self._targets:
            targets, self._targets = self._targets, []
            self._guard.run(self._tokens_part, self._tokens.add_loss_calls, targets)

    def _look_at(self, inputs: list[Call]) -> None:
        for args, kwargs in inputs:
            hashed = self._batch.hash_model_input((*args, *kwargs.values()) if kwargs else args)
            if hashed is None:
                continue
            if hashed.is_floating_point():  # vectors
                self._flops.count_tokens_of_shape(hashed.shape[:-1])
                continue
            self._tokens.add_input_tokens(self._flops.count_tokens_of_shape(hashed.shape))
            if self._sanity.pace.due:
                self._guard.run(
                    self._sanity_part, self._sanity.add_token_input, hashed, args, kwargs
                )
