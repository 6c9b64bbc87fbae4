"""Gradient norm and update by parameter group, and of the embeddings apart.

Embeddings move in their own way: most rows have no gradient in a step, and a spike mostly begins
there. So their weights count as a member of their own, `embedding`, and not in their group.

Norms are those before clipping, as the global one: in a sampled step each gradient is measured
right before the first of torch's clipping functions that changes it, else when it is final.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Tuple

from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.grad_scaler import GradScalerState
    from ..torch_state.records import Step, Update
    from .gradient import GradientCollector

GROUPS_METRICS = (
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
NOT_CLIPPED: Tuple[None, FrozenSet[int]] = None, frozenset()

Members = Dict[str, List[Any]]


class GroupsCollector(Collector):
    """Gradient norm and update by parameter group, and of the embeddings apart.

    Splits each optimizer's parameters into members: its groups, and the embeddings.
    """

    METRICS = GROUPS_METRICS

    SAMPLED = "gradients"

    def __init__(
        self, context: ProbeContext, scaling: GradScalerState, gradient: GradientCollector
    ) -> None:
        super().__init__(context)
        self._registry, self._scaling, self._gradient = context.registry, scaling, gradient
        # By parameter: norm before its first clip, and which optimizers were unscaled then.
        self._before_clip: Dict[int, Tuple[Any, FrozenSet[int]]] = {}
        self._counted_by: Dict[int, int] = {}  # optimizer, by embedding
        # By optimizer and label, since an optimizer whose step raised is measured again.
        self._squares: Dict[int, Dict[str, Number]] = {}
        self._moved: Dict[str, Tuple[Number, Number]] = {}
        self._before: List[Tuple[str, List[Any], List[Any]]] = []
        self._embeddings: FrozenSet[int] = frozenset()
        self._modules = -1
        self._turn = 0

    def after_backward(self, loss: Number) -> None:
        """What was seen before this backward were other gradients."""
        self._before_clip.clear()
        self._squares.clear()
        self._counted_by.clear()

    def before_clip(self, params: List[Any]) -> None:
        """In a sampled step, the job is about to clip the gradients of `params`."""
        captured, unscaled = self._before_clip, self._scaling.unscaled
        fresh = [p for p in params if p.grad is not None and id(p) not in captured]
        if fresh:
            norms = self._gradient.norms_of([p.grad for p in fresh])
            captured.update((id(p), (norm, unscaled)) for p, norm in zip(fresh, norms))

    def measure(self, update: Update) -> None:
        key = id(update.optimizer)
        if key in self._squares:  # its step raised: what was changed since was changed behind this
            return
        groups = self._squares[key] = {}
        for label, params in self._members(update).items():
            params = [p for p in params if p.grad is not None]
            if label == EMBEDDING:  # the only member that several optimizers can have
                params = [p for p in params if self._counted_by.setdefault(id(p), key) == key]
            if params:
                groups[label] = self.square(update, params)

    def square(self, update: Update, params: List[Any]) -> Number:
        """Return the squared norm of the gradients of `params`, unclipped and unscaled."""
        norms, key = self._before_clip, id(update.optimizer)
        plain, scaled, now = [], [], []
        for p in params:
            norm, unscaled = norms.get(id(p), NOT_CLIPPED)
            if norm is None:
                now.append(p.grad)
            elif update.scaler is None or key in unscaled:
                plain.append(norm)
            else:
                scaled.append(norm)
        kernel = getattr(update.optimizer, "grad_scale", None)  # a fused one unscales by itself
        weight: Number = 1.0 if kernel is None else self.scalars.value(kernel)
        total: Number = 0.0
        for gradients, scale in ((plain, 1.0), (scaled, update.scale), (now, weight)):
            if gradients:
                norm = self._gradient.norm_of(gradients) / scale
                total = total + norm * norm
        return total

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
        snapshots, self._before = self._before, []
        for label, pieces, old in snapshots:
            weight = self._gradient.norm_of(old)
            moved: Number = 0.0
            if not update.skip:
                moved = self._gradient.norm_of(self.torch._foreach_sub(pieces, old))
            squares = self._moved.get(label, (0.0, 0.0))
            self._moved[label] = squares[0] + moved * moved, squares[1] + weight * weight

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        measured, self._squares = self._squares, {}
        self._before_clip.clear()
        self._counted_by.clear()
        squares: Dict[str, Number] = {}
        for by_group in measured.values():
            for label, square in by_group.items():
                squares[label] = squares.get(label, 0.0) + square
        moved, self._moved = self._moved, {}
        for label, square in squares.items():
            if label and len(squares) > 1:
                values["grad_global_norm." + label] = square**0.5
        for label, (change, weight) in moved.items():
            if label and len(moved) > 1 and (not self.scalars.on_host(weight) or weight > 0.0):
                values["update_to_weight." + label] = (change / weight) ** 0.5

    def _members(self, update: Update) -> Members:
        """Return the parameters by label; "" holds those past the last group with a column."""
        embeddings = self.embeddings()
        members: Members = {}
        for index, group in enumerate(update.optimizer.param_groups, update.known.first_group):
            label = str(index) if index < GROUPS else ""
            for param in group["params"]:
                param_group = EMBEDDING if id(param) in embeddings else label
                members.setdefault(param_group, []).append(param)
        return members

    def embeddings(self) -> FrozenSet[int]:
        modules = self._registry.modules
        if modules.changes != self._modules:
            nn = self.torch.nn
            kinds = (nn.Embedding, nn.EmbeddingBag)
            weights = [m._parameters.get("weight") for m in modules if issubclass(type(m), kinds)]
            self._embeddings = frozenset(map(id, weights))
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
        offset = tensor.storage_offset() + self._turn % every * RUN
        return [self.torch.as_strided(tensor, (runs, RUN), (RUN * every, 1), offset)]
