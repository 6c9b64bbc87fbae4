"""Copies of a few matrices on the host, in FP32: the newest and the one before.

Watched are the projections to queries and keys and the routers, known by their names, at most MOST
of them and MOST_BYTES in all, evenly spread over the layers. Monitors of mechanisms compare the two
copies: `pair(name)`. A copy from an accelerator is taken without waiting, and is used when it has
arrived: what follows from it joins the frame of the step under way then, a later one.

Source: arXiv:2606.28116 for what is computed of routers.
"""

from __future__ import annotations

import re
import weakref
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Set, Tuple

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from .sample_sets import SampleSets
    from .watch import Sampler

MOST, MOST_BYTES = 16, 64 << 20
SMALL = 1e-30
_QK = re.compile(
    r"(^|[._])(q|k|qkv|qk|c_attn|query|key|query_key_value|in|wq|wk|wqkv)(_?proj)?(\.weight|_weight)$"
)


class Pair(NamedTuple):
    """Two copies of one matrix, FP32 on the host, and the steps in front of which they were taken.

    They are valid until the next snapshot is taken: their memory is used again then.
    """

    older: Any
    newer: Any
    older_step: int
    newer_step: int


class Snapshots:
    """The copies of one process.

    Attributes:
        arriving: a copy is on its way from an accelerator.
        why_not: why there are none, "" otherwise.
    """

    def __init__(
        self, context: ProbeContext, sets: SampleSets, sampler: Sampler, extra: Dict[str, Number]
    ) -> None:
        """`extra`: what joins the next frame."""
        self._torch, self._scalars = context.torch, context.scalars
        self._registry, self._without_grad = context.registry, context.gate.without_grad
        self._sets, self._sampler, self._extra = sets, sampler, extra
        self._watched: Dict[str, Any] = {}  # name -> weak reference to the parameter
        self._routers: Set[str] = set()
        self._changes = -1
        self._copies: List[Dict[str, Any]] = []  # newest last, at most two
        self._steps: List[int] = []
        self._events: List[Any] = []  # one for each device that the newest copies come from
        self.arriving = False
        self.why_not = ""

    def names(self) -> List[str]:
        """Return the names of the watched matrices, as `named_parameters` has them."""
        return list(self._watched)

    def pair(self, name: str) -> Optional[Pair]:
        """Return both copies of a matrix; None before there are two."""
        if self.arriving or len(self._copies) < 2 or any(name not in c for c in self._copies):
            return None
        older, newer = self._copies
        return Pair(older[name], newer[name], *self._steps)

    def take(self, step: int) -> None:
        """Copy all watched matrices now, right in front of `step`."""
        self._sets.run("weights", self._without_grad, self._take, step)

    def look(self) -> None:
        """Use copies that have arrived. Never waits."""
        self._sets.run("weights", self._without_grad, self._look)

    def _take(self, step: int) -> None:
        if self.arriving:
            return  # a device that far behind gets no second copy to make
        self._choose()
        alive = {n: p for n, p in ((n, r()) for n, r in self._watched.items()) if p is not None}
        if not alive:
            return
        spare: Dict[str, Any] = {}
        if len(self._copies) > 1:
            spare = self._copies.pop(0)
            self._steps.pop(0)
        self._copies.append({n: self._copy(p.detach(), spare.get(n)) for n, p in alive.items()})
        self._steps.append(step)
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
        others: List[Tuple[str, Any]] = []
        sharded = False
        for root in self._registry.roots():
            known = {f"{r.name}.weight" for r in self._sampler.structure(root).routers}
            for name, parameter in root.named_parameters():
                if parameter.dim() != 2 or not (name in known or _QK.search(name)):
                    continue
                if hasattr(parameter, "_local_tensor"):
                    sharded = True
                else:
                    (routers if name in known else others).append((name, parameter))
        chosen = _fitting(routers, MOST // 2, MOST_BYTES // 2)
        self._routers = {name for name, _ in chosen}
        taken = sum(4 * p.numel() for _, p in chosen)
        chosen += _fitting(others, MOST - len(chosen), MOST_BYTES - taken)
        self._watched = {name: weakref.ref(parameter) for name, parameter in chosen}
        self._copies, self._steps = [], []
        self.why_not = ""
        if not chosen:
            self.why_not = "the parameters are sharded" if sharded else "no matrix is known by name"

    def _values(self) -> Dict[str, float]:
        newest = self._copies[-1]
        found: Dict[str, float] = {}
        routers = [copy for name, copy in newest.items() if name in self._routers]
        if routers:
            similar, condition = zip(*(_router(copy) for copy in routers))
            found["router_weight_similarity"] = sum(similar) / len(similar)
            found["router_conditioning"] = max(condition)
        return found


def _fitting(found: List[Tuple[str, Any]], most: int, room: int) -> List[Tuple[str, Any]]:
    """Return at most that many in that many bytes, evenly spread over what was found."""
    if not found or most < 1:
        return []
    largest = max(4 * p.numel() for _, p in found)
    count = min(most, len(found), room // max(1, largest))
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
