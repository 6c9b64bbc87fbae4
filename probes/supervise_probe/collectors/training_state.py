"""State of the training: checksums and spread of the weights, and the moments of the optimizer.

Checksums show whether the replicas of a data-parallel run are still the same, only where
`DistributedDataParallel` says that they must be: under any other scheme ranks differ by right. Any
bit that changes in one tensor changes its checksum; two changes may cancel each other.

The spread shows, matrix by matrix, what drifts slowly, and layers that swing together. What follows
from copies of the routers' matrices is in `sampling/watch.py`.

A moment that is not finite, or a second moment below zero, ruins the weights for good. All of it is
looked at by turns, BUDGET values a sample; where something was found, the same place is looked at
again the next time. Gradients far larger than their own second moment come a step before a loss
spike, and are known before the update. Embeddings are left out, since rows of rare tokens have next
to no history, and so are gains and biases.

A running mean that is not finite ruins evaluations for good, though no training step shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator, Mapping, Optional

from ..torch_state.structure import replicated_parameters
from . import Collector, MetricSpec
from .loss import NEW

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step, Update
    from .gradient import GroupsCollector

PARAM_DIGEST_METRICS = (
    MetricSpec(
        "param_digest.<i>",
        "1",
        "Checksum of a run of weight tensors after the update, 8 runs over all of them in the "
        "optimizers' order; only under DistributedDataParallel.",
        "sum over tensors j of (2 j + 1) times the sum of its bit patterns, modulo 2^48",
        "one pass over the weights in a sampled step",
        50,
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

    SAMPLED = "checksums"  # a set of its own: no dear pass over the gradients makes it rarer

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._position, self._registry = context.position, context.registry
        self._sums: list[Any] = []

    def after_update(self, update: Update) -> None:
        ranks = self._position.world_size
        shared = replicated_parameters(self._registry, ranks) if ranks > 1 else set()
        patterns = {1: self.torch.uint8, 2: self.torch.int16, 4: self.torch.int32}
        for parameter in update.all_params:
            if id(parameter) not in shared or parameter.is_complex():
                continue
            weight = parameter.detach()
            pattern = patterns.get(weight.element_size(), self.torch.int64)
            self._sums.append(
                weight.contiguous().view(-1).view(pattern).sum(dtype=self.torch.int64)
            )

    def collect(self, step: Step, values: dict[str, Number]) -> None:
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


WEIGHT_STD_METRICS = (
    MetricSpec(
        "router_weight_similarity",
        "1",
        "Mean pairwise cosine of a router's expert rows, mean over routers.",
        "(E |mean w/|w||^2 - 1) / (E - 1), arXiv:2606.28116",
        "on a sampled step, a copy of at most 32 MB",
        50,
    ),
    MetricSpec(
        "router_conditioning",
        "1",
        "Largest centred expert row over the mean row, of the worst router.",
        "max |w - mean w| / |mean w|, arXiv:2606.28116",
        "",
        50,
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
        self._now: dict[int, Any] = {}  # by an optimizer's first group
        self._past: dict[int, tuple[tuple[int, ...], Any]] = {}

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

    def collect(self, step: Step, values: dict[str, Number]) -> None:
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

    def _stds(self, matrices: list[Any]) -> Any:
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


def _spread(members: list[Any]) -> list[Any]:
    """Return COLUMNS of `members`, evenly, first and last among them; all where there are fewer."""
    if len(members) <= COLUMNS:
        return members
    last = len(members) - 1
    return [members[round(index * last / (COLUMNS - 1))] for index in range(COLUMNS)]


OPTIMIZER_STATE_METRICS = (
    MetricSpec(
        "opt_state_finite",
        "1",
        "1 while the floating-point state that was looked at is finite and second moments are not "
        "negative, else 0; 1000000 values of it in a sample, all of it by turns.",
        "isfinite(m), isfinite(v), v >= 0",
        "one pass over 1000000 values in a sampled step",
        50,
    ),
    MetricSpec(
        "adam_rms_ratio",
        "1",
        "Largest RMS, over matrices without embeddings, of the gradient over the root of its "
        "second moment before the update; of 16384 neighbours of each, which take turns.",
        "max sqrt(mean(g^2 / max(v_(t-1) / (1 - b2^(t-1)), eps^2))), StableAdamW, arXiv:2304.13013",
        "four passes over the samples in a sampled step",
        50,
    ),
)

BUDGET = 1_000_000  # values a sample; at least one piece of each optimizer
PIECE = 262_144  # values looked at in one call
NEIGHBOURS = 16_384
NEVER_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")
NO_EPS = 1e-30

Place = tuple[int, int]  # number of a parameter, offset in its state


class OptimizerStateCollector(Collector):
    """The optimizer's own memory: is it finite, and does it know gradients like these?

    Goes round through the state of each optimizer.
    """

    METRICS = OPTIMIZER_STATE_METRICS

    SAMPLED = "gradients"

    def __init__(self, context: ProbeContext, groups: GroupsCollector) -> None:
        super().__init__(context)
        self._groups = groups
        self._places: dict[int, Place] = {}  # by an optimizer's first group
        self._last: dict[int, Place] = {}
        self._sound: Optional[Number] = None
        self._ratio: Optional[Number] = None
        self._turn = 0

    def measure(self, update: Update) -> None:
        self._turn += 1
        sound = self._look(update)
        if sound is not None:
            self._sound = sound if self._sound is None else self._sound * sound
        ratio = self._surprise(update)
        if ratio is not None:
            self._ratio = ratio if self._ratio is None else self.scalars.larger(self._ratio, ratio)

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        sound, self._sound = self._sound, None
        ratio, self._ratio = self._ratio, None
        if sound is not None:
            values["opt_state_finite"] = sound
        if ratio is not None:
            values["adam_rms_ratio"] = ratio

    def add_derived_values(self, values: dict[str, float]) -> None:
        if values.get("opt_state_finite") == 0.0:
            self._places.update(self._last)

    # ── is it finite ──────────────────────────────────────────────────────────────────────────

    def _look(self, update: Update) -> Optional[Number]:
        torch, params = self.torch, update.all_params
        key, budget, turns = update.known.first_group, BUDGET, 0
        index, offset = self._last[key] = self._places.get(key, (0, 0))
        ends, floors = [], []
        while budget > 0 and turns <= len(params):
            size, remains = 0, False
            for name, value in _state_of(update, params[index % len(params)]):
                piece = value.view(-1)[offset : offset + PIECE]
                if piece.numel():
                    low, high = torch.aminmax(piece)
                    ends += [low.double(), high.double()]
                    if name in NEVER_NEGATIVE:
                        floors.append(low.double())
                    size += piece.numel()
                    remains = remains or value.numel() > offset + PIECE
            budget -= size
            if remains:
                offset += PIECE
            else:
                index, offset, turns = (index + 1) % len(params), 0, turns + 1
        self._places[key] = index, offset
        if not ends:
            return None
        bad = ~torch.isfinite(self._stack(ends)).all()
        if floors:
            bad = bad | (self._stack(floors) < 0.0).any()
        return 1.0 - self.scalars.value(bad)

    def _stack(self, numbers: list[Any]) -> Any:
        device = numbers[0].device
        return self.torch.stack([number.to(device) for number in numbers])

    # ── does it know such gradients ───────────────────────────────────────────────────────────

    def _surprise(self, update: Update) -> Optional[Number]:
        torch = self.torch
        gradients, moments = [], []
        for group in update.optimizer.param_groups:
            decay, eps = group.get("betas", (0, None))[1], group.get("eps")
            if not isinstance(decay, float):
                continue
            floor = max(NO_EPS, eps * eps if isinstance(eps, float) else 0.0)
            for gradient, moment, steps in self._dense(update, group["params"]):
                gradients.append(gradient)
                moments.append((moment / (1.0 - decay**steps)).clamp_min_(floor))
        if not gradients:
            return None
        ratios = torch._foreach_mul(gradients, gradients)
        torch._foreach_div_(ratios, moments)
        means = torch.stack([ratio.mean() for ratio in ratios])
        largest = self.scalars.value(means.max()) ** 0.5
        scale = getattr(update.optimizer, "grad_scale", None)
        return largest if scale is None else largest / self.scalars.value(scale)

    def _dense(self, update: Update, params: list[Any]) -> Iterator[tuple[Any, Any, Any]]:
        """Yield (gradient, second moment, steps that it has seen) of a run of each matrix."""
        embeddings = self._groups.embeddings()
        state = update.optimizer.state
        for param in params:
            memory = state.get(param)
            if not memory or param.grad is None or param.dim() < 2 or id(param) in embeddings:
                continue
            moment, steps = memory.get("exp_avg_sq"), memory.get("step")
            if moment is None or steps is None or moment.shape != param.shape:
                continue
            gradient, moment = (getattr(t, "_local_tensor", t) for t in (param.grad, moment))
            if not (gradient.is_contiguous() and moment.is_contiguous() and gradient.numel()):
                continue
            size = gradient.numel()
            offset = self._turn * NEIGHBOURS % max(1, size - NEIGHBOURS + 1)
            run = slice(offset, offset + NEIGHBOURS)
            if isinstance(steps, self.torch.Tensor):
                steps = (
                    steps.item() if self.scalars.can_read_now(steps) else steps.to(moment.device)
                )
            if not isinstance(steps, float) or steps > 0.0:
                wide = self.torch.float32
                yield gradient.view(-1)[run].to(wide), moment.view(-1)[run].to(wide), steps


def _state_of(update: Update, param: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, tensor) of a parameter's floating-point state, counts left out."""
    for key, value in (update.optimizer.state.get(param) or {}).items():
        value = getattr(value, "_local_tensor", value)
        if not hasattr(value, "is_floating_point") or not value.is_floating_point():
            continue
        if value.numel() > 1 and value.is_contiguous():
            yield key, value.detach()


RUNNING_STATS_METRICS = (
    MetricSpec(
        "running_stats_broken",
        "1",
        "Normalization layers of trained models whose running mean or variance is not finite; "
        "looked at in the step behind a loss or gradient that is not; else absent.",
        "torch.nn.BatchNorm1d.running_mean",
        "behind such a step one pass over the running statistics",
    ),
)


EVERY_BROKEN = 16  # steps; project default
REPEATED = "running_stats_repeated"  # of a frame on its way: its count is that of an earlier step


class RunningStatsCollector(Collector):
    """Running statistics of normalization layers that a batch made NaN.

    A batch with one such value makes them so for good, also where its update was skipped. Training
    goes by the statistics of the batch and shows nothing; every evaluation is NaN from then on.
    """

    METRICS = RUNNING_STATS_METRICS

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._registry = context.registry
        self._is_due = False
        self._broken = 0.0  # layers, when they were counted last
        self._every = 1  # steps between counts of layers that are broken

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        norm = self.torch.nn.modules.batchnorm._NormBase
        if not self._is_due:
            return
        if self._broken and step.number % self._every:
            values["running_stats_broken"], values[REPEATED] = self._broken, 1.0
            return
        modules = (module for root in self._registry.roots() for module in root.modules())
        layers = [m for m in modules if isinstance(m, norm) and m.running_mean is not None]
        if not layers:
            self._is_due = False
            return
        broken = [self._is_broken(layer) for layer in layers]
        total = sum(each.to(broken[0].device) for each in broken)
        values["running_stats_broken"] = self.scalars.value(total)

    def add_derived_values(self, values: dict[str, float]) -> None:
        numbers = (values.get("train_loss_raw", 0.0), values.get("grad_global_norm", 0.0))
        is_wrong = bool(values.get(NEW)) or any(n - n != 0.0 for n in numbers)
        is_repeated = values.pop(REPEATED, None)  # the next count may have been made already
        if "running_stats_broken" in values and not is_repeated:
            self._broken = values["running_stats_broken"]
            self._is_due = is_wrong or self._broken > 0.0
        elif is_wrong:  # of a device the count comes a step late: no answer is no end
            self._is_due = True

    def relax(self) -> bool:
        """Count less often: switched off, it would look as if the layers were whole again."""
        is_first, self._every = self._every == 1, EVERY_BROKEN
        return is_first

    def rewind(self, state: Mapping[str, float]) -> None:
        self._broken = 0.0  # count at once: a savepoint has the statistics of then

    def _is_broken(self, layer: Any) -> Any:
        """Return 1 or 0 where the layer is."""
        finite = [self.torch.isfinite(v).all() for v in (layer.running_mean, layer.running_var)]
        return (~(finite[0] & finite[1])).float()
