"""Copies of the routers' matrices on the host, in FP32.

At most MOST of them and MOST_BYTES in all are copied, evenly spread over the layers. A copy from an
accelerator is taken without waiting, and is used when it has arrived: what follows from it joins
the frame of the step under way then, a later one.

Source: arXiv:2606.28116 for what is computed of routers.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Dict, List, Tuple

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from .sample_sets import SampleSets
    from .watch import Sampler

MOST, MOST_BYTES = 8, 32 << 20
SMALL = 1e-30


class Snapshots:
    """The copies of one process.

    Attributes:
        arriving: a copy is on its way from an accelerator.
    """

    def __init__(
        self, context: ProbeContext, sets: SampleSets, sampler: Sampler, extra: Dict[str, Number]
    ) -> None:
        """`extra`: what joins the next frame."""
        self._torch, self._scalars = context.torch, context.scalars
        self._registry, self._without_grad = context.registry, context.gate.without_grad
        self._sets, self._sampler, self._extra = sets, sampler, extra
        self._watched: Dict[str, Any] = {}  # name -> weak reference to the parameter
        self._changes = -1
        self._copies: Dict[str, Any] = {}
        self._events: List[Any] = []  # one for each device that the copies come from
        self.arriving = False

    def take(self) -> None:
        """Copy all watched matrices now, between two steps."""
        self._sets.run("weights", self._without_grad, self._take)

    def look(self) -> None:
        """Use copies that have arrived. Never waits."""
        self._sets.run("weights", self._without_grad, self._look)

    def _take(self) -> None:
        if self.arriving:
            return  # a device that far behind gets no second copy to make
        self._choose()
        alive = {n: p for n, p in ((n, r()) for n, r in self._watched.items()) if p is not None}
        if not alive:
            return
        spare = self._copies
        self._copies = {n: self._copy(p.detach(), spare.get(n)) for n, p in alive.items()}
        scalars = self._scalars
        devices = {p.device for p in alive.values() if not scalars.reads(p)}
        self._events = [scalars.event(device) for device in devices]
        self.arriving = True
        if not devices:
            self._look()

    def _copy(self, weight: Any, spare: Any) -> Any:
        torch = self._torch
        if spare is None or spare.shape != weight.shape:
            pinned = weight.device.type == "cuda"
            spare = torch.empty(weight.shape, dtype=torch.float32, device="cpu", pin_memory=pinned)
        if weight.device.type == "cpu":
            return spare.copy_(weight)
        return spare.copy_(weight.float(), non_blocking=True)

    def _look(self) -> None:
        if not all(event.query() for event in self._events):
            return
        self.arriving = False
        self._extra.update(self._values())

    def _choose(self) -> None:
        """Choose the matrices again when modules came or went."""
        changes = self._registry.modules.changes
        if changes == self._changes:
            return
        self._changes = changes
        routers: List[Tuple[str, Any]] = []
        for root in self._registry.roots():
            known = {f"{r.name}.weight" for r in self._sampler.structure(root).routers}
            for name, parameter in root.named_parameters():
                whole = parameter.dim() == 2 and not hasattr(parameter, "_local_tensor")
                if name in known and whole:
                    routers.append((name, parameter))
        self._watched = {name: weakref.ref(p) for name, p in _fitting(routers)}
        self._copies = {}

    def _values(self) -> Dict[str, float]:
        if not self._copies:
            return {}
        similar, condition = zip(*map(_router, self._copies.values()))
        return {
            "router_weight_similarity": sum(similar) / len(similar),
            "router_conditioning": max(condition),
        }


def _fitting(found: List[Tuple[str, Any]]) -> List[Tuple[str, Any]]:
    """Return at most MOST in MOST_BYTES, evenly spread over what was found."""
    largest = max((4 * p.numel() for _, p in found), default=1)
    count = min(MOST, len(found), MOST_BYTES // max(1, largest))
    return [found[i * len(found) // count] for i in range(count)]


def _router(weight: Any) -> Tuple[float, float]:
    """Return the mean pairwise cosine of rows, and the largest centred row over the mean row."""
    rows = weight.double()
    experts = rows.shape[0]
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=SMALL)
    similar = (experts * unit.mean(0).square().sum() - 1) / max(1, experts - 1)
    mean = rows.mean(0)
    centred = (rows - mean).norm(dim=1).amax()
    return float(similar), float(centred / mean.norm().clamp(min=SMALL))
