"""Use of the device's memory.

As torch's caching allocator sees it, read from its counters on the host: no word with the driver,
no wait for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Optional

from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step

LOOK_EVERY = 10  # steps between two looks at the allocator, whose counters take a while to read

DEVICE_MEMORY_METRICS = (
    MetricSpec(
        "gpu_mem_allocated",
        "%",
        "Memory of live tensors at the end of the step, over the device's; absent off CUDA.",
        "torch.cuda.memory_stats: allocated_bytes.all.current",
        "reading the allocator's counters",
        LOOK_EVERY,
    ),
    MetricSpec(
        "gpu_mem_reserved",
        "%",
        "Memory that torch's allocator holds, over the device's; absent off CUDA.",
        "torch.cuda.memory_stats: reserved_bytes.all.current",
        every=LOOK_EVERY,
    ),
    MetricSpec(
        "gpu_alloc_retries",
        "1",
        "Allocations so far that worked only after the cache was emptied; absent off CUDA.",
        "torch.cuda.memory_stats: num_alloc_retries",
        every=LOOK_EVERY,
    ),
)


class DeviceMemoryCollector(Collector):
    """Use of the device's memory.

    Looks in one step of LOOK_EVERY; where torch knows no such device, never.
    """

    METRICS = DEVICE_MEMORY_METRICS

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self.asleep = not context.gate.has_cuda
        self._total: Optional[float] = None  # bytes of the device; 0.0 where there is none

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        if step.number % LOOK_EVERY or self._total == 0.0:
            return
        cuda = self.torch.cuda
        if not cuda.is_initialized():  # a job may begin on the host
            return
        device = cuda.current_device()
        if self._total is None:
            self._total = float(cuda.get_device_properties(device).total_memory)
        counters = cuda.memory_stats_as_nested_dict(device)
        if not counters:
            self._total = 0.0  # another allocator, which counts nothing
            return
        values["gpu_mem_allocated"] = 100.0 * _bytes(counters, "allocated_bytes") / self._total
        values["gpu_mem_reserved"] = 100.0 * _bytes(counters, "reserved_bytes") / self._total
        values["gpu_alloc_retries"] = float(counters["num_alloc_retries"])


def _bytes(counters: Any, name: str) -> int:
    return int(counters[name]["all"]["current"])
