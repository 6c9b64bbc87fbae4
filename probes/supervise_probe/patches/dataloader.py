"""torch's DataLoader: the batches it hands out are seen, and those in quarantine passed over.

A batch is fetched by the job's own call, in its place and its order; one that is passed over is
followed by the next one, within the same call. What it waits for is what the job would have waited
for.
"""

from __future__ import annotations

import functools
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from ..collectors.quarantine import IN_A_ROW
from ..runtime.compiler_exclusion import Hidden
from ..runtime.warning_stacklevel import uncounted

if TYPE_CHECKING:
    from ..probe import Probe


def patch_loader(torch: Any, probe: Probe, hidden: Hidden) -> None:
    """See every batch of every loader, and the begin of each pass."""
    iterator, loader = torch.utils.data.dataloader._BaseDataLoaderIter, torch.utils.data.DataLoader
    original, begin = iterator.__next__, loader.__iter__
    shards_part, held_part = probe.guard.part("shards"), probe.guard.part("quarantine")
    tape_part = probe.guard.part("batch_tape")

    @hidden
    def sign() -> None:
        probe.boundary.handmade.sign()

    @hidden
    def saw(iterator: Any, batch: Any, told: int) -> bool:
        """Return whether the batch must be passed over; else it is a step's."""
        shards, held = probe.collectors["shards"].shards, probe.collectors["quarantine"]
        origins = probe.guard.run(shards_part, shards.origins, iterator, batch, told) or []
        if origins and held.manifest.shards and probe.guard.run(held_part, held.holds, origins):
            return True
        # The outermost module tells its input better, once it is known and if it is given tensors.
        if not probe.collectors["batch"].heard:
            probe.guard.run(probe.guard.part("batch"), _saw_batch, probe, batch)
        probe.guard.run(shards_part, shards.loaded, iterator, origins)
        return False

    @uncounted
    def following(self: Any) -> Any:
        if probe.off_duty():
            return original(self)
        if probe.boundary.handmade.pending:
            sign()
        told = len(probe.collectors["shards"].shards.told)
        fresh = not getattr(self, "_num_yielded", 1)
        batch = fetch(self)
        if torch.is_grad_enabled():
            passed = 0
            while saw(self, batch, told):
                passed += 1
                batch, over = another(self, batch, fresh)
                if over or passed >= IN_A_ROW:
                    probe.guard.run(held_part, probe.collectors["quarantine"].exhausted)
        probe.beat("step" if torch.is_grad_enabled() else "eval")
        return batch

    @uncounted
    def fetch(iterator: Any) -> Any:
        began = monotonic_ns()
        tape = probe.rollbacks.batches if probe.rollbacks and torch.is_grad_enabled() else None
        batch = None if tape is None else probe.guard.run(tape_part, tape.again, iterator)
        if batch is None:
            batch = original(iterator)
            if tape is not None:
                probe.guard.run(tape_part, tape.keep, iterator, batch)
        probe.times.input += monotonic_ns() - began
        return batch

    @uncounted
    def another(iterator: Any, batch: Any, fresh: bool) -> Any:
        """Return the next batch; `batch` itself, and True, where a whole pass has no other."""
        try:
            return fetch(iterator), False
        except StopIteration:
            if not fresh:
                raise
            return batch, True

    @uncounted
    def start(self: Any) -> Any:
        if not probe.off_duty() and torch.is_grad_enabled():
            lists = probe.collectors["quarantine"].lists
            if lists.due:
                probe.guard.run(held_part, lists.filter, getattr(self, "dataset", None))
        return begin(self)

    iterator.__next__ = functools.wraps(original)(hidden(following, recursive=False))
    loader.__iter__ = functools.wraps(begin)(hidden(start, recursive=False))


def _saw_batch(probe: Probe, batch: Any) -> None:
    values = batch.values() if isinstance(batch, dict) else batch
    several = list(values) if isinstance(batch, (dict, list, tuple)) else [batch]
    probe.collectors["batch"].saw_loaded(several)
