"""Calls in which the training waits: for a batch of a DataLoader, and for other ranks.

A batch is fetched by the job's own call, in its place and its order; one in quarantine is passed
over and followed by the next one, within the same call. What it waits for is what the job would
have waited for.

Of collectives, seen by the thread that trains are the functions of torch.distributed that are
called by name, and `Work.wait`. Not seen is what runs in C++: the bucket reduction of
DistributedDataParallel inside the backward, functional collectives (DTensor, compiled graphs), and
what the autograd threads of an accelerator call. On an accelerator a collective is queued and
mostly returns at once: then this is the time to queue it.
"""

from __future__ import annotations

import functools
import sys
import types
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable

from ..runtime.guard import Hidden, hidden_from_stacklevel
from ..wire import COLLECTIVES

if TYPE_CHECKING:
    from ..runtime.guard import Gate
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
        return listeners.loader.must_skip_batch(iterator, batch, reported)

    @hidden_from_stacklevel
    def following(self: Any) -> Any:
        if gate.must_skip_hook():
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

    @hidden_from_stacklevel
    def fetch(iterator: Any) -> Any:
        began = monotonic_ns()
        batch = original(iterator)
        if torch.is_grad_enabled():  # an evaluation's is no part of training
            times.input += monotonic_ns() - began
        return batch

    @hidden_from_stacklevel
    def hand_out(iterator: Any, batch: Any, fresh: bool) -> Any:
        """Return the next batch; `batch` itself, and True, where a whole pass has no other."""
        try:
            return fetch(iterator), False
        except StopIteration:
            if not fresh:
                raise
            return batch, True

    @hidden_from_stacklevel
    def start(self: Any) -> Any:
        if not gate.must_skip_hook() and torch.is_grad_enabled():
            listeners.loader.before_data_pass(self)
        return begin(self)

    iterator.__next__ = functools.wraps(original)(hidden(following, recursive=False))
    loader.__iter__ = functools.wraps(begin)(hidden(start, recursive=False))


def patch_collectives(torch: Any, gate: Gate, times: Times, hidden: Hidden) -> None:
    """Wrap what this torch has of it. A process that never calls it pays nothing.

    Call it before anything imports `torch.distributed._functional_collectives`, which tells
    torch.compile by identity what a collective of a graph is made of.
    """
    home = sys.modules.get("torch.distributed.distributed_c10d")
    if home is None:  # torch was built without it
        return
    timed = _timer(gate, times, hidden)
    for name in collective_names(home):
        original = getattr(home, name)
        wrapped = timed(original, _kind(name))
        for module in (home, torch.distributed):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapped)
    work: Any = getattr(home, "Work", None)
    if hasattr(work, "wait"):
        work.wait = timed(work.wait, COLLECTIVES.index("wait"))


def collective_names(home: Any) -> list[str]:
    """Return the names of the functions of `home` that wait for other ranks.

    `isend`, `irecv` and the like only begin something; `wait` ends it.
    """
    return [
        name
        for name in getattr(home, "__all__", ())
        if name.startswith(COLLECTIVES) and type(getattr(home, name, None)) is types.FunctionType
    ]


def _kind(name: str) -> int:
    """Return the place in `COLLECTIVES` of the longest beginning of `name`."""
    collective = max((prefix for prefix in COLLECTIVES if name.startswith(prefix)), key=len)
    return COLLECTIVES.index(collective)


def _timer(
    gate: Gate, times: Times, hidden: Hidden
) -> Callable[[Callable[..., Any], int], Callable[..., Any]]:
    waits = False  # one of them is running, which may call others

    def timed(original: Callable[..., Any], kind: int) -> Callable[..., Any]:
        @hidden_from_stacklevel
        def collective(*args: Any, **kwargs: Any) -> Any:
            nonlocal waits
            if waits or gate.must_skip_hook():
                return original(*args, **kwargs)
            waits = True
            times.enters(kind)
            began = monotonic_ns()
            try:
                return original(*args, **kwargs)
            finally:
                waits = False
                times.leaves(kind)
                part = "forward" if gate.in_forward else "backward" if gate.in_backward else ""
                times.add_collective_wait(monotonic_ns() - began, part)

        return functools.wraps(original)(hidden(collective, recursive=False))

    return timed
