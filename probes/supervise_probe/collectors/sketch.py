"""The rank's own gradient, as it was before the ranks averaged it, in 16 numbers.

Ranks cannot compare whole gradients. The same fixed signs on every rank turn 65536 of its values
into 16 sums; the cosine of two such sketches is that of the gradients, with a standard error of
0.25, and the supervisor takes the mean over pairs of ranks.

The gradient is seen as it goes into a parameter, in the first backward of a sampled step, since the
reduction comes behind that. Parameters that are sharded have no such place. For several ranks only.
"""

from __future__ import annotations

import sys
from time import thread_time_ns
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..sampling.sample_sets import SampleSets
    from ..torch_state.records import Optimizers, Step, Update

SKETCH_METRICS = (
    MetricSpec(
        "grad_sketch.<i>",
        "1",
        "One of 16 signed sums of this rank's gradient before the reduction, under the loss scale; "
        "absent with one rank, and where parameters are sharded.",
        "sum over j = i mod 16 of s_j g_j, s_j = 1 or -1 by a hash of j",
        "one pass over 65536 values of the gradients in a sampled step",
        50,
    ),
)

SUMS = 16
NAMES = tuple(f"grad_sketch.{index}" for index in range(SUMS))
TENSORS = 8  # parameters that are looked at, spread evenly over the model
VALUES = 8192  # of each
MIX = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # odd numbers of 32 bits, as in xxHash


class SketchCollector(Collector):
    """The rank's own gradient, as it was before the ranks averaged it, in 16 numbers.

    Listens where the gradients of a few parameters arrive.

    Attributes:
        own: squared norms of the local gradients of the newest sampled backward, by place in
            `params`.
        params: the parameters that are looked at.
    """

    METRICS = SKETCH_METRICS

    SAMPLED = "gradients"

    def __init__(self, context: ProbeContext, optimizers: Optimizers, sets: SampleSets) -> None:
        super().__init__(context)
        self._guard, self._position = context.guard, context.position
        self._optimizers, self._sets = optimizers, sets
        self.params: List[Any] = []
        self.own: Dict[int, Any] = {}
        self._sums: Dict[int, Any] = {}
        self._signs: Dict[Any, Any] = {}
        self._handles: List[Any] = []
        self._step = -1

    def after_backward(self, loss: Number) -> None:
        """Called in front of each backward: listen to the first one of the step."""
        self._deaf()
        number = self._position.step
        if self._position.world_size < 2 or number == self._step:
            return
        self._step = number
        self.own, self._sums = {}, {}
        self.params = self._spread()
        if _compiled_autograd():
            return
        with self.torch.enable_grad():
            for index, param in enumerate(self.params):
                node = param.view_as(param).grad_fn.next_functions[0][0]
                self._handles.append(node.register_prehook(self._listener(index)))

    def forget(self) -> None:
        self._step = -1

    def measure(self, update: Update) -> None:
        self._deaf()

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        self._deaf()
        sums, self._sums = self._sums, {}
        self.params = []
        if not sums or self._step != step.number:
            return
        sums_of_one = next(iter(sums.values()))
        total = self.torch.stack([part.to(sums_of_one.device) for part in sums.values()]).sum(0)
        if self.scalars.reads(total):
            values.update(zip(NAMES, total.tolist()))
        else:
            values.update((name, self.scalars.value(part)) for name, part in zip(NAMES, total))

    def _listener(self, index: int) -> Callable[..., None]:
        def arrived(gradients: Tuple[Any, ...]) -> None:
            began = thread_time_ns()
            try:
                gradient = gradients[0]
                dense = gradient is not None and gradient.layout is self.torch.strided
                if dense and index not in self._sums:
                    self._saw(index, gradient.detach())
                self._sets.spent(self.SAMPLED, thread_time_ns() - began)
            except Exception as error:  # inside the job's backward nothing may be raised
                self._guard.failed(self._guard.part("sketch"), error)

        return arrived

    def _saw(self, index: int, gradient: Any) -> None:
        torch = self.torch
        flat = gradient.reshape(-1)
        run = flat[: min(VALUES, flat.numel() // SUMS * SUMS)].to(torch.float64)
        self.own[index] = torch.linalg.vector_norm(flat, dtype=torch.float64) ** 2
        signs = self._signs.get(flat.device)
        if signs is None:
            signs = self._signs[flat.device] = _signs(torch, VALUES * TENSORS, flat.device)
        offset = index * VALUES
        self._sums[index] = (run * signs[offset : offset + run.numel()]).view(-1, SUMS).sum(0)

    def _spread(self) -> List[Any]:
        """Return parameters that every rank has whole, evenly over the model."""
        candidates = [
            param
            for param in self._optimizers.parameters()
            if param.requires_grad and param.is_leaf and param.is_floating_point()
            if not hasattr(param, "_local_tensor") and not hasattr(param, "_is_flat_param")
        ]
        large = [param for param in candidates if param.numel() >= SUMS]
        count = min(TENSORS, len(large))
        return [large[index * len(large) // count] for index in range(count)]

    def _deaf(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def _compiled_autograd() -> bool:
    """Whether the backward itself is compiled, which would take our listener into its graph."""
    module: Optional[Any] = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(module is not None and getattr(module, "compiled_autograd_enabled", False))


def _signs(torch: Any, count: int, device: Any) -> Any:
    """Return `count` signs, the same in every process: no random number is drawn."""
    word = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor in MIX:
        word = (word * factor) & 0xFFFFFFFF
        word = word ^ (word >> 15)
    return (word & 1).to(torch.float64).mul_(2.0).sub_(1.0)
