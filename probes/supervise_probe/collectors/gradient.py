"""The global gradient norm: all parameters with gradients, before clipping, after unscaling.

Where the job clips with torch's functions, the norm is known before the clip and nothing need be
computed. What no clip covered is computed here, so a job that clips only a part, or nothing, has
the same metric. A norm that was clipped while the gradients were still scaled is divided by the
scale. Gradients that a job changes by hand before the step are measured as changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Optional, Sequence, Tuple

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
    """One call of a clipping function: the norm of these parameters' gradients before it."""

    __slots__ = ("backwards", "ids", "norm", "unscaled", "used")

    def __init__(
        self, ids: FrozenSet[int], norm: Number, unscaled: FrozenSet[int], backwards: int
    ) -> None:
        self.ids = ids
        self.norm = norm
        self.unscaled = unscaled
        self.backwards = backwards
        self.used = False


class Collector(Base):
    """Combines what clips told and what it computes itself, over all optimizers of a step."""

    SHARE = 0.05  # without it the standing order is blind: dear, but the last to go

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._scaling = probe.scaling
        self._clips: List[Clip] = []
        self._backwards = 0
        self._squares: Optional[Number] = None
        self._flat: Tuple[int, ...] = ()
        self._ids: FrozenSet[int] = frozenset()

    def after_backward(self, loss: Number) -> None:
        self._backwards += 1

    def saw_clip(self, params: Sequence[Any], norm: Optional[Any]) -> None:
        """The job is about to clip, or has: `norm` is what its own call computed, else None."""
        flat = tuple(map(id, params))
        if flat != self._flat:  # mostly the same parameters as in the step before
            self._flat, self._ids = flat, frozenset(flat)
        ids = self._ids
        for clip in self._clips:
            if clip.ids == ids:
                if clip.backwards == self._backwards:
                    return  # clipped twice: the first saw the true norm
                self._clips.remove(clip)
                break
        if norm is not None and type(norm) is self.torch.Tensor:
            value = self.scalars.value(norm)
        else:
            value = self.norm_of([p.grad for p in params if p.grad is not None])
        self._clips.append(Clip(ids, value, self._scaling.unscaled, self._backwards))

    def measure(self, update: Update) -> None:
        covered: FrozenSet[int] = frozenset()
        own: Number = 0.0
        ids = update.known.ids
        for clip in self._clips:
            if clip.ids.isdisjoint(ids):
                continue
            covered = covered | clip.ids if covered else clip.ids
            norm = clip.norm
            if update.scaler is not None and id(update.optimizer) not in clip.unscaled:
                norm = norm / update.scale
            own = own + norm * norm
            if not clip.used:
                clip.used = True
                self._add(norm * norm)
        if ids <= covered:
            update.gradient_norm = own**0.5
            return
        left = [p.grad for p in update.params if id(p) not in covered]
        if left:
            norm = self.norm_of(left)
            still_scaled = getattr(update.optimizer, "grad_scale", None)
            if still_scaled is not None:  # a fused optimizer unscales inside its kernel
                norm = norm / self.scalars.value(still_scaled)
            own = own + norm * norm
            self._add(norm * norm)
        update.gradient_norm = own**0.5

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        squares, self._squares = self._squares, None
        self._clips.clear()
        self._backwards = 0
        if squares is not None:
            values["grad_global_norm"] = squares**0.5

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

    def _add(self, square: Number) -> None:
        self._squares = square if self._squares is None else self._squares + square
