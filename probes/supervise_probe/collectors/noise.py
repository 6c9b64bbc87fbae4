"""Noise scale of the gradient: the batch size, in tokens, at which noise and signal are equal.

Two gradients of one step suffice, from a small batch and from a large one that holds it:
|g_small|^2 and |g_large|^2 differ in expectation by the noise alone. Under accumulation the small
one is that of the first backward, which is looked at when the second begins; with several ranks it
is the rank's own before the reduction, of a few parameters (see `SketchCollector`). With neither
nothing is published. Both estimates are averaged apart: the ratio of one step says nothing.

Batches of one step must be alike: the backwards of a step count as parts of one batch where a
forward of the outermost module stands in front of each. Several losses of one batch are no
accumulation, and neither are two networks; such a job's number means nothing.

Source: An Empirical Model of Large-Batch Training, arXiv:1812.06162, appendix A.
"""

from __future__ import annotations

import math
import sys
from functools import reduce
from operator import add
from time import thread_time_ns
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional

from ..runtime.guard import is_from_signal_handler
from ..torch_state.records import Average
from . import Collector, MetricSpec

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..sampling.sample_sets import SampleSets
    from ..torch_state.records import Optimizers, Step, Times, Update
    from .gradient import GradientCollector, GroupsCollector

NOISE_METRICS = (
    MetricSpec(
        "grad_noise_scale",
        "tokens",
        "S / G^2: trace of the gradient's covariance for one token over its squared mean, averages "
        "of samples, decay 0.99; absent without accumulation or several ranks, and without tokens.",
        "G^2 = (B|g_B|^2 - b|g_b|^2) / (B - b), S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B), "
        "arXiv:1812.06162",
        "one more pass over the gradients in a sampled step",
        50,
    ),
    MetricSpec(
        "gsnr",
        "1",
        "1 / grad_noise_scale: the same estimate, for one token.",
        "|E g|^2 / tr Cov(g)",
        "",
        50,
    ),
)

SMALL, LARGE, PARTS = "_noise_small", "_noise_large", "_noise_parts"  # never published
EQUAL = 1e-9  # relative: gradients that were not averaged


class NoiseCollector(Collector):
    """Noise scale of the gradient: the batch size, in tokens, at which noise and signal are equal.

    Collects two squared norms in a sampled step, and how many backwards it had.
    """

    METRICS = NOISE_METRICS
    SAMPLED = "gradients"

    def __init__(
        self,
        context: ProbeContext,
        optimizers: Optimizers,
        times: Times,
        gradient: GradientCollector,
        groups: GroupsCollector,
        sketch: SketchCollector,
    ) -> None:
        super().__init__(context)
        self._position, self._optimizers, self._times = context.position, optimizers, times
        self._gradient, self._groups, self._sketch = gradient, groups, sketch
        self._noise = Average("grad_noise_scale.s", 0.99)
        self._signal = Average("grad_noise_scale.g2", 0.99)
        self._step = -1
        self._backwards = 0
        self._forward_ns = 0
        self._first: dict[int, Number] = {}  # norm after the first backward, by optimizer
        # By optimizer, since one whose step raised is measured again.
        self._squares: dict[int, tuple[Number, Number]] = {}

    def after_backward(self, loss: Number) -> None:
        """Called in front of each backward: at the second, the first one's gradients are there."""
        if self._position.step != self._step:
            self._step, self._backwards = self._position.step, 0
            self._first = {}
        self._squares = {}
        forward, self._forward_ns = self._forward_ns, self._times.forward
        self._backwards += 1
        if self._backwards == 1:
            return
        if forward and forward == self._forward_ns:
            self._step = -1  # two losses of one forward
        elif self._backwards == 2 and self._position.world_size == 1:
            for optimizer in self._optimizers.living():
                grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
                grads = [grad for grad in grads if grad is not None]
                if grads:
                    with self.torch.no_grad():
                        self._first[id(optimizer)] = self._gradient.joint_norm(grads)

    def forget(self) -> None:
        self._step = -1

    def measure(self, update: Update) -> None:
        if self._step != self._position.step or update.gradient_norm is None:
            return
        if id(update.optimizer) in self._squares:  # its step raised, and the gradients are clipped
            return
        small: Optional[Number]
        if self._position.world_size == 1:
            small, large = self._first.get(id(update.optimizer)), update.gradient_norm
            if small is None:
                return
            small, large = small * small, large * large
        else:
            small, large = self._of_ranks(update)
            if small is None:
                return
        small = small * float(self._backwards * self._backwards)
        if update.scaler is not None:
            small = small / (update.scale * update.scale)
        self._squares[id(update.optimizer)] = small, large

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        squares, self._squares = self._squares, {}
        if squares and self._step == step.number:
            values[SMALL], values[LARGE] = (reduce(add, terms) for terms in zip(*squares.values()))
            values[PARTS] = float(self._backwards)

    def add_derived_values(self, values: dict[str, float]) -> None:
        small, large = values.pop(SMALL, None), values.pop(LARGE, None)
        parts = values.pop(PARTS, 0.0)
        tokens = values.get("tokens_per_update")
        if small is None or large is None or not tokens:
            return
        few, many = tokens / parts, tokens * self._position.world_size
        alike = abs(small - large) <= EQUAL * large
        if alike or not math.isfinite(small + large):
            return
        self._noise.add((small - large) / (1.0 / few - 1.0 / many))
        self._signal.add((many * large - few * small) / (many - few))
        noise, signal = self._noise.value, self._signal.value
        if noise and signal and noise > 0.0 and signal > 0.0:
            values["grad_noise_scale"] = noise / signal
            values["gsnr"] = signal / noise

    def _of_ranks(self, update: Update) -> tuple[Optional[Number], Number]:
        """Return squares of the rank's own and of the reduced gradient, of the same parameters."""
        sketch = self._sketch
        pairs = [
            (square, param)
            for index, square in sketch.own.items()
            for param in sketch.params[index : index + 1]
            if id(param) in update.known.ids and param.grad is not None
        ]
        if not pairs:
            return None, 0.0
        total: Number = 0.0
        for square, _ in pairs:
            total = total + self.scalars.value(square)
        large: Number = self._groups.squared_norm(update, [p for _, p in pairs])
        return total, large

    def state(self) -> dict[str, float]:
        state: dict[str, float] = {}
        self._noise.save_state(state)
        self._signal.save_state(state)
        return state

    def rewind(self, state: Mapping[str, float]) -> None:
        self._noise.load_state(state)
        self._signal.load_state(state)


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
        self.params: list[Any] = []
        self.own: dict[int, Any] = {}
        self._sums: dict[int, Any] = {}
        self._signs: dict[Any, Any] = {}
        self._handles: list[Any] = []
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

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        self._deaf()
        sums, self._sums = self._sums, {}
        self.params = []
        if not sums or self._step != step.number:
            return
        sums_of_one = next(iter(sums.values()))
        total = self.torch.stack([part.to(sums_of_one.device) for part in sums.values()]).sum(0)
        if self.scalars.can_read_now(total):
            values.update(zip(NAMES, total.tolist()))
        else:
            values.update((name, self.scalars.value(part)) for name, part in zip(NAMES, total))

    def _listener(self, index: int) -> Callable[..., None]:
        def arrived(gradients: tuple[Any, ...]) -> None:
            began = thread_time_ns()
            try:
                gradient = gradients[0]
                dense = gradient is not None and gradient.layout is self.torch.strided
                if dense and index not in self._sums:
                    self._saw(index, gradient.detach())
                self._sets.spent(self.SAMPLED, thread_time_ns() - began)
            except Exception as error:  # inside the job's backward nothing may be raised
                if is_from_signal_handler(error):
                    raise
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

    def _spread(self) -> list[Any]:
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
