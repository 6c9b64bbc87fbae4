"""Time and memory: the parts of a step, the probe's own cost, the memory of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Optional

from . import Collector, MetricSpec

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step, Times, Update

TIMING_METRICS = (
    MetricSpec(
        "step_time",
        "s",
        "Wall time from the last step's end to this one's, without holds; absent in the first.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec(
        "input_time", "s", "Time inside next() of a DataLoader, gradients on.", "CLOCK_MONOTONIC"
    ),
    MetricSpec(
        "forward_time",
        "s",
        "Time inside the outermost module, gradients on, without collectives.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec(
        "backward_time",
        "s",
        "Time inside torch.autograd.backward, without collectives.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec(
        "optimizer_time",
        "s",
        "Time inside optimizer.step, without collectives, and forward and backward of a closure.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec(
        "comm_time",
        "s",
        "Time inside collectives that the training thread calls, and waiting for them; without the "
        "reduction of DistributedDataParallel, which is part of backward_time; absent before the "
        "first.",
        "CLOCK_MONOTONIC around torch.distributed's functions and Work.wait",
    ),
    MetricSpec("other_time", "s", "step_time less the parts above.", "CLOCK_MONOTONIC"),
    MetricSpec(
        "dataloader_stall_frac",
        "%",
        "Time blocked in next(loader) over step time; absent where batches come from a "
        "generator or a function: then it is part of other_time.",
        "input_time / step_time",
    ),
    MetricSpec(
        "comm_time_frac",
        "%",
        "Time in collectives, as the training thread sees it, over step time.",
        "comm_time / step_time",
    ),
)

PARTS = (  # name, and that of its share of the step where it has one
    ("input_time", "dataloader_stall_frac"),
    ("forward_time", ""),
    ("backward_time", ""),
    ("optimizer_time", ""),
    ("comm_time", "comm_time_frac"),
)


class TimingCollector(Collector):
    """Parts of a step's time, as the host sees it.

    Splits the step. What ran after its last optimizer belongs to the next one.
    """

    METRICS = TIMING_METRICS

    def __init__(self, context: ProbeContext, times: Times) -> None:
        super().__init__(context)
        self._times = times
        self._before = times.ended

    def after_update(self, update: Update) -> None:
        self._times.end()

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        previous, self._before = self._before, self._times.ended
        elapsed = step.elapsed_ns
        if elapsed is None:
            return
        rest_ns = elapsed
        for (name, share), start, end in zip(PARTS, previous, self._before):
            if end:
                spent = end - start
                rest_ns -= spent
                values[name] = spent / 1e9
                if share and elapsed:
                    values[share] = 100.0 * spent / elapsed
        values["step_time"] = elapsed / 1e9
        values["other_time"] = max(0, rest_ns) / 1e9


COST_METRICS = (
    MetricSpec(
        "probe_self_time",
        "s",
        "Thread CPU time of the probe in the step before; absent where that was not weighed.",
        "thread_time",
    ),
    MetricSpec(
        "probe_overhead_frac",
        "1",
        "Moving average of probe_self_time / step_time.",
        "mean of the steps that were weighed, from step 16 on; after 20 of them exponential",
    ),
)

BEGIN = 16  # a first step makes what later ones use: it says nothing about them
SPAN = 20  # weighed steps whose mean it is before it becomes exponential, weight 1 / SPAN


class CostCollector(Collector):
    """The cost of the probe: thread CPU time inside all of its pieces.

    Smooths what the guard has measured.
    """

    METRICS = COST_METRICS

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._guard = context.guard
        self._share = 0.0
        self._weighed = 0

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        spent, self._guard.weighed_ns = self._guard.weighed_ns, None
        if spent is not None and step.elapsed_ns:
            values["probe_self_time"] = spent / 1e9
            if step.number >= BEGIN:
                self._weighed = min(self._weighed + 1, SPAN)
                self._share += (spent / step.elapsed_ns - self._share) / self._weighed
        if self._weighed:
            values["probe_overhead_frac"] = self._share


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
