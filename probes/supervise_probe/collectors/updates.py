"""How far a step moved the weights: norm of the update, and its ratio to the norm of the weights.

Exact and global while that is cheap enough, else from a sample of every tensor that rotates every
ROTATE steps; `mode` says which. One pass after the step does it: the weights it reads are kept, and
are the old weights of the next step. Weights that changed in between (a checkpoint was loaded) are
noticed by their version counters and read again; only edits through `.data` go unnoticed, and count
as part of the next update.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from ..spec import MetricSpec
from . import Collector as Base

if TYPE_CHECKING:
    from ..probe import Probe
    from ..scalars import Number, Scalars
    from ..step import Step, Update

METRICS = (
    MetricSpec(
        "update_norm",
        "1",
        "2-norm of the change of all parameters by this step; 0 when it was skipped.",
        "|theta_t - theta_(t-1)|",
        "one pass over the parameters and a copy of them, or of a sample",
    ),
    MetricSpec(
        "update_to_weight",
        "1",
        "update_norm / 2-norm of the parameters before the step.",
        "|theta_t - theta_(t-1)| / |theta_(t-1)|",
    ),
)

EXACT_LIMIT = 16_000_000  # parameters; above, the kept copy would take too much memory
SAMPLE = 65_536  # parameters in a sample
BLOCK = 64  # neighbours that are taken together: single values would cost as much as all
ROTATE = 64  # steps between two samples
RUN = 131_072  # squares added up in float32; sums of these are added in float64


class Collector(Base):
    """Keeps the old weights of each optimizer.

    Attributes:
        mode: `exact` or `sampled`.
    """

    SHARE = 0.01
    FLOOR_US = 300

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self.mode = "exact"
        self._status_changed = probe.status_changed
        self._kept: weakref.WeakKeyDictionary[Any, Kept] = weakref.WeakKeyDictionary()
        self._squares: Optional[Tuple[Number, Number]] = None

    def before_update(self, update: Update) -> None:
        kept = self._kept.get(update.optimizer)
        if kept is None or not kept.still(update.all_params):
            if sum(p.numel() for p in update.all_params) > EXACT_LIMIT:
                self._sample()
            sample = SAMPLE if self.mode == "sampled" else None
            kept = Kept(self.torch, self.scalars, update.all_params, sample)
            self._kept[update.optimizer] = kept
        kept.freshen()

    def after_update(self, update: Update) -> None:
        kept = self._kept.get(update.optimizer)
        if kept is None:
            return
        moved, weight = (0.0, kept.weight) if update.skip else kept.advance()
        if self._squares is not None:
            moved, weight = moved + self._squares[0], weight + self._squares[1]
        self._squares = moved, weight

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        squares, self._squares = self._squares, None
        if squares is None:
            return
        moved, weight = squares[0] ** 0.5, squares[1] ** 0.5
        values["update_norm"] = moved
        if not self.scalars.on_host(weight) or weight != 0.0:
            values["update_to_weight"] = moved / weight

    def relax(self) -> bool:
        if self.mode == "sampled":
            return False
        self._sample()
        self._kept.clear()
        return True

    def _sample(self) -> None:
        self.mode = "sampled"
        self._status_changed()


class Kind:
    """Tensors of one device and type, and their old values side by side.

    Attributes:
        old: flat; `pieces` of it are shaped like the `sources`.
        stands_for: how many values each value of a sample stands for.
    """

    __slots__ = ("old", "pieces", "sources", "stands_for")

    def __init__(self, torch: Any, sources: List[Any], stands_for: float) -> None:
        first, size = sources[0], sum(source.numel() for source in sources)
        self.old = torch.empty(size, device=first.device, dtype=first.dtype)
        self.sources = sources
        self.stands_for = stands_for
        self.pieces = []
        at = 0
        for source in sources:
            self.pieces.append(self.old[at : at + source.numel()].view(source.shape))
            at += source.numel()


class Kept:
    """The old weights of one optimizer, or a sample of them.

    Attributes:
        weight: squared 2-norm of the old weights.
    """

    def __init__(
        self, torch: Any, scalars: Scalars, params: List[Any], sample: Optional[int]
    ) -> None:
        self._torch = torch
        self._scalars = scalars
        self._ids = list(map(id, params))
        self._tensors = [getattr(p, "_local_tensor", p) for p in params]
        self._sample = sample
        self._age = 0
        self._turn = 0
        self._versions: List[int] = []
        self._places: List[int] = []
        self.weight: Number = 0.0
        self._kinds: List[Kind] = []

    def still(self, params: List[Any]) -> bool:
        """Whether these are the parameters it keeps."""
        return list(map(id, params)) == self._ids

    def freshen(self) -> None:
        """Read the weights again if somebody changed them since the last step."""
        versions = [t._version for t in self._tensors]
        places = [t.data_ptr() for t in self._tensors]
        self._age += 1
        rotate = self._sample is not None and self._age % ROTATE == 0
        if rotate or places != self._places:
            self._kinds = self._layout()
        elif versions == self._versions:
            return
        self._versions, self._places = versions, places
        self.weight = 0.0
        for kind in self._kinds:
            self._torch._foreach_copy_(kind.pieces, kind.sources)
            self.weight = self.weight + self._square(kind)

    def advance(self) -> Tuple[Number, Number]:
        """Return squared norms of the update and of the old weights; keep the new ones."""
        torch = self._torch
        moved: Number = 0.0
        weight: Number = 0.0
        for kind in self._kinds:
            torch._foreach_sub_(kind.pieces, kind.sources)
            moved = moved + self._square(kind)
            torch._foreach_copy_(kind.pieces, kind.sources)
            weight = weight + self._square(kind)
        before, self.weight = self.weight, weight
        self._versions = [t._version for t in self._tensors]
        return moved, before

    def _square(self, kind: Kind) -> Number:
        torch, flat = self._torch, kind.old
        if flat.device.type == "cpu" and flat.dtype in (torch.float32, torch.float64):
            square: Number = 0.0
            for part in flat.split(RUN):
                square = square + self._scalars.value(torch.dot(part, part))
            return square * kind.stands_for
        wide = torch.float64 if flat.dtype is torch.float64 else torch.float32
        norm = self._scalars.value(torch.linalg.vector_norm(flat, dtype=wide))
        return norm * norm * kind.stands_for

    def _layout(self) -> List[Kind]:
        sources = [t for t in self._tensors if t.numel() and t.dtype.is_floating_point]
        stands_for = 1.0
        if self._sample is not None:
            total = sum(t.numel() for t in sources)
            every = max(1, round(total / self._sample))
            sources = [self._slice(t, every) for t in sources if t.is_contiguous()]
            stands_for = total / max(1, sum(s.numel() for s in sources))
            self._turn += 1
        kinds: Dict[Tuple[Any, Any], List[Any]] = {}
        for source in sources:
            kinds.setdefault((source.device, source.dtype), []).append(source)
        return [Kind(self._torch, members, stands_for) for members in kinds.values()]

    def _slice(self, tensor: Any, every: int) -> Any:
        """Return one in `every` values of `tensor`, in whole cache lines spread over all of it."""
        size, at = tensor.numel(), tensor.storage_offset()
        blocks = size // (BLOCK * every)
        if blocks:
            at += self._turn % every * BLOCK
            return self._torch.as_strided(tensor, (blocks, BLOCK), (BLOCK * every, 1), at)
        length = max(1, size // every)
        at += self._turn * length % (size - length + 1)
        return self._torch.as_strided(tensor, (length,), (1,), at)
