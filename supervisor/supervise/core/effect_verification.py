"""Was the trouble cured? Judged by the frames that follow a runbook, never by its intention.

Three things must hold for `clear_for` steps in a row, within `within` steps: every action showed
its effect in the first frame that can show it, no rule of the incident that acts is in breach or
cannot be judged, and the loss is back in the band that its own trend had before the first breach.
How far off a rate or a clip may be is said beside its action (`actions/rate_and_clips.py`).
The first update behind a rollback is to be no larger than usual: masters of the weights that live
elsewhere would be written back by it. Where a rule of the incident reads the update norm, the
median of that over these steps must also be back where it was.

A runbook that went back has helped only when the run is beyond the step of the first breach: before
it nothing was asked of it. Quiet steps up to there do not count against `within`. The median of the
loss over `clear_for` steps must then be back in the band too, as the verdict of the incident asks.

A rule of SEV0 that comes back behind there ends it at once: the weights are damaged again, and each
further step is lost. It came back when it was not in breach meanwhile; else when it still is beyond
the first breach. It must have a sample of its own for that, and be one that the ladder answers.

What the job itself says counts too: one that does not go on from the checkpoint that it was given,
or not as the action that took it back promises, has not recovered, whatever its loss is. A first
loss after a relaunch that is far above the band says the same as the job's word.

A process that was started again collects samples anew: a rule that has too few of them to answer
does not stand against it, the band does, which is the incident's.

Its steps that the attempt before made too are compared: a difference is reported within a few, with
both numbers and what to do. It is never rolled back: no earlier state mends what the job does not
load. A start may also go on in a later epoch than the checkpoint is of: data that nobody trains on.
Trainer and Lightning report where in which epoch each step is; the first step of a launch should be
where the pace of the one before leads. Half an epoch beyond is a resume that gave up the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from msgspec import structs

from . import advice, reasons, run_notices, runbook_runner
from .attempt_overlap import CLOSE, STARTS, Overlap, Row, compared_columns, compared_row
from .diagnosis import UPDATE
from .frames import LOSS
from .incident import WAY_BACK_VERBS, Incident, RunbookExecution
from .model.action import EffectCheck
from .model.decisions import (
    ACTING_MODES,
    BREACH,
    UNKNOWN,
    StepDiffers,
    VerificationFailed,
    WeightsRestored,
)
from .model.events import Announced, Frame, Notice
from .model.interfaces import Advice, Lead, sentences
from .model.payload import Comparison, Continuity, Outcome, RollbackArgs
from .model.policy import Policy, Rule
from .notices import Cause
from .rank_monitor import RankMonitor
from .run_state import State, StepContext
from .spike_classifier import NORM_RATIO
from .trends import Band, median
from .withdrawal import SILENT_S

ONSET = 5  # steps before a breach that may be part of its trouble; project default


def on_rank_announced(state: State, monitor: RankMonitor, event: Announced) -> None:
    """Another process takes the place of one that ended: keep what the leader's steps were."""
    steps = state.repeated
    if not monitor.exited or monitor.program in (None, event.program):
        return
    if state.leader() == event.rank:
        positions = compared_columns(monitor.names)
        steps.before = {
            frame.step: compared_row(frame, positions) for frame in monitor.history.frames
        }
        steps.overlap = None


def compare_repeated_step(ctx: StepContext, monitor: RankMonitor, frame: Frame) -> None:
    """Take a frame of the leading rank; report what is not as it was."""
    steps, overlap = ctx.state.repeated, ctx.state.repeated.overlap
    starts = frame.step < STARTS and not frame.attempt
    if not (starts or steps.before or overlap):
        return
    now = compared_row(frame, compared_columns(monitor.names))
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


def explain_short_overlap(state: State) -> reasons.StepsUncompared | None:
    """Return that too few repeated steps were compared to believe in a recovery, None: enough."""
    overlap = state.repeated.overlap
    if overlap is None or overlap.compared >= overlap.wanted:
        return None
    return reasons.StepsUncompared(count=overlap.compared, total=overlap.wanted)


def relaunch_differences(state: State) -> str:
    """Return what the newest launch does otherwise than before, "" for nothing."""
    overlap = state.repeated.overlap
    differences = overlap.differences if overlap is not None else ()
    return "; ".join(difference.text for difference in differences if difference.MATTERS)


def _compare(ctx: StepContext, overlap: Overlap, step: int, now: Row) -> None:
    incident = ctx.state.incident
    crashed = incident is not None and incident.breach_step == incident.recovery.crashed
    numbers = incident is None or crashed or step < incident.breach_step - ONSET
    differences = overlap.compare_step(step, now, compare_numbers=numbers)
    for difference in differences:
        kind = "differs" if difference.MATTERS else "as-seeded"
        ctx.record(StepDiffers(reason=difference.text, what=kind, remedy=difference.REMEDY))
    if differences:
        texts = "; ".join(one.text for one in differences)
        matters = any(one.MATTERS for one in differences)
        remedies = sentences(*(one.REMEDY for one in differences))
        then = Advice(Lead.LATER, remedies)
        if matters and incident is not None:
            then = Advice(
                None, advice.advise_remedy_with_restart(ctx.policy, ctx.state, incident, remedies)
            )
        otherwise = run_notices.GoesOnOtherwise(
            severity="SEV2" if matters else "INFO",
            things=" and ".join(dict.fromkeys(one.THING for one in differences)),
            differences=texts,
            matters=matters,
            advice=then,
        )
        ctx.send(otherwise)


EPOCH = "epoch"
LEAST_STEPS = 16  # of a launch, before its pace is known; project default
SKIPPED = 0.5  # epochs; project default: a loader may repeat or drop a part of one


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
    skipped = run_notices.EpochsSkipped(
        severity="SEV1", step=step, epoch=epoch, expected=expected, skipped=epoch - expected
    )
    ctx.send(skipped)


STARTING_S = 3600.0  # for a job that is started again: it loads its data and weights, and compiles
# A loss that is to come back is back by then, on the way of a re-warm, too: project defaults.
SOON, CLEARLY = 40, 20  # frames behind a rollback, and the newest of them that are looked at
ALIKE = 1.5  # times the largest update of the onset, either way; project default
FIRST_UPDATE = 10.0  # times the median; of 23 015 healthy rows of 17 programs the largest is 6.0
OTHER_BATCH = 2.0  # times as far from the trend a first loss may be then; project default


def on_continuity(ctx: StepContext, event: Notice) -> None:
    """The job that was taken back tells that it goes on otherwise than before, or begins anew.

    People hear of it, of a rate alone with the steps that follow, and what a launch saves that
    begins anew is suspect. The runbook fails, at the next frame, if it started the job again and
    that did not take its checkpoint, or if one of its actions does not tolerate the difference. A
    launch whose first loss is above what the run had there did not take its checkpoint either,
    unless the policy lets that be.
    """
    refused, text = event.kind == "resume-refused", event.message
    continuity = event.data.read(Continuity)
    if not refused and continuity.ok is not False:
        return
    incident, run = ctx.state.incident, ctx.state.run()
    broken, anew = False, refused
    if incident is not None and run is not None:
        end = run.index + 1
        started = "relaunch" in run.runbook.verbs[:end]
        limit = (
            _first_loss_limit(incident.case.band, continuity) if started and not refused else None
        )
        continuity = structs.replace(continuity, limit=limit)
        steps = run.runbook.steps[:end]
        broken = started if refused else not all(step.tolerates(continuity) for step in steps)
        loss = continuity.loss.now if continuity.loss is not None else None
        if broken and limit is not None and loss is not None and loss > limit:
            anew = True
            text = reasons.CheckpointUnloaded(report=text, bound=limit).text
    if anew and ctx.state.job.launched:
        ctx.state.checkpoints.suspect_saves_since(ctx.state.job.launched)
    holds = not (refused or anew or broken)
    if not (holds and _is_of_rate(continuity)):
        reshuffled = holds and _is_reshuffled(continuity)
        severity = "SEV1" if anew else "INFO" if reshuffled else "SEV2"
        form = run_notices.StartNotResumed if anew else run_notices.AsReported
        ctx.send(form(severity=severity, text=text))
    if run is not None and broken:
        run.verification.rejected = text


def _is_of_rate(continuity: Continuity) -> bool:
    """Return whether only the rate is another one."""
    rate, loss = continuity.lr or Comparison(), continuity.loss or Comparison()
    was, now = loss.was, loss.now
    is_same = was is None or now is None or abs(now - was) <= CLOSE * abs(was)
    is_same = is_same and _verdict(continuity) != "differs"
    return is_same and rate.was != rate.now and continuity.fingerprint != "other"


def _is_reshuffled(continuity: Continuity) -> bool:
    """Return whether, but for the rate, only the batch is or may be another, and so the loss."""
    loss = (continuity.loss or Comparison()).now
    is_same = _verdict(continuity) != "differs" and continuity.fingerprint != "same"
    return is_same and (loss is None or isfinite(loss))


def _verdict(continuity: Continuity) -> str:
    return "" if continuity.probe_batch is None else continuity.probe_batch.verdict


def _first_loss_limit(band: Band | None, continuity: Continuity) -> float | None:
    """Return what the first loss after a relaunch is under if the weights are the checkpoint's.

    Only where nothing better tells: a probe batch with the loss that it had says that they are. One
    batch is little evidence when it is another one, so that may be twice as far from the trend. The
    steps just before a trouble may already have had a loss of their own, so `was` counts too.
    """
    loss = continuity.loss or Comparison()
    was, now = loss.was, loss.now
    if band is None or _verdict(continuity) == "equal" or now is None or not isfinite(now):
        return None
    trend = band.forecast(continuity.step)
    away = band.limit_at(continuity.step) - trend
    away *= 1.0 if continuity.fingerprint == "same" else OTHER_BATCH
    return away + (max(trend, was) if was is not None and isfinite(was) else trend)


def judge_frame(ctx: StepContext, incident: Incident, frame: Frame) -> None:
    """Judge the runbook's effect by the frames that follow it."""
    policy, state, run = ctx.policy, ctx.state, incident.run
    if run is None:
        return
    progress, monitor = run.verification, state.monitors[frame.rank]
    if progress.deadline_frame is None or run.failure.reason is not None:
        return
    rejected = reasons.Reported(report=progress.rejected) if progress.rejected else None
    broken = rejected or _missing_effect(ctx, incident, frame)
    broken = broken or _relapse_after_rollback(policy, state.monitors, incident, run)
    broken = broken or _still_ill(monitor, incident, run)
    if broken is not None:
        ctx.record(VerificationFailed(reason=str(broken)))
        incident.run = None
        runbook_runner.escalate_incident(ctx, incident, broken, run.runbook.if_it_fails)
        return
    progress.frame_ns = frame.at_ns
    trouble = _find_trouble(policy, state, incident, frame)
    if progress.effects:
        trouble = reasons.Lack.NO_EFFECT_SHOWN
    if trouble is not None:
        progress.clear_steps, progress.last_trouble = 0, trouble
    else:
        progress.clear_steps += 1
    if trouble is None and frame.step <= incident.recovery.must_pass:
        progress.deadline_frame += 1  # nothing has been asked of it yet
    needed = run.runbook.verification.clear_for
    if progress.clear_steps >= needed and (
        lacking := explain_short_overlap(state)
        or _still_missing(policy, state.monitors, incident, frame, needed)
    ):
        progress.clear_steps, progress.last_trouble = needed - 1, lacking
    if progress.clear_steps >= needed:
        helped = reasons.Helped(
            steps=needed,
            runbook=run.runbook.name,
            loss=monitor.value(LOSS),
            loss_before=incident.case.loss_before,
            differs=relaunch_differences(state),
        )
        runbook_runner.on_verified(ctx, incident, helped)
    elif state.frame_count > progress.deadline_frame:
        trouble = progress.last_trouble or reasons.Lack.NOT_CLEAR
        form = reasons.HelpUnknown if progress.effects else reasons.DidNotHelp
        reason = form(runbook=run.runbook.name, trouble=trouble)
        ctx.record(VerificationFailed(reason=reason.text, clear_steps=progress.clear_steps))
        incident.run = None
        runbook_runner.escalate_incident(ctx, incident, reason, run.runbook.if_it_fails)


def check_silence(ctx: StepContext, incident: Incident, *, waits: bool) -> None:
    """Nothing can be verified without frames: a job that fell silent has not recovered.

    Args:
        waits: it is known why: a signal stops the job, or it restores its state. That is no time.
    """
    state, run = ctx.state, incident.run
    if run is None or run.verification.deadline_frame is None or run.failure.reason is not None:
        return
    if waits:
        run.verification.frame_ns = state.at_ns
    silent_s = (state.at_ns - run.verification.frame_ns) / 1e9
    starting = state.attempt < state.job.launched
    if silent_s > (STARTING_S if starting else SILENT_S):
        reason = reasons.NoFrames(runbook=run.runbook.name, seconds=silent_s)
        ctx.record(VerificationFailed(reason=reason.text))
        incident.run = None
        runbook_runner.escalate_incident(ctx, incident, reason, run.runbook.if_it_fails)


def _missing_effect(ctx: StepContext, incident: Incident, frame: Frame) -> Cause | None:
    """Check every action's effect on the first frame that can show it."""
    monitor, run = ctx.state.monitors[frame.rank], incident.run
    assert run is not None
    values = dict(zip(monitor.names, monitor.latest, strict=False))
    waiting = []
    for effect in run.verification.effects:
        outcome = effect.result.read(Outcome)
        if outcome.attempt is not None:  # its first frame is the first of the new attempt
            early = frame.attempt < outcome.attempt
        else:
            ack_step = -1 if outcome.ack_step is None else outcome.ack_step
            early = frame.attempt <= effect.seen_attempt and frame.step <= ack_step
        if early:
            waiting.append(effect)
            continue
        check = EffectCheck(effect.args, effect.result, values, frame.step, frame.attempt)
        missing, verb = (
            run.runbook.steps[effect.step_index].explain_missing_effect(check),
            effect.verb,
        )
        if missing is not None:
            return reasons.NoEffect(verb=verb, missing=missing)
        moved, usual = values.get(UPDATE), incident.case.norms.get(UPDATE)
        zeroed = verb == "rollback" and effect.args.read(RollbackArgs).moments
        if verb == "rollback" and usual and moved and not zeroed:
            if moved > FIRST_UPDATE * usual:
                largest = incident.case.excursion.largest_update
                if largest is not None and largest / ALIKE <= moved <= ALIKE * largest:
                    return reasons.OnsetAgain(ratio=moved / usual, step=incident.breach_step)
                return reasons.RollbackUndone(ratio=moved / usual)
            text = f"the first update is {moved / usual:.3g} times the usual one"
            ctx.record(WeightsRestored(reason=f"restored weights: {text}"))
    run.verification.effects = waiting
    return None


def _relapse_after_rollback(
    policy: Policy, monitors: Mapping[int, RankMonitor], incident: Incident, run: RunbookExecution
) -> reasons.DidNotHelp | None:
    """Return that what damages the weights came back after the run went back, None: it did not."""
    if not _went_back(run):
        return None
    levels, clear = (*policy.ladder.levels, run.runbook.name), run.verification.seen_clear
    for r, rule in enumerate(policy.rules):
        if rule.id not in incident.rules or rule.severity != "SEV0" or rule.runbook not in levels:
            continue
        for rank, monitor in monitors.items():
            watch = monitor.rules[r]
            if (
                monitor.attempt < incident.recovery.rolled_back_to
                or policy.mode_of(rule) not in ACTING_MODES
            ):
                continue  # frames of before, or it acts on nothing
            if watch.code != BREACH:
                clear.add((rule.id, rank))
            elif watch.held >= rule.for_steps and _is_measured(policy, monitor, rule):
                is_back = (rule.id, rank) in clear
                if is_back or monitor.step > incident.recovery.must_pass:
                    breach = reasons.Breach.AGAIN if is_back else reasons.Breach.STILL
                    trouble = reasons.RuleInBreach(
                        rule=rule.id, breach=breach, step=monitor.step, rank=rank
                    )
                    return reasons.DidNotHelp(runbook=run.runbook.name, trouble=trouble)
    return None


def _still_ill(
    monitor: RankMonitor, incident: Incident, run: RunbookExecution
) -> reasons.DidNotHelp | None:
    """Return that going back has not helped, None where it may have: a loss that is out of its band
    for so long stays so."""
    band = incident.case.band
    if band is None or not _went_back(run) or monitor.attempt < incident.recovery.rolled_back_to:
        return None
    since = [f.step for f in monitor.history.frames if f.attempt == monitor.attempt]
    first_step = max(since[0], incident.recovery.must_pass + 1)
    newest = [point for point in monitor.history.series(LOSS) if point[0] >= first_step]
    if len(newest) < SOON:
        return None
    losses = newest[-CLEARLY:]
    if median([loss - band.limit_at(step) for step, loss in losses]) <= 0.0:
        return None
    trouble = reasons.LossOutOfRange(
        steps=len(newest),
        loss=median([loss for _, loss in losses]),
        bound=band.limit_at(losses[-1][0]),
    )
    return reasons.DidNotHelp(runbook=run.runbook.name, trouble=trouble)


def _is_measured(policy: Policy, monitor: RankMonitor, rule: Rule) -> bool:
    """Return whether the newest frame holds what a rule is in breach by: some come rarely."""
    behind = [n for n in policy.detectors_of(rule) if monitor.codes[monitor.index[n]] == BREACH]
    metrics = (metric for name in behind for metric in policy.detectors[name].metrics)
    return any(monitor.value(metric) is not None for metric in metrics)


def _went_back(run: RunbookExecution) -> bool:
    return any(run.runbook.verbs[index] in WAY_BACK_VERBS for index in run.committed)


def _find_trouble(policy: Policy, state: State, incident: Incident, frame: Frame) -> Cause | None:
    """Return what in a frame stands against a recovery, None for nothing."""
    for r, rule in enumerate(policy.rules):
        if rule.id not in incident.rules or rule.severity == "SEV2":
            continue  # an advisory rule must not decide whether a runbook helped
        if state.silence(rule.id) is not None:
            continue
        for rank, monitor in state.monitors.items():
            code = monitor.rules[r].code
            unjudged = code == UNKNOWN and rule.unknown == "hold" and monitor.lacks_metrics(r)
            if code == BREACH or unjudged:
                breach = reasons.Breach.NOW if code == BREACH else reasons.Breach.UNJUDGED
                return reasons.RuleInBreach(rule=rule.id, breach=breach, step=frame.step, rank=rank)
    loss, band = state.monitors[frame.rank].value(LOSS), incident.case.band
    if loss is None or band is None:
        return None
    limit = band.limit_at(frame.step)
    is_high = not loss <= limit  # NaN is
    return reasons.LossAbove(loss=loss, step=frame.step, bound=limit) if is_high else None


def _still_missing(
    policy: Policy,
    monitors: Mapping[int, RankMonitor],
    incident: Incident,
    frame: Frame,
    frames: int,
) -> Cause | None:
    """Return what a run that has been quiet for so many frames still lacks, None for nothing."""
    if frame.step <= incident.recovery.must_pass:
        return reasons.OnsetAhead(step=incident.recovery.must_pass)
    moved = _update_missing(policy, monitors[frame.rank], incident, frames)
    # The rank that it began on, too: its data may be the cause, which the others do not see.
    ranks = {frame.rank, incident.case.rank} & monitors.keys()
    levels = (_level_missing(monitors[rank], incident, frames) for rank in sorted(ranks))
    return moved or next(filter(None, levels), None)


def _level_missing(
    monitor: RankMonitor, incident: Incident, frames: int
) -> reasons.LossOffTrend | None:
    """Return that a run that went back does not have the loss of its band, None when it does.

    A single loss may be far from the trend; that many in a row may not.
    """
    run, band = incident.run, incident.case.band
    if run is None or band is None or not _went_back(run):
        return None
    newest = monitor.history.series(LOSS)[-frames:]
    if not newest:
        return None
    residual, width = median([x - band.forecast(step) for step, x in newest]), band.width(frames)
    if residual <= width:
        return None
    return reasons.LossOffTrend(count=len(newest), residual=residual, width=width)


def _update_missing(
    policy: Policy, monitor: RankMonitor, incident: Incident, frames: int
) -> reasons.UpdateLarge | None:
    """Return that the update norm is not back where it was, None when it is or is no part of this.

    A rate that is held as the cause is another one than the rates of before, and bounds it.
    """
    usual = None if incident.recovery.rate_limits else incident.case.norms.get(UPDATE)
    rules = (rule for rule in policy.rules if rule.id in incident.rules)
    behind = (policy.detectors[name] for rule in rules for name in policy.detectors_of(rule))
    if not usual or not any(UPDATE in detector.metrics for detector in behind):
        return None
    newest = [value for _, value in monitor.history.series(UPDATE)][-frames:]
    if not newest or median(newest) <= NORM_RATIO * usual:
        return None
    return reasons.UpdateLarge(metric=UPDATE, ratio=median(newest) / usual)
