"""A start that goes on in a later epoch than the checkpoint is of: data that nobody trains on.

Trainer and Lightning report where in which epoch each step is. In a launch that grows at an even
pace; the first step of the next launch should be where that pace leads, wherever the checkpoint is.
Half an epoch beyond is a resume that gave up the rest of one: the loss looks healthy, and nothing
else tells. A library that knows no length reports whole epochs only, which have no pace.
"""

from __future__ import annotations

from .model.events import Frame
from .model.interfaces import WATCHER
from .rank_monitor import RankMonitor
from .run_state import StepContext

EPOCH = "epoch"
LEAST_STEPS = 16  # of a launch, before its pace is known; project default
SKIPPED = 0.5  # epochs; project default: a loader may repeat or drop a part of one
NEXT = (
    "let the loader save where it is (a StatefulDataLoader), or resume from the end of an epoch: "
    "supervise checkpoints RUN"
)


def follow(ctx: StepContext, monitor: RankMonitor, frame: Frame) -> None:
    """Take the epoch of a frame, and tell of a skip in the first one of a launch."""
    epoch = monitor.value(EPOCH)
    if epoch is None:
        return
    progress = ctx.state.job.epochs
    if frame.attempt == progress.attempt:
        progress.step, progress.epoch = frame.step, epoch
        progress.in_parts |= not epoch.is_integer()
        return
    steps = progress.step - progress.first_step
    if frame.attempt == ctx.state.job.launched and progress.in_parts and steps >= LEAST_STEPS:
        per_step = (progress.epoch - progress.first_epoch) / steps
        expected = progress.epoch + (frame.step - progress.step) * per_step
        if epoch - expected >= SKIPPED:
            _notify(ctx, frame.step, epoch, expected)
    progress.begin(frame.attempt, frame.step, epoch)


def _notify(ctx: StepContext, step: int, epoch: float, expected: float) -> None:
    ctx.notify(
        "SEV1",
        f"the restart skipped {epoch - expected:.1f} epochs: step {step} is in {epoch:.2f}, and "
        f"{expected:.2f} was expected",
        verdict="the job trains on, and the data between is not trained on",
        then=NEXT,
        kind=WATCHER,
    )
