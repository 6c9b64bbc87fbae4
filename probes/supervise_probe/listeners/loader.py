"""Batches of a DataLoader: seen, or passed over when in quarantine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, List

if TYPE_CHECKING:
    from ..collectors.batch import Collector as BatchCollector
    from ..collectors.quarantine import Collector as QuarantineCollector
    from ..context import ProbeContext
    from ..data.shard_tracker import ShardTracker
    from ..stepping.inferred_steps import InferredSteps


class LoaderListener:
    """One for each process: a forked child gets another.

    Attributes:
        inferred: a batch may be the sign that a step without an optimizer is over.
        shards: which shard each batch comes from.
        beat: shows a sign of life.
    """

    def __init__(
        self,
        context: ProbeContext,
        inferred: InferredSteps,
        batch: BatchCollector,
        shards: ShardTracker,
        quarantine: QuarantineCollector,
        attach: Callable[[], None],
    ) -> None:
        """`attach`: sees the calls of the outermost modules."""
        guard = self._guard = context.guard
        self.beat = context.reporter.beat
        self.inferred, self.shards = inferred, shards
        self._batch, self._held, self._attach = batch, quarantine, attach
        self._shards_part, self._held_part = guard.part("shards"), guard.part("quarantine")

    def saw(self, iterator: Any, batch: Any, reported: int) -> bool:
        """Return whether the batch must be passed over; else it is a step's."""
        guard, shards, held = self._guard, self.shards, self._held
        origins = guard.run(self._shards_part, shards.origins, iterator, batch, reported) or []
        if origins and held.manifest.shards and guard.run(self._held_part, held.holds, origins):
            return True
        # The outermost module shows its input better, once it is known and if it is given tensors.
        if not self._batch.seen:
            guard.run(guard.part("batch"), self._saw_batch, batch)
        guard.run(self._shards_part, shards.loaded, iterator, origins)
        return False

    def _saw_batch(self, batch: Any) -> None:
        values = batch.values() if isinstance(batch, dict) else batch
        several: List[Any] = list(values) if isinstance(batch, (dict, list, tuple)) else [batch]
        self._batch.saw_loaded(several)
        self._attach()

    def exhausted(self) -> None:
        """Nothing else is handed out than what is in quarantine."""
        self._guard.run(self._held_part, self._held.exhausted)

    def pass_begins(self, loader: Any) -> None:
        """A pass over the data is about to begin."""
        self._guard.run(self._held_part, self._held.lists.begins, loader)
