"""Report of how a job that was started again goes on, compared with the attempt before.

A difference is reported within a few steps, with both numbers and what to do. It is never rolled
back: no earlier state mends what the job does not load.

A start may also go on in a later epoch than the checkpoint is of: data that nobody trains on.
Trainer and Lightning report where in which epoch each step is. In a launch that grows at an even
pace; the first step of the next launch should be where that pace leads, wherever the checkpoint is.
Half an epoch beyond is a resume that gave up the rest of one: the loss looks healthy, and nothing
else shows it. A library that knows no length reports whole epochs only, which have no pace.
"""

from __future__ import annotations

from .attempt_overlap import STARTS, Overlap, Row, columns, row
from .model.decisions import StepDiffers
from .model.events import Announced, Frame
from .model.interfaces import WATCHER
from .rank_monitor import RankMonitor
from .run_state import State, StepContext

ONSET = 5  # steps before a breach that may be part of its trouble; project default


def on_announced(state: State, monitor: RankMonitor, event: Announced) -> None:
    """Another process takes the place of one that ended: keep what the leader's steps were."""
    steps = state.repeated
    if not monitor.exited or monitor.program in (None, event.program):
        return
    if state.leader() == event.rank:
        positions = columns(monitor.names)
        steps.before = {frame.step: row(frame, positions) for frame in monitor.history.frames}
        steps.overlap = None


def follow(ctx: StepContext, monitor: RankMonitor, frame: Frame) -> None:
    """Take a frame of the leading rank; report what is not as it was."""
    steps, overlap = ctx.state.repeated, ctx.state.repeated.overlap
    starts = frame.step < STARTS and not frame.attempt
    if not (starts or steps.before or overlap):
        return
    now = row(frame, columns(monitor.names))
    if starts:
        steps.starts[frame.step] = now
    if steps.before and frame.attempt == ctx.state.job.launched:
        rows_before, steps.before = steps.before, {}
        if max(rows_before) >= frame.step:
            overlap = Overlap(frame.step, frame.attempt, rows_before, steps.starts)
            steps.overlap = overlap
    if overlap is not None and overlap.attempt == frame.attempt:
        _compare(ctx, overlap, frame.step, now)
    elif overlap is not None:  # rolled back meanwhile
        steps.overlap = None


def explain_missing_overlap(state: State) -> str:
    """Say that too few of the repeated steps were compared to believe in a recovery, else ""."""
    overlap = state.repeated.overlap
    if overlap is None or overlap.compared >= overlap.wanted:
        return ""
    return f"{overlap.compared} of {overlap.wanted} repeated steps were compared"


def differences(state: State) -> str:
    """Return what the newest launch does otherwise than before, "" for nothing."""
    overlap = state.repeated.overlap
    differences = overlap.differences if overlap is not None else ()
    return "; ".join(difference.text for difference in differences if difference.matters)


def _compare(ctx: StepContext, overlap: Overlap, step: int, now: Row) -> None:
    incident = ctx.state.incident
    crashed = incident is not None and incident.breach_step == incident.recovery.crashed
    numbers = incident is None or crashed or step < incident.breach_step - ONSET
    differences = overlap.take(step, now, numbers=numbers)
    for difference in differences:
        kind = "differs" if difference.matters else "as-seeded"
        ctx.record(StepDiffers(reason=difference.text, what=kind))
    if differences:
        gravest = next((one for one in differences if one.matters), differences[0])
        texts = "; ".join(one.text for one in differences)
        ctx.notify(
            "SEV2" if gravest.matters else "INFO",
            f"the job goes on otherwise than before its restart: {texts}",
            verdict="nothing is rolled back for it" if gravest.matters else "the training goes on",
            then="; ".join(one.remedy for one in differences),
        )


EPOCH = "epoch"
LEAST_STEPS = 16  # of a launch, before its pace is known; project default
SKIPPED = 0.5  # epochs; project default: a loader may repeat or drop a part of one
SKIP_REMEDY = (
    "let the loader save where it is (a StatefulDataLoader), or resume from the end of an epoch: "
    "supervise checkpoints RUN"
)


def follow_epoch(ctx: StepContext, monitor: RankMonitor, frame: Frame) -> None:
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
            _notify_skip(ctx, frame.step, epoch, expected)
    progress.begin(frame.attempt, frame.step, epoch)


def _notify_skip(ctx: StepContext, step: int, epoch: float, expected: float) -> None:
    ctx.notify(
        "SEV1",
        f"the restart skipped {epoch - expected:.1f} epochs: step {step} is in {epoch:.2f}, and "
        f"{expected:.2f} was expected",
        verdict="the job trains on, and the data between is not trained on",
        then=SKIP_REMEDY,
        kind=WATCHER,
    )
