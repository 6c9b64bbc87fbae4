"""Gradient norm and update by parameter group, and of the embeddings apart.

Embeddings move in their own way: most rows have no gradient in a step, and a spike mostly begins
there. So their weights count as a member of their own, `embedding`, and not in their group.

Norms are those before clipping, as the global one: what is measured behind the clip is scaled back
by the global norm, which is exact where one clip covers the whole optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Tuple

from ..spec import MetricSpec
from . import Collector as Base

if TYPE_CHECKING:
    from ..probe import Probe
    from ..scalars import Number
    from ..step import Step, Update

METRICS = (
    MetricSpec(
        "grad_global_norm.<i>",
        "1",
        "The same of parameter group i, flat over optimizers, without embeddings; those are "
        "`.embedding`. Absent where there is only one of them, and past 7 groups.",
        "sqrt(sum |g|^2) over the group",
        "one pass over the gradients in a sampled step",
        50,
    ),
    MetricSpec(
        "update_to_weight.<i>",
        "1",
        "The same of parameter group i, or `.embedding`; exact up to 1000000 parameters in all, "
        "else from that many, in runs of 64 spread over every tensor; 0 when it was skipped.",
        "|theta_t - theta_(t-1)| / |theta_(t-1)|",
        "a copy of at most 1000000 parameters in a sampled step",
        50,
    ),
)

GROUPS = 7
EMBEDDING = "embedding"
EXACT = 1_000_000  # parameters of an optimizer; of more, only a sample is copied
RUN = 64  # neighbours taken together

Members = Dict[str, List[Any]]


class Collector(Base):
    """Splits each optimizer's parameters into members: its groups, and the embeddings.

    Attributes:
        factor: global norm over the norm of the same gradients behind the clip, of the newest
            sampled step; 1.0 where nothing was clipped.
    """

    SAMPLED = "gradients"

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._probe = probe
        self.factor: Number = 1.0
        # By optimizer and label, since an optimizer whose step raised is measured again.
        self._squares: Dict[int, Dict[str, Number]] = {}
        self._moved: Dict[str, Tuple[Number, Number]] = {}
        self._before: List[Tuple[str, List[Any], List[Any]]] = []
        self._embeddings: FrozenSet[int] = frozenset()
        self._modules = -1
        self._turn = 0

    def measure(self, update: Update) -> None:
        total = update.gradient_norm
        if total is None:
            return
        members = self._members(update)
        found: Dict[str, Number] = {}
        squares: Number = 0.0
        for label, params in members.items():
            gradients = [p.grad for p in params if p.grad is not None]
            if gradients:
                found[label] = self._norm_of(gradients)
                squares = squares + found[label] * found[label]
        self.factor = self._ratio(total, squares**0.5)
        norms = {label: norm * self.factor for label, norm in found.items()}
        self._squares[id(update.optimizer)] = {k: norm * norm for k, norm in norms.items()}

    def before_update(self, update: Update) -> None:
        self._before = []
        members = self._members(update)
        total = sum(p.numel() for params in members.values() for p in params)
        every = -(-total // EXACT)
        self._turn += 1
        for label, params in members.items():
            pieces = [piece for p in params for piece in self._pieces(p, every)]
            if pieces:
                self._before.append((label, pieces, [piece.clone() for piece in pieces]))

    def after_update(self, update: Update) -> None:
        before, self._before = self._before, []
        for label, pieces, old in before:
            weight = self._norm_of(old)
            moved: Number = 0.0
            if not update.skip:
                moved = self._norm_of(self.torch._foreach_sub(pieces, old))
            squares = self._moved.get(label, (0.0, 0.0))
            self._moved[label] = squares[0] + moved * moved, squares[1] + weight * weight

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        measured, self._squares = self._squares, {}
        squares: Dict[str, Number] = {}
        for found in measured.values():
            for label, square in found.items():
                squares[label] = squares.get(label, 0.0) + square
        moved, self._moved = self._moved, {}
        for label, square in squares.items():
            if label and len(squares) > 1:
                values["grad_global_norm." + label] = square**0.5
        for label, (change, weight) in moved.items():
            if label and len(moved) > 1 and (not self.scalars.on_host(weight) or weight > 0.0):
                values["update_to_weight." + label] = (change / weight) ** 0.5

    def _ratio(self, total: Number, measured: Number) -> Number:
        if self.scalars.on_host(total) and self.scalars.on_host(measured):
            usable = 0.0 < measured < float("inf") and total < float("inf")
            return total / measured if usable else 1.0
        return total / measured

    def _members(self, update: Update) -> Members:
        """Return the parameters by label; "" holds those past the last group with a column."""
        embeddings = self.embeddings()
        members: Members = {}
        for index, group in enumerate(update.optimizer.param_groups, update.known.first_group):
            label = str(index) if index < GROUPS else ""
            for param in group["params"]:
                own = EMBEDDING if id(param) in embeddings else label
                members.setdefault(own, []).append(param)
        return members

    def embeddings(self) -> FrozenSet[int]:
        modules = self._probe.registry.modules
        if modules.changes != self._modules:
            nn = self.torch.nn
            kinds = (nn.Embedding, nn.EmbeddingBag)
            found = [m._parameters.get("weight") for m in modules if issubclass(type(m), kinds)]
            self._embeddings = frozenset(map(id, found))
            self._modules = modules.changes
        return self._embeddings

    def _pieces(self, param: Any, every: int) -> List[Any]:
        """Return `param`, or one run of RUN values in `every` of it."""
        tensor = getattr(param, "_local_tensor", param).detach()
        size = tensor.numel()
        if not size or not tensor.is_floating_point():
            return []
        if every <= 1:
            return [tensor]
        if not tensor.is_contiguous():
            return []
        runs = size // (RUN * every)
        if not runs:
            return [tensor.view(-1)[: max(1, size // every)]]
        at = tensor.storage_offset() + self._turn % every * RUN
        return [self.torch.as_strided(tensor, (runs, RUN), (RUN * every, 1), at)]

    def _norm_of(self, tensors: List[Any]) -> Number:
        norm: Number = self._probe.collectors["gradient"].norm_of(tensors)
        return norm
