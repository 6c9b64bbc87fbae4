"""Gradient norms: of all parameters, and by parameter group."""

from __future__ import annotations

from functools import reduce
from operator import add, is_
from typing import TYPE_CHECKING, Any, Optional

from ..runtime.call_stack import job_line
from . import Collector, MetricSpec

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import OptimizerInfo, Step, Update
    from ..torch_state.registry import GradScalerState
    from ..torch_state.structure import WeightCopies

GRADIENT_METRICS = (
    MetricSpec(
        "grad_global_norm",
        "1",
        "2-norm of all gradients before clipping and after unscaling; absent without gradients.",
        "sqrt(sum |g|^2); the value of torch.nn.utils.clip_grad_norm_ where the job calls it",
        "nothing where the job clips, else one pass over the gradients",
    ),
    MetricSpec(
        "grad_norm_share",
        "1",
        "What this rank adds to the job's gradient norm, as the root of its part of the square; "
        "only with several ranks, and where it is known on how many each gradient is the same.",
        "grad_global_norm * sqrt(sum |g|^2 / copies(g)) / sqrt(sum |g|^2)",
        "nothing where all gradients have as many copies, else one more pass",
    ),
)

NOT_ZERO = 1e-30  # a limit of 0 leaves no gradient to compare with


class Clip:
    """One call of a clipping function.

    Attributes:
        norm: of these parameters' gradients before it.
        own: the same of those that no clip before it has changed.
        limit: the norm that the job allows, as it passed it; None where it clips in another way.
        joint: whether it divides by the norm of all ranks' shards, which is no rank's own.
        size: how many values it covers, where the limit is that of each value; else None.
        counted_by: id of the optimizer whose part of the step it is counted in; 0: none so far.
    """

    def __init__(
        self,
        params: list[Any],
        norm: Number,
        unscaled: frozenset[int],
        backwards: int,
        limit: Any,
        joint: bool,
        by_value: bool,
    ) -> None:
        self.params = params
        self.norm = self.own = norm
        self.unscaled = unscaled
        self.backwards = backwards
        self.limit = limit
        self.joint = joint
        self.size: Optional[int] = None
        if by_value:
            self.size = sum(p.numel() for p in params if p.grad is not None)
        self.counted_by = 0

    def ids(self) -> frozenset[int]:
        """Return what it covers, by id."""
        return frozenset(map(id, self.params))


class GradientCollector(Collector):
    """The global gradient norm: all parameters with gradients, before clipping, after unscaling.

    Combines the norms of clips and those it computes itself, over all optimizers of a step.

    Attributes:
        clips: the clips of the step under way. clipped_at: the job's line of the first clip.
    """

    METRICS = GRADIENT_METRICS

    SHARE = 0.05  # without it the safeguard is blind: dear, but the last to go

    def __init__(
        self, context: ProbeContext, scaling: GradScalerState, copies: WeightCopies
    ) -> None:
        super().__init__(context)
        self._scaling = scaling
        self.clips: list[Clip] = []
        self.clipped_at: Optional[str] = None
        self._backwards = 0
        self._covered: tuple[Optional[Clip], set[int]] = None, set()  # first clip, ids of all
        # By optimizer, since one whose step raised is measured again.
        self._squares: dict[int, Number] = {}
        self._copies = copies
        self._parts: dict[int, Optional[Number]] = {}  # of each square that is this rank's

    def after_backward(self, loss: Number) -> None:
        self._backwards += 1
        if self._squares:  # its step raised, and these are other gradients
            self._squares.clear()
            self._parts.clear()

    def record_clip_norm(
        self,
        params: list[Any],
        norm: Optional[Any],
        limit: Any = None,
        joint: bool = False,
        by_value: bool = False,
    ) -> None:
        """The job is about to clip, or has: `norm` is what its own call computed, else None."""
        if self.clipped_at is None:
            self.clipped_at = job_line()
        fresh = self._fresh(params) if self.clips else params
        if fresh is None:
            return  # clipped twice: the first saw the true norm
        on_device = type(norm) is self.torch.Tensor
        value = self.scalars.value(norm) if on_device else self._norm_now(params)
        unscaled = self._scaling.unscaled
        clip = Clip(params, value, unscaled, self._backwards, limit, joint, by_value)
        self.clips.append(clip)
        if fresh is not params:
            local_norm = self._norm_now(fresh)
            if on_device:  # the clip has divided all of them by the same number
                local_norm = local_norm / (self._norm_now(params) + NOT_ZERO) * value
            clip.own = local_norm

    def _fresh(self, params: list[Any]) -> Optional[list[Any]]:
        """Return those that no clip has changed yet; None where one covered just these."""
        clips, ids = self.clips, set(map(id, params))
        if clips[0].backwards != self._backwards:  # it saw only a part of these gradients
            now = self._backwards
            clips[:] = [c for c in clips if c.backwards == now or not ids.issuperset(c.ids())]
            self._covered = None, set()
        if not clips:
            return params
        leading, covered = self._covered
        if leading is not clips[0]:
            covered = {id(p) for clip in clips for p in clip.params}
            self._covered = clips[0], covered
        if ids.isdisjoint(covered):
            covered |= ids
            return params
        if any(len(c.params) == len(params) and c.ids() == ids for c in clips):
            return None
        fresh = [p for p in params if id(p) not in covered]
        covered |= ids
        return fresh

    def was_clipped_jointly(self, info: OptimizerInfo) -> bool:
        """Return whether a clip divided all gradients of an optimizer by the norm of all ranks'.

        It is of all where no rank of the job holds other weights, as those of another stage do.
        """
        if not any(
            clip.joint and _same_tensors(clip.params, info.clipped_as) for clip in self.clips
        ):
            return False
        copies = self._copies.uniform_copy_count(info)
        return copies == 1 or (copies is not None and hasattr(info.params[0], "_local_tensor"))

    def _norm_now(self, params: list[Any]) -> Number:
        with self.torch.no_grad():
            gradients = [p.grad for p in params if p.grad is not None]
            return self.joint_norm(gradients) if gradients else 0.0

    def forget(self) -> None:
        self.clips.clear()
        self._squares.clear()
        self._parts.clear()

    def measure(self, update: Update) -> None:
        self._measure(update)
        if self._copies.has_other_ranks:
            self._parts[id(update.optimizer)] = self._part(update)

    def _part(self, update: Update) -> Optional[Number]:
        """Return this rank's part of the square of the job's norm, as a share of its own square."""
        copies = self._copies.uniform_copy_count(update.known)
        if copies is not None:
            return 1.0 / copies
        groups = self._copies.groups(update.params)
        if not groups:
            return None
        total: Number = 0.0
        part: Number = 0.0
        for copies, params in groups.items():
            norm = self.joint_norm([p.grad for p in params])
            total, part = total + norm * norm, part + norm * norm / copies
        return part / (total + NOT_ZERO)

    def _measure(self, update: Update) -> None:
        clips = self.clips
        info, key = update.known, id(update.optimizer)
        squares = self._squares.pop(key, None)
        if len(clips) == 1 and _same_tensors(clips[0].params, info.clipped_as):
            update.gradient_norm = self._counted(clips[0], update)
            return
        covered: set[int] = set()
        total: Number = 0.0
        for clip in clips:
            ids = clip.ids()
            if ids.isdisjoint(info.ids):
                continue
            if ids >= info.ids:
                info.clipped_as = clip.params
            covered |= ids
            norm = self._counted(clip, update)
            total = total + norm * norm
        uncounted = [p for p in update.params if id(p) not in covered]
        if uncounted:
            square = self._square(update, uncounted)
            total = total + square
            if info.shared:
                uncounted = self._not_counted(update, uncounted)
                square = self._square(update, uncounted) if uncounted else 0.0
            self._add(key, square)
        update.gradient_norm = total**0.5
        if (
            squares is not None
        ):  # its step raised: what has changed them since is a clip or an order
            self._squares[key] = squares

    def _square(self, update: Update, params: list[Any]) -> Number:
        norm = self.joint_norm([p.grad for p in params])
        still_scaled = getattr(update.optimizer, "grad_scale", None)
        if still_scaled is not None:  # a fused optimizer unscales inside its kernel
            norm = norm / self.scalars.value(still_scaled)
        return norm * norm

    def _not_counted(self, update: Update, params: list[Any]) -> list[Any]:
        """Return those that no other optimizer of this step, which was measured before, holds."""
        info = update.known
        infos = (
            other_info for reference in info.everyone if (other_info := reference()) is not None
        )
        infos = (other_info for other_info in infos if other_info is not info)
        counted = [
            other_info.ids for other_info in infos if id(other_info.reference()) in self._squares
        ]
        return [p for p in params if not any(id(p) in ids for ids in counted)]

    def _counted(self, clip: Clip, update: Update) -> Number:
        """Return the unscaled norm of a clip; the first optimizer that it covers counts it."""
        norm, key = clip.own, id(update.optimizer)
        if update.scaler is not None and key not in clip.unscaled:
            norm = norm / update.scale
        if clip.counted_by in (0, key):
            clip.counted_by = key
            self._add(key, norm * norm)
        return norm

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        squares, self._squares = self._squares, {}
        parts, self._parts = self._parts, {}
        self.clips.clear()
        if squares:
            values["grad_global_norm"] = reduce(add, squares.values()) ** 0.5
        shares = [
            square * part for key, square in squares.items() if (part := parts.get(key)) is not None
        ]
        if shares and len(shares) == len(squares):
            values["grad_norm_share"] = reduce(add, shares) ** 0.5

    def joint_norm(self, gradients: list[Any]) -> Number:
        """Return the 2-norm of all `gradients`; of the local shard where one is sharded."""
        torch = self.torch
        by_device: dict[Any, list[Any]] = {}
        low = False
        for gradient in gradients:
            gradient = getattr(gradient, "_local_tensor", gradient)
            if gradient.layout is not torch.strided:
                gradient = gradient.coalesce().values()
            low = low or gradient.dtype in (torch.float16, torch.bfloat16)
            by_device.setdefault(gradient.device, []).append(gradient)
        tensors: list[Number] = []
        for members in by_device.values():
            if low:  # the norm of bfloat16 tensors has three digits if it is bfloat16 itself
                norms = torch._foreach_norm(members, 2, dtype=torch.float32)
            else:
                norms = torch._foreach_norm(members)
            tensors.append(self.scalars.value(torch.linalg.vector_norm(torch.stack(norms))))
        if len(tensors) == 1:
            return tensors[0]
        squares: Number = 0.0
        for norm in tensors:
            squares = squares + norm * norm
        return squares**0.5

    def single_norms(self, gradients: list[Any]) -> list[Any]:
        """Return the 2-norm of each, as `joint_norm` counts it; 0-dim tensors, where they are."""
        torch = self.torch
        local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
        strided = torch.strided
        dense = [g if g.layout is strided else g.coalesce().values() for g in local]
        low = any(g.dtype in (torch.float16, torch.bfloat16) for g in dense)
        wide = {"dtype": torch.float32} if low else {}
        norms: list[Any] = torch._foreach_norm(dense, 2, **wide)
        return norms

    def _add(self, key: int, square: Number) -> None:
        squares = self._squares.get(key)
        self._squares[key] = square if squares is None else squares + square


def _same_tensors(some: list[Any], other_list: list[Any]) -> bool:
    """Whether both hold the same objects in the same order. Looks at none of them."""
    return len(some) == len(other_list) and all(map(is_, some, other_list))


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
NOT_CLIPPED: tuple[None, frozenset[int]] = None, frozenset()

Members = dict[str, list[Any]]


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
        self._before_clip: dict[int, tuple[Any, frozenset[int]]] = {}
        self._counted_by: dict[int, int] = {}  # optimizer, by embedding
        # By optimizer and label, since an optimizer whose step raised is measured again.
        self._squares: dict[int, dict[str, Number]] = {}
        self._moved: dict[str, tuple[Number, Number]] = {}
        self._before: list[tuple[str, list[Any], list[Any]]] = []
        self._embeddings: frozenset[int] = frozenset()
        self._modules = -1
        self._turn = 0

    def after_backward(self, loss: Number) -> None:
        """What was seen before this backward were other gradients."""
        self._before_clip.clear()
        self._squares.clear()
        self._counted_by.clear()

    def before_clip(self, params: list[Any]) -> None:
        """In a sampled step, the job is about to clip the gradients of `params`."""
        captured, unscaled = self._before_clip, self._scaling.unscaled
        fresh = [p for p in params if p.grad is not None and id(p) not in captured]
        if fresh:
            norms = self._gradient.single_norms([p.grad for p in fresh])
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
                groups[label] = self.squared_norm(update, params)

    def squared_norm(self, update: Update, params: list[Any]) -> Number:
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
                norm = self._gradient.joint_norm(gradients) / scale
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
            weight = self._gradient.joint_norm(old)
            moved: Number = 0.0
            if not update.skip:
                moved = self._gradient.joint_norm(self.torch._foreach_sub(pieces, old))
            squares = self._moved.get(label, (0.0, 0.0))
            self._moved[label] = squares[0] + moved * moved, squares[1] + weight * weight

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        measured, self._squares = self._squares, {}
        self._before_clip.clear()
        self._counted_by.clear()
        squares: dict[str, Number] = {}
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

    def embeddings(self) -> frozenset[int]:
        modules = self._registry.modules
        if modules.changes != self._modules:
            nn = self.torch.nn
            kinds = (nn.Embedding, nn.EmbeddingBag)
            weights = [m._parameters.get("weight") for m in modules if issubclass(type(m), kinds)]
            self._embeddings = frozenset(map(id, weights))
            self._modules = modules.changes
        return self._embeddings

    def _pieces(self, param: Any, every: int) -> list[Any]:
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
