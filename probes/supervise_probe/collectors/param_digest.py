"""Checksums of the weights, to see whether the replicas of a data-parallel run are still the same.

Only where `DistributedDataParallel` says that they must be: under any other scheme ranks differ by
right. Any bit that changes in one tensor changes its checksum; two changes may cancel each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List

from ..torch_state.structure import replicated
from . import Collector, MetricSpec

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step, Update

PARAM_DIGEST_METRICS = (
    MetricSpec(
        "param_digest.<i>",
        "1",
        "Checksum of a run of weight tensors after the update, 8 runs over all of them in the "
        "optimizers' order; only under DistributedDataParallel.",
        "sum over tensors j of (2 j + 1) times the sum of its bit patterns, modulo 2^48",
        "one pass over the weights in a sampled step",
        500,
    ),
)

RUNS = 8
MODULUS = 1 << 48  # a double holds it exactly


class ParamDigestCollector(Collector):
    """Checksums of the weights, to see whether the replicas of a data-parallel run are still the
    same.

    Keeps the checksums of the round's optimizers until the step is over.
    """

    METRICS = PARAM_DIGEST_METRICS

    SAMPLED = "weights"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._position, self._registry = context.position, context.registry
        self._sums: List[Any] = []

    def after_update(self, update: Update) -> None:
        shared = replicated(self._registry) if self._position.world_size > 1 else set()
        patterns = {1: self.torch.uint8, 2: self.torch.int16, 4: self.torch.int32}
        for parameter in update.all_params:
            if id(parameter) not in shared or parameter.is_complex():
                continue
            weight = parameter.detach()
            pattern = patterns.get(weight.element_size(), self.torch.int64)
            self._sums.append(
                weight.contiguous().view(-1).view(pattern).sum(dtype=self.torch.int64)
            )

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        sums, self._sums = self._sums, []
        for run in range(min(RUNS, len(sums))):
            start, stop = run * len(sums) // RUNS, (run + 1) * len(sums) // RUNS
            if len(sums) < RUNS:
                start, stop = run, run + 1
            device = sums[start].device
            total = sum(
                (2 * j + 1) * digest.to(device) for j, digest in enumerate(sums[start:stop])
            )
            values[f"param_digest.{run}"] = self.scalars.value((total % MODULUS).double())
