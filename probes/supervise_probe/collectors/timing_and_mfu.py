"""Time, memory and model FLOPs utilisation (MFU) of a step, and the probe's own cost.

MFU is what the model needs over what its device could have done meanwhile. Counted are the tokens
that went through the outermost module with gradients on, padding included, since the device works
for them too; where that was not seen, `tokens_per_update`, and attention is left out. `status`
says what was counted, or why nothing was.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Iterable, NamedTuple, Optional, Sequence

from ..torch_state.structure import Router, Structure
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

    def collect(self, step: Step, values: dict[str, Number]) -> None:
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

    def collect(self, step: Step, values: dict[str, Number]) -> None:
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

    def collect(self, step: Step, values: dict[str, Number]) -> None:
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


# Words of a name, all of which must be there; the first line that fits holds. 1e12 a second.
_PEAKS = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIE", 756.0),
    ("H100", 989.4),
    ("H800 PCIE", 756.0),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L20", 119.5),
    ("L4", 121.0),
    ("T4", 65.0),
    ("V100 PCIE", 112.0),
    ("V100", 125.0),
    ("RTX 6000 ADA", 182.1),
    ("RTX A6000", 154.8),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI355X", 2516.0),
    ("MI350X", 2307.0),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI300A", 980.6),
    ("MI250X", 191.5),
    ("MI250", 181.0),
    ("MI210", 181.0),
)
_LESS = {"MIG", "LAPTOP", "D"}  # a slice of a device, or a slower edition of that name


def peak_flops_of(name: str) -> Optional[float]:
    """Return the peak of the device called `name` in FLOP/s; None if it is not in the table."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if words & _LESS:
        return None
    for needed, peak in _PEAKS:
        if words.issuperset(needed.split()):
            return peak * 1e12
    return None


_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_LOOKED_UP = re.compile(r"pos|emb|token", re.IGNORECASE)
_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads", "nhead")
_WIDTH_OF_HEAD = (
    "head_dim",
    "attention_head_size",
    "head_size",
    "d_head",
    "key_value_proj_dim",
    "d_kv",
)
_WIDTH = ("all_head_size", "embed_dim", "n_embd", "hidden_size", "d_model", "embed_size", "dim")
_SPLIT = re.compile(r"tp|tensor", re.IGNORECASE)  # names of mesh dimensions that split a matrix


class ModelFlops(NamedTuple):
    """What one model needs.

    Attributes:
        per_token: operations for one token, attention apart.
        per_pair: for each pair of a token and a position that it attends to: 12 L H Q.
        layers: how many attention modules were counted.
        why_not: why there is no count, "" if there is one.
    """

    per_token: float
    per_pair: float
    layers: int
    why_not: str = ""


def count_operations(torch: Any, roots: Iterable[Any]) -> ModelFlops:
    """Count the operations of forward and backward of the models `roots` together."""
    weights: dict[int, float] = {}
    widths: list[float] = []
    for root in roots:
        shares = _shares(root, Structure(torch, root).routers)
        config = getattr(root, "config", None)
        if getattr(config, "is_encoder_decoder", False) is True:
            return ModelFlops(0, 0, 0, "an encoder and a decoder see different numbers of tokens")
        for module in root.modules():
            if isinstance(module, torch.nn.modules.conv._ConvNd):
                return ModelFlops(0, 0, 0, "convolutions use a weight many times")
            weights.update(_of_module(torch, module, shares))
        widths += _attention(torch, root)
    if not weights:
        return ModelFlops(0, 0, 0, "no weight matrix is to be seen")
    return ModelFlops(sum(weights.values()), 12.0 * sum(widths), len(widths))


def _of_module(torch: Any, module: Any, shares: dict[int, float]) -> dict[int, float]:
    """Return the operations for each weight, by its id, that this module itself multiplies."""
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return {}
    if "Norm" in type(module).__name__:
        return {}
    counts = {}
    for name, weight in module._parameters.items():
        if weight is None or weight.dim() < 2 or "bias" in name:
            continue
        if weight.dim() > 2 and weight.shape[0] == 1:  # such as a position's vector
            continue
        if name != "weight" and _LOOKED_UP.search(name):
            continue
        factor = 6.0 if weight.requires_grad else 4.0
        counts[id(weight)] = factor * _size(weight) * shares.get(id(weight), 1.0)
    return counts


def _size(weight: Any) -> float:
    """Return how many elements of it this rank multiplies with; a sharded one is gathered first."""
    size = float(weight.numel())
    mesh = getattr(weight, "device_mesh", None)
    for dimension, name in enumerate(getattr(mesh, "mesh_dim_names", None) or ()):
        if mesh is not None and _SPLIT.search(name) and weight.placements[dimension].is_shard():
            size /= mesh.size(dimension)
    return size


def _shares(root: Any, routers: Iterable[Router]) -> dict[int, float]:
    """Return for each weight of an expert, by id, the share of all tokens that it works on."""
    shares: dict[int, float] = {}
    for router in routers:
        parent = root.get_submodule(router.name.rpartition(".")[0])
        experts = [p for p in parent._parameters.values() if _stacked(p, router.experts)]
        for child in parent.children():
            apart = sum(1 for _ in child.children()) == router.experts
            if apart or any(_stacked(p, router.experts) for p in child.parameters()):
                experts += child.parameters()
        share = min(1.0, router.top_k / router.experts)
        shares.update((id(p), share) for p in experts)
    return shares


def _stacked(weight: Any, experts: int) -> bool:
    return weight is not None and weight.dim() == 3 and int(weight.shape[0]) == experts


def _attention(torch: Any, root: Any) -> list[float]:
    """Return the width of all heads together for each innermost attention module."""
    modules: list[tuple[str, float]] = []
    for name, module in root.named_modules():
        width = _width(torch, module) if name else None
        if width:
            modules.append((name, width))
    names = [name for name, _ in modules]
    inner = {name for name in names if any(parent.startswith(name + ".") for parent in names)}
    return [width for name, width in modules if name not in inner]


def _width(torch: Any, module: Any) -> Optional[float]:
    if isinstance(module, torch.nn.MultiheadAttention):
        return float(module.embed_dim)
    named = _ATTENTION.search(type(module).__name__) is not None
    config = getattr(module, "config", None) if named else None
    heads = _number(module, config, _HEADS)
    if heads is None or not any(True for _ in module.children()):
        return None
    head = _number(module, config, _WIDTH_OF_HEAD)
    if head is not None:
        return heads * head
    linear = [m for m in module.children() if isinstance(m, torch.nn.Linear)]
    # The last one mostly puts the heads together: its input is as wide as all of them.
    return float(linear[-1].in_features) if linear else _number(module, config, _WIDTH)


def _number(module: Any, config: Any, names: tuple[str, ...]) -> Optional[float]:
    for home in (vars(module), getattr(config, "__dict__", {})):
        for name in names:
            value = home.get(name)
            if type(value) is int and value > 0:
                return float(value)
    return None


FLOPS_METRICS = (
    MetricSpec(
        "mfu",
        "%",
        "Operations that the model needs for the step's tokens on this rank, over the device's "
        "dense 16-bit peak in the same time; absent without a known peak. Source and what is left "
        "out: collectors/timing_and_mfu.py.",
        "PaLM, arXiv:2204.02311, appendix B: (6 N + 12 L H Q T) tokens_per_sec / peak",
    ),
)

PATIENCE = 64  # steps between two looks at a model whose modules come and go


class FlopsCollector(Collector):
    """Model FLOPs utilisation: what the model needs, over what its device could have done
    meanwhile.

    Looks at the model once, then multiplies.

    Attributes:
        description: what is counted, or why nothing is; for the status.
    """

    METRICS = FLOPS_METRICS

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._registry = context.registry
        self._status_changed = context.reporter.status_changed
        self._peak: Optional[float] = context.config.peak_flops
        self._peak_known = self._peak is not None
        self._model: Optional[ModelFlops] = None
        self._changes = -1
        self._next_look = 0
        self._tokens = self._pairs = 0  # of a token and a position that it attends to
        self.description = "no step yet"

    def count_tokens_of_shape(self, shape: Sequence[int]) -> int:
        """Tokens of this shape went into the model; returns how many."""
        tokens = math.prod(shape)
        self._tokens += tokens
        if len(shape) > 1:
            self._pairs += tokens * shape[-1]
        return tokens

    def forget(self) -> None:
        self._tokens = self._pairs = 0

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        tokens, pairs = self._tokens, self._pairs
        self._tokens = self._pairs = 0
        peak = self._peak if self._peak_known else self._find_peak()
        if not peak:
            return
        changes = self._registry.modules.changes
        if changes != self._changes and step.number >= self._next_look:
            self._changes, self._next_look = changes, step.number + PATIENCE
            self._look()
        model = self._model
        if model is None or not tokens or not step.elapsed_ns:
            return
        flops = model.per_token * tokens + model.per_pair * pairs
        values["mfu"] = 100.0 * flops / (step.elapsed_ns / 1e9) / peak

    def add_derived_values(self, values: dict[str, float]) -> None:
        tokens, elapsed = values.get("tokens_per_update"), values.get("step_time")
        if self._peak and self._model and tokens and elapsed and "mfu" not in values:
            values["mfu"] = 100.0 * self._model.per_token * tokens / elapsed / self._peak

    def _find_peak(self) -> Optional[float]:
        self._peak_known = True
        params = (p for root in self._registry.roots() for p in root.parameters())
        device = getattr(next(params, None), "device", self.torch.device("cpu"))
        name = str(device.type)
        if name == "cuda":
            name = str(self.torch.cuda.get_device_name(device))
        self._peak = peak_flops_of(name)
        if self._peak is None:
            self._describe(f"no: the peak of {name} is not in the table; set job.peak_flops")
        return self._peak

    def _look(self) -> None:
        model = count_operations(self.torch, self._registry.roots())
        if model.why_not:
            self._model = None
            self._describe(f"no: {model.why_not}")
            return
        self._model = model
        attention = f"{model.layers} attention layers" if model.layers else "no attention seen"
        peak = f"peak {(self._peak or 0.0) / 1e12:.4g} TFLOP/s"
        self._describe(f"{model.per_token / 1e6:.4g} MFLOP a token, {attention}; {peak}")

    def _describe(self, text: str) -> None:
        self.description = text
        self._status_changed()
