"""Whether one weight has moved alone since the savepoint before, as behind a flipped bit.

All weights of a tensor move with the same optimizer: in 96 healthy runs (MLPs, CNNs, embeddings,
LoRA, wide models; SGD and Adam; float32 and bfloat16; savepoints every 5 and 25 steps) the largest
change was at most 1.5 times what counts as the second largest of its tensor. Behind a flipped bit
that cost anything it was 11 times and more.

It takes a difference and two norms per tensor at a savepoint, half of what the savepoint of an Adam
takes, and looks more closely only where the largest change is far from what is usual in its tensor.
Weights on an accelerator are not
compared: their copies would have to go back there.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterable, Iterator, List, NamedTuple, Optional, Tuple

LEAST = 64  # elements; a smaller tensor is not compared
PIECE = 1 << 18  # elements that are compared at once, in memory that a CPU's cache holds
# In root mean squares of its tensor's changes, of which a dense tensor's largest is 8.7 at most.
# Only beyond it is looked at more closely: rare rows of an embedding are beyond, and have company.
FAR = 12.0
SCALE = 16.0  # a change below the largest weight over this may be rounding, and is none
LIMIT = (
    6.0  # times the second largest change, for the loss to be compared; four times the healthy ones
)


class LoneWeight(NamedTuple):
    """The weight that moved most alone.

    Attributes:
        times: the second largest change around it. place: the weight, as a tensor of one element
            in the job's memory. old: the same at the savepoint before.
    """

    times: float
    place: Any
    old: Any


def find(torch: Any, several: Iterable[Tuple[Any, Any]]) -> Optional[LoneWeight]:
    """Compare weights with their copies; None where none moved far from all others."""
    best: Optional[LoneWeight] = None
    group: List[Tuple[Any, Any]] = []
    room = PIECE
    for new, old in _pieces(several):
        if group and new.numel() > room:
            best = _better(best, _find(torch, group))
            group, room = [], PIECE
        group.append((new, old))
        room -= new.numel()
    return _better(best, _find(torch, group)) if group else best


def _pieces(several: Iterable[Tuple[Any, Any]]) -> Iterator[Tuple[Any, Any]]:
    """Yield the elements of each weight and of its copy in the order of memory, in pieces."""
    for weight, old in several:
        new, count = weight.detach(), weight.numel()
        same = new.shape == old.shape and new.stride() == old.stride()  # a copy has no gaps
        if not (weight.requires_grad and new.is_cpu and new.is_floating_point() and same):
            continue
        for start in range(0, count, PIECE) if count >= LEAST else ():
            first, size = new.storage_offset() + start, min(PIECE, count - start)
            yield (
                new.as_strided((size,), (1,), first),
                old.as_strided((size,), (1,), old.storage_offset() + start),
            )


def _find(torch: Any, group: List[Tuple[Any, Any]]) -> Optional[LoneWeight]:
    """Return the one of these that moved most alone, if its change is far from the others."""
    changes = torch._foreach_sub(*map(list, zip(*group)))
    torch._foreach_abs_(changes)
    # A norm of infinite order takes twenty times as long.
    norms = [change.amax() for change in changes], torch._foreach_norm(changes)
    largest, totals = (torch.stack(norm).double().tolist() for norm in norms)
    best: Optional[LoneWeight] = None
    for change, (new, old), most, total in zip(changes, group, largest, totals):
        others = max(0.0, total * total - most * most) / max(1, change.numel() - 1)
        if 0.0 < most < float("inf") and most * most > FAR * FAR * others:
            (_, second), (place, _) = (v.tolist() for v in change.float().topk(2))
            second = max(second, float(new.abs().max()) / SCALE)
            lone = LoneWeight(most / second, new[place : place + 1], old[place : place + 1].clone())
            best = _better(best, lone)
    return best


def _better(one: Optional[LoneWeight], other: Optional[LoneWeight]) -> Optional[LoneWeight]:
    return max((lone for lone in (one, other) if lone), key=lambda lone: lone.times, default=None)


@contextmanager
def exchanged(lone: LoneWeight) -> Iterator[None]:
    """Give the weight its old value for a while; its bits come back whatever happens.

    Torch counts no write to the weight: `place` is a view of a detached one.
    """
    data = lone.place.data
    now = data.clone()
    data.copy_(lone.old)
    try:
        yield
    finally:
        data.copy_(now)
