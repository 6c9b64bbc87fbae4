"""The collectors that need more than the context, or that other parts call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Dict, NamedTuple, Tuple

from . import (
    batch,
    batch_sanity,
    clipping,
    counters,
    discards,
    flops,
    framework,
    gradient,
    groups,
    limits,
    loss,
    loss_scale,
    noise,
    optimizer_state,
    phase,
    quarantine,
    rates,
    shards,
    sketch,
    timing,
    tokens,
    updates,
)

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.active_safeguards import InForce
    from ..runtime.scalars import Number
    from ..runtime.times import Times
    from ..sampling.sample_sets import SampleSets
    from ..torch_state.grad_scaler import GradScalerState
    from ..torch_state.learning_rate import LearningRate
    from ..torch_state.records import Optimizers
    from ..torch_state.weight_copies import WeightCopies
    from . import Collector


class Sources(NamedTuple):
    """What collectors read beside the context.

    Attributes:
        extra: what joins the next frame.
    """

    optimizers: Optimizers
    scaling: GradScalerState
    rate: LearningRate
    times: Times
    sets: SampleSets
    in_force: InForce
    extra: Dict[str, Number]
    copies: WeightCopies


class Wired(NamedTuple):
    """Those that other parts call."""

    batch: batch.Collector
    batch_sanity: batch_sanity.Collector
    counters: counters.Collector
    discards: discards.Collector
    flops: flops.Collector
    gradient: gradient.Collector
    groups: groups.Collector
    framework: framework.Collector
    limits: limits.Collector
    loss: loss.Collector
    quarantine: quarantine.Collector
    shards: shards.Collector
    tokens: tokens.Collector
    updates: updates.Collector


def make(
    context: ProbeContext,
    sources: Sources,
    look_inside: Callable[[], None],
    step_is_over: Callable[[], None],
) -> Tuple[Wired, Dict[str, Collector]]:
    """Make them, and by name all that need more than the context.

    For the two callables see `batch` and `framework`.
    """
    gradients = gradient.Collector(context, sources.scaling, sources.copies)
    clips = clipping.Collector(context, gradients)
    losses = loss.Collector(context)
    batches, origins = batch.Collector(context, look_inside), shards.Collector(context)
    wired = Wired(
        batch=batches,
        batch_sanity=batch_sanity.Collector(context, sources.sets),
        counters=counters.Collector(context),
        discards=discards.Collector(context, sources.scaling, gradients, losses),
        flops=flops.Collector(context),
        gradient=gradients,
        groups=groups.Collector(context, sources.scaling, gradients),
        framework=framework.Collector(context, sources.extra, step_is_over),
        limits=limits.Collector(context, sources.in_force, clips),
        loss=losses,
        quarantine=quarantine.Collector(context, batches, origins),
        shards=origins,
        tokens=tokens.Collector(context, sources.copies),
        updates=updates.Collector(context, sources.sets, sources.copies),
    )
    sketches = sketch.Collector(context, sources.optimizers, sources.sets)
    return wired, {
        **wired._asdict(),
        "clipping": clips,
        "loss_scale": loss_scale.Collector(context, sources.scaling),
        "noise": noise.Collector(
            context, sources.optimizers, sources.times, wired.gradient, wired.groups, sketches
        ),
        "optimizer_state": optimizer_state.Collector(context, wired.groups),
        "phase": phase.Collector(context, sources.optimizers, sources.rate, wired.framework),
        "rates": rates.Collector(context, sources.rate),
        "sketch": sketches,
        "timing": timing.Collector(context, sources.times),
    }
