"""Spread of the weights, matrix by matrix: what drifts slowly, and layers that swing together.

What follows from copies of the routers' matrices is in `sampling/watch.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Tuple

from . import Collector, MetricSpec

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step, Update

WEIGHT_STD_METRICS = (
    MetricSpec(
        "router_weight_similarity",
        "1",
        "Mean pairwise cosine of a router's expert rows, mean over routers.",
        "(E |mean w/|w||^2 - 1) / (E - 1), arXiv:2606.28116",
        "on a sampled step, a copy of at most 32 MB",
        500,
    ),
    MetricSpec(
        "router_conditioning",
        "1",
        "Largest centred expert row over the mean row, of the worst router.",
        "max |w - mean w| / |mean w|, arXiv:2606.28116",
        "",
        500,
    ),
    MetricSpec(
        "layer_weight_std.<i>",
        "1",
        "Standard deviation of one matrix; 8 of them, evenly over the optimizers' parameters, the "
        "first and the last among them. Of more than 1000000 values, a run in the middle.",
        "torch.std",
        "one pass over the matrices in a sampled step",
        500,
    ),
    MetricSpec(
        "layer_weight_std",
        "1",
        "Largest relative change of the standard deviation of any matrix since the sample before; "
        "absent in the first.",
        "max |std_t / std_(t-d) - 1|",
        "",
        500,
    ),
)

COLUMNS = 8
RUN = 1_000_000


class WeightStdCollector(Collector):
    """Spread of the weights, matrix by matrix: what drifts slowly, and layers that swing together.

    Keeps one number per matrix.
    """

    METRICS = WEIGHT_STD_METRICS

    SAMPLED = "weights"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._now: Dict[int, Any] = {}  # by an optimizer's first group
        self._past: Dict[int, Tuple[Tuple[int, ...], Any]] = {}

    def after_update(self, update: Update) -> None:
        matrices = [p for p in update.all_params if p.dim() > 1 and p.is_floating_point()]
        matrices = [getattr(p, "_local_tensor", p).detach() for p in matrices]
        matrices = [m for m in matrices if m.numel() > 1]
        if not matrices:
            return
        ids = tuple(map(id, update.all_params))
        stds = self._stds(matrices)
        key = update.known.first_group
        previous = self._past.get(key)
        change = None
        if previous is not None and previous[0] == ids and previous[1].shape == stds.shape:
            change = ((stds - previous[1]).abs() / previous[1].clamp_min(1e-30)).max()
        self._past[key] = ids, stds
        self._now[key] = stds, change

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        now, self._now = self._now, {}
        if not now:
            return
        stds = [std for key in sorted(now) for std in now[key][0].unbind()]
        for column, std in enumerate(_spread(stds)):
            values[f"layer_weight_std.{column}"] = self.scalars.value(std)
        changes = [now[key][1] for key in sorted(now) if now[key][1] is not None]
        if changes:
            device = changes[0].device
            largest = self.torch.stack([change.to(device) for change in changes]).max()
            values["layer_weight_std"] = self.scalars.value(largest)

    def _stds(self, matrices: List[Any]) -> Any:
        torch, device = self.torch, matrices[0].device
        runs = []
        for matrix in matrices:
            if matrix.numel() > RUN and matrix.is_contiguous():
                offset = (matrix.numel() - RUN) // 2
                matrix = matrix.view(-1)[offset : offset + RUN]
            if matrix.dtype not in (torch.float32, torch.float64):
                matrix = matrix.float()
            runs.append(matrix.std().double().to(device))
        return torch.stack(runs)


def _spread(members: List[Any]) -> List[Any]:
    """Return COLUMNS of `members`, evenly, first and last among them; all where there are fewer."""
    if len(members) <= COLUMNS:
        return members
    last = len(members) - 1
    return [members[round(index * last / (COLUMNS - 1))] for index in range(COLUMNS)]
