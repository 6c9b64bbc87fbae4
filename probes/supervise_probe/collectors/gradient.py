"""The global gradient norm: all parameters with gradients, before clipping, after unscaling.

Where the job clips with torch's functions, the norm is known before the clip and nothing need be
computed. What no clip covered is computed here, so a job that clips only a part, or nothing, has
the same metric. A norm that was clipped while the gradients were still scaled is divided by the
scale. Gradients that a job changes by hand before the step are measured as changed.
"""

from __future__ import annotations

from functools import reduce
from operator import add, is_
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Optional

from ..spec import MetricSpec
from . import Collector as Base

if TYPE_CHECKING:
    from ..probe import Probe
    from ..scalars import Number
    from ..step import Step, Update

METRICS = (
    MetricSpec(
        "grad_global_norm",
        "1",
        "2-norm of all gradients before clipping and after unscaling; absent without gradients.",
        "sqrt(sum |g|^2); the value of torch.nn.utils.clip_grad_norm_ where the job calls it",
        "nothing where the job clips, else one pass over the gradients",
    ),
)


class Clip:
    """One call of a clipping function: the norm of these parameters' gradients before it.

    Attributes:
        limit: the norm that the job allows, as it passed it; None where it clips in another way.
        counted_by: id of the optimizer whose part of the step it is counted in; 0: none so far.
    """

    __slots__ = ("backwards", "counted_by", "limit", "norm", "params", "unscaled")

    def __init__(
        self,
        params: List[Any],
        norm: Number,
        unscaled: FrozenSet[int],
        backwards: int,
        limit: Any,
    ) -> None:
        self.params = params
        self.norm = norm
        self.unscaled = unscaled
        self.backwards = backwards
        self.limit = limit
        self.counted_by = 0

    def ids(self) -> FrozenSet[int]:
        """Return what it covers, by id."""
        return frozenset(map(id, self.params))


class Collector(Base):
    """Combines what clips told and what it computes itself, over all optimizers of a step.

    Attributes:
        clips: the clips of the step under way.
    """

    SHARE = 0.05  # without it the standing order is blind: dear, but the last to go

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._scaling = probe.scaling
        self.clips: List[Clip] = []
        self._backwards = 0
        # By optimizer, since one whose step raised is measured again.
        self._squares: Dict[int, Number] = {}

    def after_backward(self, loss: Number) -> None:
        self._backwards += 1

    def saw_clip(self, params: List[Any], norm: Optional[Any], limit: Any = None) -> None:
        """The job is about to clip, or has: `norm` is what its own call computed, else None."""
        for clip in self.clips:
            if _same(clip.params, params) or clip.ids() == frozenset(map(id, params)):
                if clip.backwards == self._backwards:
                    return  # clipped twice: the first saw the true norm
                self.clips.remove(clip)
                break
        if norm is not None and type(norm) is self.torch.Tensor:
            value = self.scalars.value(norm)
        else:
            with self.torch.no_grad():
                value = self.norm_of([p.grad for p in params if p.grad is not None])
        self.clips.append(Clip(params, value, self._scaling.unscaled, self._backwards, limit))

    def forget(self) -> None:
        self.clips.clear()
        self._squares.clear()

    def measure(self, update: Update) -> None:
        clips = self.clips
        known, key = update.known, id(update.optimizer)
        self._squares.pop(key, None)
        if len(clips) == 1 and _same(clips[0].params, known.clipped_as):
            update.gradient_norm = self._counted(clips[0], update)
            return
        covered: FrozenSet[int] = frozenset()
        own: Number = 0.0
        for clip in clips:
            ids = clip.ids()
            if ids.isdisjoint(known.ids):
                continue
            if ids >= known.ids:
                known.clipped_as = clip.params
            covered = covered | ids
            norm = self._counted(clip, update)
            own = own + norm * norm
        left = [p.grad for p in update.params if id(p) not in covered]
        if left:
            norm = self.norm_of(left)
            still_scaled = getattr(update.optimizer, "grad_scale", None)
            if still_scaled is not None:  # a fused optimizer unscales inside its kernel
                norm = norm / self.scalars.value(still_scaled)
            own = own + norm * norm
            self._add(key, norm * norm)
        update.gradient_norm = own**0.5

    def _counted(self, clip: Clip, update: Update) -> Number:
        """Return the unscaled norm of a clip; the first optimizer that it covers counts it."""
        norm, key = clip.norm, id(update.optimizer)
        if update.scaler is not None and key not in clip.unscaled:
            norm = norm / update.scale
        if clip.counted_by in (0, key):
            clip.counted_by = key
            self._add(key, norm * norm)
        return norm

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        squares, self._squares = self._squares, {}
        self.clips.clear()
        self._backwards = 0
        if squares:
            values["grad_global_norm"] = reduce(add, squares.values()) ** 0.5

    def norm_of(self, gradients: List[Any]) -> Number:
        """Return the 2-norm of all `gradients`; of the local shard where one is sharded."""
        torch = self.torch
        by_device: Dict[Any, List[Any]] = {}
        low = False
        for gradient in gradients:
            gradient = getattr(gradient, "_local_tensor", gradient)
            if gradient.layout is not torch.strided:
                gradient = gradient.coalesce().values()
            low = low or gradient.dtype in (torch.float16, torch.bfloat16)
            by_device.setdefault(gradient.device, []).append(gradient)
        found: List[Number] = []
        for members in by_device.values():
            if low:  # the norm of bfloat16 tensors has three digits if it is bfloat16 itself
                norms = torch._foreach_norm(members, 2, dtype=torch.float32)
            else:
                norms = torch._foreach_norm(members)
            found.append(self.scalars.value(torch.linalg.vector_norm(torch.stack(norms))))
        if len(found) == 1:
            return found[0]
        squares: Number = 0.0
        for norm in found:
            squares = squares + norm * norm
        return squares**0.5

    def _add(self, key: int, square: Number) -> None:
        known = self._squares.get(key)
        self._squares[key] = square if known is None else known + square


def _same(some: List[Any], others: List[Any]) -> bool:
    """Whether both hold the same objects in the same order. Looks at none of them."""
    return len(some) == len(others) and all(map(is_, some, others))
