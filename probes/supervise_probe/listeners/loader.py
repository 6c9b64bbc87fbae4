"""What a DataLoader hands out: seen, remembered for a rollback, passed over when in quarantine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, List, Optional

if TYPE_CHECKING:
    from ..collectors.batch import Collector as BatchCollector
    from ..collectors.quarantine import Collector as QuarantineCollector
    from ..context import ProbeContext
    from ..data.shard_tracker import Shards
    from ..savepoints.batch_replay import BatchTape


class LoaderListener:
    """One for each process: a forked child gets another.

    Args:
        settle: a step without an optimizer may be over.
    """

    def __init__(
        self,
        context: ProbeContext,
        batch: BatchCollector,
        shards: Shards,
        quarantine: QuarantineCollector,
        settle: Callable[[], None],
    ) -> None:
        self._guard, self._reporter = context.guard, context.reporter
        self._batch, self._shards, self._held = batch, shards, quarantine
        self._settle = settle
        self._replay: Callable[[], Optional[BatchTape]] = _none
        guard = context.guard
        self._shards_part, self._held_part = guard.part("shards"), guard.part("quarantine")
        self._replay_part = guard.part("batch_tape")

    def connect(self, replay: Callable[[], Optional[BatchTape]]) -> None:
        """The process is a rank: `replay` returns the batches that can be given again, if any."""
        self._replay = replay

    def begins(self) -> int:
        """A batch is about to be fetched; return what `saw` is to be given."""
        self._settle()
        return len(self._shards.told)

    def again(self, iterator: Any) -> Any:
        """Return the batch that comes next as it came before a rollback, None for a new one."""
        replay = self._replay()
        return (
            None if replay is None else self._guard.run(self._replay_part, replay.again, iterator)
        )

    def keep(self, iterator: Any, batch: Any) -> None:
        """`iterator` gave a new batch to train on."""
        replay = self._replay()
        if replay is not None:
            self._guard.run(self._replay_part, replay.keep, iterator, batch)

    def saw(self, iterator: Any, batch: Any, told: int) -> bool:
        """Return whether the batch must be passed over; else it is a step's."""
        guard, shards, held = self._guard, self._shards, self._held
        origins = guard.run(self._shards_part, shards.origins, iterator, batch, told) or []
        if origins and held.manifest.shards and guard.run(self._held_part, held.holds, origins):
            return True
        # The outermost module tells its input better, once it is known and if it is given tensors.
        if not self._batch.heard:
            guard.run(guard.part("batch"), self._saw_batch, batch)
        guard.run(self._shards_part, shards.loaded, iterator, origins)
        return False

    def _saw_batch(self, batch: Any) -> None:
        values = batch.values() if isinstance(batch, dict) else batch
        several: List[Any] = list(values) if isinstance(batch, (dict, list, tuple)) else [batch]
        self._batch.saw_loaded(several)

    def exhausted(self) -> None:
        """Nothing else is handed out than what is in quarantine."""
        self._guard.run(self._held_part, self._held.exhausted)

    def handed_out(self, train: bool) -> None:
        """The job gets the batch."""
        self._reporter.beat("step" if train else "eval")

    def pass_begins(self, loader: Any) -> None:
        """A pass over the data is about to begin."""
        lists = self._held.lists
        if lists.due:
            self._guard.run(self._held_part, lists.filter, getattr(loader, "dataset", None))


def _none() -> None:
    """Nothing can be given again before the process is a rank."""
