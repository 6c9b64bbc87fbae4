"""torch's DataLoader: the batches it hands out are seen, and those in quarantine passed over.

A batch is fetched by the job's own call, in its place and its order; one that is passed over is
followed by the next one, within the same call. What it waits for is what the job would have waited
for.
"""

from __future__ import annotations

import functools
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from ..runtime.gate import Hidden, uncounted

if TYPE_CHECKING:
    from ..runtime.gate import Gate
    from ..torch_state.records import Times
    from .listeners import Listeners

IN_A_ROW = 10_000  # batches passed over without one to train on: a loader that has no other


def patch_loader(
    torch: Any, gate: Gate, times: Times, listeners: Listeners, hidden: Hidden
) -> None:
    """See every batch of every loader, and the begin of each pass."""
    iterator, loader = torch.utils.data.dataloader._BaseDataLoaderIter, torch.utils.data.DataLoader
    original, begin = iterator.__next__, loader.__iter__

    @hidden
    def sign() -> None:
        listeners.loader.inferred.sign()

    @hidden
    def saw(iterator: Any, batch: Any, reported: int) -> bool:
        return listeners.loader.saw(iterator, batch, reported)

    @uncounted
    def following(self: Any) -> Any:
        if gate.off_duty():
            return original(self)
        listener = listeners.loader
        if listener.inferred.pending:
            sign()
        reported = len(listener.shards.reported)
        fresh = not getattr(self, "_num_yielded", 1)
        batch = fetch(self)
        if torch.is_grad_enabled():
            passed = 0
            while saw(self, batch, reported):
                passed += 1
                batch, over = hand_out(self, batch, fresh)
                if over or passed >= IN_A_ROW:
                    listener.exhausted()
        listener.beat("step" if torch.is_grad_enabled() else "eval")
        return batch

    @uncounted
    def fetch(iterator: Any) -> Any:
        began = monotonic_ns()
        batch = original(iterator)
        if torch.is_grad_enabled():  # an evaluation's is no part of training
            times.input += monotonic_ns() - began
        return batch

    @uncounted
    def hand_out(iterator: Any, batch: Any, fresh: bool) -> Any:
        """Return the next batch; `batch` itself, and True, where a whole pass has no other."""
        try:
            return fetch(iterator), False
        except StopIteration:
            if not fresh:
                raise
            return batch, True

    @uncounted
    def start(self: Any) -> Any:
        if not gate.off_duty() and torch.is_grad_enabled():
            listeners.loader.pass_begins(self)
        return begin(self)

    iterator.__next__ = functools.wraps(original)(hidden(following, recursive=False))
    loader.__iter__ = functools.wraps(begin)(hidden(start, recursive=False))
