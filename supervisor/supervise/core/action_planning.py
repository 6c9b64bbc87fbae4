"""Context of actions before they start, feasibility of a runbook, and the savepoint it needs.

Pure questions about the state: nothing is decided, said or done.

A loss out of its band tells of weights or of batches. A rollback mends weights; for bad batches it
costs the steps since the savepoint, and they go on coming. So a runbook may begin with
`check_weights`; where that objects, its evidence is collected, nothing else is done, and the
trouble counts as one of the data. That is one decision per onset: from then on the model learns
what comes in, and weights are taken back only where something new speaks against them, each time
after twice as many steps. Where token statistics stepped at the onset and the loss falls by itself,
the data changed: nothing is taken back for it, and the probe takes another batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

from . import diagnosis, reasons, rule_scope, trends, withdrawal
from .frames import LOSS
from .incident import Incident, RunbookExecution, WithdrawnRunbook
from .model.action import PlanContext, Refused
from .model.checkpoint_registry import Checkpoint
from .model.decisions import (
    ACTING_MODES,
    JOB_ENDED,
    REBASELINED,
    IncidentClosed,
    PlannedStep,
)
from .model.payload import Outcome, Payload, RollbackArgs, WeightsArgs
from .model.policy import Policy, Runbook
from .model.verdicts import Verdict
from .rank_monitor import RankMonitor
from .run_state import Happened, State, StepContext
from .spike_classifier import GOOD_WEIGHTS, is_loss_normal_again, proves_harm
from .trends import DataLevel, InputChange, LossCourse, TaskAlternation


def plan_context(
    state: State, incident: Incident, before_step: int | None = None, operator: str = ""
) -> PlanContext:
    """Return what an action may know when its arguments are worked out; see `basic_context`."""
    attribution = state.context.attribution
    context = basic_context(state, incident, before_step, operator)
    sound = _began_with_good_weights(state, incident)
    withdrawn_runbook = incident.deferred.weights_check
    event = ""
    if withdrawn_runbook is not None and not new_evidence_against_weights(
        state, incident, withdrawn_runbook
    ):
        event = explain_learned_data(state, incident)
    suspects, shards = attribution.suspects(), attribution.shards
    return replace(context, sound=sound, data_event=event, suspects=suspects, shards=shards)


def _began_with_good_weights(state: State, incident: Incident) -> bool:
    """Return whether the loss of the first breach's step, which has the weights from before it, was
    in its band."""
    monitor, band = state.monitors.get(incident.case.rank), incident.case.band
    if monitor is None or band is None:
        return False
    step = incident.breach_step
    losses = [loss for loss_step, loss in monitor.history.series(LOSS) if loss_step == step]
    return bool(losses) and losses[0] <= band.limit_at(step)


def basic_context(
    state: State, incident: Incident, before_step: int | None = None, operator: str = ""
) -> PlanContext:
    """Return what an action may know but for shards and losses, which take long to weigh.

    Args:
        before_step: the step that counts as the first breach; None: that of the incident.
        operator: who asked for the action; "": the policy did.
    """
    rate = incident.case.rate
    if operator or incident.trigger.still:
        rate = None
    return PlanContext(
        incident=incident.id,
        step=state.step,
        breach_step=incident.breach_step if before_step is None else before_step,
        attempt=max(state.attempt, state.job.launched),  # also of a launch without a frame
        world_size=state.job.world_size,
        severity=incident.severity,
        unavailable=state.job.unavailable,
        good=state.checkpoints.good(),
        batches=incident.onset.batches,
        operator=operator,
        rate=None if rate is None else rate.used,
        rate_limit=None if rate is None else rate.limit,
        rate_cleared=rate is not None and rate.cleared,
    )


def explain_infeasible(
    state: State,
    incident: Incident,
    book: Runbook,
    before_step: int | None = None,
    operator: str = "",
) -> str:
    """Say why a step of the runbook cannot work here, "" when all can: asked before any is done."""
    return _refusal(plan_context(state, incident, before_step, operator), book)


def lacks_checkpoint(state: State, incident: Incident, book: Runbook) -> bool:
    """Return whether a runbook that cannot work here could if there were an old good checkpoint."""
    context = plan_context(state, incident)
    oldest = Checkpoint("", 0, 0, "", ok=True)
    return not _refusal(replace(context, good=(oldest, *context.good)), book)


def _refusal(context: PlanContext, book: Runbook) -> str:
    apart = context.unavailable.get("fence")
    for verb, step in zip(book.verbs, book.steps, strict=True):
        if not step.is_due(context):
            continue
        if apart and (step.changes_training or verb == "pause"):
            return f"{verb}: {apart}"
        try:
            step.plan(context)
        except Refused as refused:
            return f"{verb}: {refused}"
    return ""


def planned_steps(state: State, incident: Incident, book: Runbook) -> list[PlannedStep]:
    """Return every step that touches the job, with its arguments; all of them can be planned."""
    context = plan_context(state, incident)
    return [
        PlannedStep(verb, step.plan(context))
        for verb, step in zip(book.verbs, book.steps, strict=True)
        if step.touches_job and step.is_due(context)
    ]


def savepoint_retention_bound(policy: Policy, state: State) -> int:
    """Return the step before which the newest savepoint must stay, 0 when none has to.

    Of several rollbacks the one that goes back furthest counts: its savepoint serves all of them. A
    hold changes nothing, for a person may still go back.
    """
    incident = state.incident
    if incident is None or state.job.returncode is not None:
        return 0
    books = [policy.runbooks[name] for name in _reachable(policy, state, incident)]
    steps = [step for book in books if (step := _goes_before(state, incident, book))]
    run = incident.run
    if run is not None and (step := _goes_before(state, incident, run.runbook, run)):
        steps.append(step)
    return min(steps, default=0)


def steps_before_breach(policy: Policy, state: State, incident: Incident) -> int | None:
    """Return how many steps before the first breach its runbooks go back, None where none does."""
    books = [policy.runbooks[name] for name in _reachable(policy, state, incident)]
    steps = [step for book in books if (step := _goes_before(state, incident, book))]
    return incident.breach_step - min(steps) if steps else None


def _reachable(policy: Policy, state: State, incident: Incident) -> dict[str, None]:
    """Return the runbooks that the incident may come to, each once."""
    names = [
        rule.runbook
        for rule in policy.rules
        if rule.id in incident.rules
        and rule.runbook is not None
        and policy.mode_of(rule) in ACTING_MODES
    ]
    if state.approvals.pending is not None:
        names.append(state.approvals.pending.runbook)
    if incident.run is not None and not incident.run.requested.operator:
        names.append(incident.run.runbook.name)
    if any(name in policy.ladder.levels for name in names):
        names += policy.ladder.levels
    reachable: dict[str, None] = {}
    while names:
        name = names.pop()
        book = policy.runbooks.get(name)
        if book is not None and name not in reachable:
            reachable[name] = None
            names += (book.if_it_fails, book.if_refused)
    return reachable


OPERATOR_ROLLBACK = {"at_least": 0}  # keys of a rollback that a person orders


def _goes_before(
    state: State, incident: Incident, book: Runbook, run: RunbookExecution | None = None
) -> int:
    """Return the step that the rollback of a runbook goes before, 0 when it has none."""
    before_step, operator = (
        (None, "") if run is None else (run.requested.before_step, run.requested.operator)
    )
    context = basic_context(state, incident, before_step, operator)
    for verb, action in zip(book.verbs, book.steps, strict=True):
        if verb == "rollback":
            try:
                return action.plan(context).parse(RollbackArgs).before_step
            except Refused:
                return 0
    return 0


# ── evidence against weights that were good at the onset ──────────────────────────────────────────
# Once the probe batch has shown that the weights were good when the loss rose, another loss of that
# batch shows no more than that the model has learned since, also from data that it was meant to
# learn. Acting on the same onset needs something new. A loss that falls by itself is not; nor are
# token statistics that stepped together with it, which is a change of the data.

UNLIKE = 1.25  # times, in logs: more than noise makes of two alike. Project default
# Other data come in where the lowest of the newest losses is twice the usual, and the probe batch
# has lost half as much at most, in logs. In four of five small programs of two tasks that was 0 to
# 0.5 of it for 8 steps; behind damage that did not heal within 25 steps 0.5 to 2. Project defaults.
HELD, DOUBLED, FEWEST, NEWEST = 0.5, 2.0, 3, 4
SLIGHT = 0.1  # of the rise of the losses: two rows that are known by heart lose far, in logs
HELD_TOKENS = 0.25  # where statistics of tokens stayed: half of the least that damage did
HELD_AGAIN = 0.8  # where the new data are being learned, so that the old are forgotten
FAR_APART = 2.0  # times, in logs, of two rows of which nobody said that they were good


def input_change_since_onset(state: State, incident: Incident) -> InputChange | None:
    """Return how the inputs have changed since the incident's onset."""
    monitor = state.monitors.get(incident.case.rank)
    if monitor is None:
        return None
    return trends.detect_input_change(_token_series(monitor), incident.breach_step)


def _token_series(monitor: RankMonitor) -> dict[str, list[tuple[int, float]]]:
    names = (*trends.TOKENS, trends.SAMPLES)
    return {name: monitor.history.series(name) for name in names}


def learned_data_level(state: State, incident: Incident) -> DataLevel | None:
    """Return the stretch of data, learned, that an incident began with; None where it is none."""
    monitor = state.monitors.get(incident.case.rank)
    if monitor is None or incident.case.rolled_back:
        return None
    losses = monitor.history.series(LOSS)
    level = trends.fit_data_level(_token_series(monitor), losses, incident.breach_step)
    return level if level is not None and level.is_learned else None


def remember_data_level(state: State, incident: Incident) -> None:
    """Keep the data that an incident began with: when they return, they are no news."""
    level, levels = learned_data_level(state, incident), state.context.data_levels
    if level is not None and all(level.step != known.step for known in levels):
        levels.append(level)


def remember_data(state: State, incident: Incident) -> None:
    """Keep what an incident that ends was about, where it was other data or another task."""
    remember_data_level(state, incident)
    case, peak = incident.case, incident.case.other_peak
    if case.band is not None and peak is not None and not case.rolled_back:
        usual = case.band.forecast(incident.breach_step)
        state.context.task_turn = TaskAlternation(incident.breach_step, usual, peak)


def describe_task_recurrence(state: State, monitor: RankMonitor, onset: int) -> str:
    """Return what shows that two tasks took turns again at `onset`, "" for nothing."""
    turn = state.context.task_turn
    if turn is None or _has_tokens(monitor):
        return ""
    return turn.describe_recurrence(monitor.history.series(LOSS), onset)


def record_mute_by_returned_data(
    state: State, monitor: RankMonitor, muted_metrics: Collection[str]
) -> None:
    """Note that a rule about these metrics was muted, as data came back that the run has had."""
    if not rule_scope.OF_TOKENS.issuperset(muted_metrics):  # else it may go by this very note
        state.context.data_returned = state.frame_count
    incident = state.incident
    if incident is not None:  # its first frames will be forgotten
        remember_data_level(state, incident)
        # Of a task without tokens that is not known for sure: its losses go on to be judged.
        if incident.case.data_returned is None and _has_tokens(monitor):
            incident.case.data_returned = state.step


def describe_returned_data(state: State, monitor: RankMonitor, onset: int) -> str:
    """Return what shows that data which the run has had came back at `onset`, "" for nothing."""
    levels, incident = [*state.context.data_levels], state.incident
    if incident is not None and incident.breach_step < onset:
        level = learned_data_level(state, incident)
        levels += [] if level is None else [level]
    if not levels:
        return ""
    series, losses = _token_series(monitor), monitor.history.series(LOSS)
    texts = (level.describe_recurrence(series, losses, onset) for level in reversed(levels))
    return next(filter(None, texts), "")


def loss_course_since(state: State, incident: Incident, since: int) -> LossCourse | None:
    """Return where the losses have gone since a step."""
    monitor, band = state.monitors.get(incident.case.rank), incident.case.band
    if monitor is None or band is None:
        return None
    return trends.fit_loss_course(monitor.history.series(LOSS), band, incident.breach_step, since)


def explain_learned_data(state: State, incident: Incident) -> str:
    """Return what shows that the data changed and is being learned, "" where nothing does."""
    change = input_change_since_onset(state, incident)
    course = loss_course_since(state, incident, incident.breach_step)
    if change is None or change.degenerate or course is None or not course.fallen:
        return ""
    learned = reasons.DataLearned(
        step=incident.breach_step, change=change.text, first=course.first, newer=course.newer
    )
    return learned.text


def explain_other_data(
    state: State, incident: Incident, order: WeightsArgs, result: Payload
) -> str:
    """Return that other data come in than those of the probe batch, "" where nothing shows it.

    Damage does as much to both, and heals in both, if they are of the same data. Where token
    statistics show other data, nothing is asked; where they stayed, tokens may be in another order,
    and the loss of the probe batch must have stayed, too.
    """
    monitor, band = state.monitors.get(incident.case.rank), incident.case.band
    old, outcome = incident.deferred.weights_check, result.read(Outcome)
    has_tokens = monitor is not None and _has_tokens(monitor)
    is_shown = has_tokens and input_change_since_onset(state, incident) is not None
    if monitor is None or band is None or outcome.loss is None or is_shown:
        return ""
    if (reason := _held_data(state, incident, order, result)) is not None:
        return reason.text
    if has_tokens and not (old is not None and old.other_data):
        return ""
    probe, usual = outcome.loss, band.forecast(monitor.step)
    if old is None or not 0.0 < usual * probe < math.inf:
        return ""
    if probe <= order.within * old.loss and _jumped_since(monitor, band, old.step):
        again = reasons.JumpsAlone(step=old.step, probe_before=old.loss, probe=probe)
        return again.text
    course = loss_course_since(state, incident, incident.breach_step)
    if course is None or not _is_forgotten(state, incident, old, course, probe, usual):
        return ""
    before = old.loss if old.good else old.loss_before or old.loss
    other = reasons.OtherDataLearned(
        newer=course.newer, usual=usual, probe_before=before, probe=probe
    )
    return other.text


def _has_tokens(monitor: RankMonitor) -> bool:
    return any(name in monitor.history.names for name in trends.TOKENS)


def _held_data(
    state: State, incident: Incident, order: WeightsArgs, result: Payload
) -> reasons.OldDataHeld | None:
    """Return what shows that the weights are good for the data of before, and not for the new."""
    monitor, band = state.monitors.get(incident.case.rank), incident.case.band
    old, probe = incident.deferred.weights_check, result.read(Outcome).loss
    if monitor is None or band is None or probe is None:
        return None
    newest = [loss for _, loss in withdrawal.newest_losses(state, incident)[-NEWEST:]]
    was, usual = _probe_before(old, order, result), band.forecast(monitor.step)
    if len(newest) < FEWEST or incident.case.jump is not None or not 0.0 < probe < math.inf:
        return None
    newer = min(newest)
    if was <= 0.0 or usual <= 0.0 or not DOUBLED * usual < newer < math.inf:
        return None
    course, rise = loss_course_since(state, incident, incident.breach_step), None
    if old is not None:
        rise = loss_course_since(state, incident, old.step)
    if rise is not None and rise.change > 0.0:
        return None
    is_learned = old is not None and old.other_data and course is not None and course.fallen
    share = HELD_AGAIN if is_learned else HELD_TOKENS if _has_tokens(monitor) else HELD
    lost, excess = probe - was, newer - usual
    in_logs, most = math.log(probe / was), math.log(newer / usual)
    is_held = lost < share * excess and in_logs < share * most
    is_low = probe < SLIGHT * usual or (was < SLIGHT * usual and in_logs < most)
    is_slight = lost < SLIGHT * excess and is_low and not _has_tokens(monitor)
    if not is_held and not is_slight:
        return None
    return reasons.OldDataHeld(newer=newer, usual=usual, probe_before=was, probe=probe)


def _probe_before(old: WithdrawnRunbook | None, order: WeightsArgs, result: Payload) -> float:
    """Return the loss of the probe batch before the first breach, 0.0 where nobody knows."""
    before = result.read(Outcome).loss_before(order.before_step)
    return before or (0.0 if old is None else old.loss_before)


def _jumped_since(monitor: RankMonitor, band: trends.Band, since: int) -> bool:
    """Return whether a loss since a step was far above the one before it, beyond their noise."""
    losses = [loss for step, loss in monitor.history.series(LOSS) if step > since]
    if len(losses) < trends.LEAST:
        return False
    noise = trends.STEP_MADS * trends.robust_spread(losses, trends.median(losses))
    return max(b - a for a, b in pairwise(losses)) > max(band.limit - band.level, noise)


def _is_forgotten(
    state: State,
    incident: Incident,
    old: WithdrawnRunbook,
    course: LossCourse,
    probe: float,
    usual: float,
) -> bool:
    """Return whether the probe batch is forgotten while what comes in is learned."""
    if not 0.0 < old.loss < math.inf:
        return False
    lacking = math.log(course.newer / usual) if course.newer > 0.0 else 0.0
    if old.good or not old.loss_before:
        return course.fallen and math.log(probe / old.loss) > UNLIKE * lacking
    if incident.case.jump is not None:
        return False
    # It was asked while the trouble lasted: behind damage it only heals, with the losses.
    since = loss_course_since(state, incident, old.step)
    is_quiet = since is not None and since.change <= 0.0 and since.jump <= 0.0
    lost = math.log(probe / old.loss_before)
    is_apart = course.fallen and lost > FAR_APART * max(lacking, math.log(UNLIKE))
    return is_apart or (is_quiet and probe > UNLIKE * old.loss)


def new_evidence_against_weights(state: State, incident: Incident, old: WithdrawnRunbook) -> str:
    """Return what speaks against the weights since they were found good, "" for nothing."""
    evidence = _harm_since(state, incident, old)
    if evidence is not None:
        return evidence
    if old.data_event or explain_learned_data(state, incident):
        return ""
    course = loss_course_since(state, incident, old.step)
    return "" if course is None else reasons.LossStays(newer=course.newer, step=old.step).text


def _harm_since(state: State, incident: Incident, old: WithdrawnRunbook) -> str | None:
    """Return what went wrong since the weights were found good, None: the loss stays as it was."""
    change = input_change_since_onset(state, incident)
    if change is not None and change.degenerate:
        # The same batches would go on damaging what was taken back.
        ill = withdrawal.is_loss_out_of_band(state, incident)
        return change.text if ill and not change.lasting else ""
    course = loss_course_since(state, incident, old.step)
    monitor = state.monitors.get(incident.case.rank)
    if monitor is not None and describe_returned_data(state, monitor, _step_up(monitor, old.step)):
        return ""
    is_ill = withdrawal.is_loss_out_of_band(state, incident)
    # Where nobody can judge the weights, a jump has to last, as the first one had to.
    if course is not None and course.jump > 0.0 and (is_ill or old.loss < math.inf):
        return reasons.LossJumpedAgain(jump=course.jump, step=old.step).text
    if course is None or course.change < 0.0 or not is_ill:
        return ""
    if course.change > 0.0:
        return reasons.LossRisesAgain(older=course.older, newer=course.newer).text
    return None


VERB = "check_weights"
SOONER = 4  # times, where nobody can say
BATCH = "data"  # a kind of events, see `spike_classifier`


def _step_up(monitor: RankMonitor, since: int) -> int:
    """Return the step since another one at which the loss went up most, the newest for none."""
    losses = [point for point in monitor.history.series(LOSS) if point[0] > since]
    ups = [(b[1] - a[1], b[0]) for a, b in pairwise(losses)]
    return max(ups)[1] if ups else monitor.step


def begins_with_weights_check(
    policy: Policy, state: State, incident: Incident, run: RunbookExecution
) -> bool:
    """Return whether nothing is decided before it is asked."""
    return run.runbook.verbs[:1] == (VERB,) and needs_weights_check(policy, state, incident, run)


def needs_weights_check(
    policy: Policy, state: State, incident: Incident, run: RunbookExecution
) -> bool:
    """Return whether the size of a loss is why the runbook runs, or only what was skipped is not
    finite; nobody has ordered it, and the probe keeps a batch to ask.

    Running statistics that are not finite are none of it: the batch goes by its own.
    """
    if not policy.job.probe_batch or rule_scope.are_running_stats_broken(policy, state, incident):
        return False
    if run.requested.operator or run.terms.approved is not None:
        return False
    if incident.severity == "SEV0":
        return is_each_skipped(incident)
    rule_id = incident.trigger.asked_by
    return any(
        rule.id == rule_id and diagnosis.rule_judges_loss(policy, rule) for rule in policy.rules
    )


def is_each_skipped(incident: Incident) -> bool:
    """Return whether no update was applied whose loss, gradient or size was not finite."""
    excursion = incident.case.excursion
    return bool(excursion.skipped) and excursion.nonfinite is None


def passes_weights_check(incident: Incident, run: RunbookExecution, result: Payload) -> bool:
    """Return whether the probe batch says that the weights are good.

    In a long trouble no savepoint of before the onset is left: what was good then counts.
    """
    old, action, args = incident.deferred.weights_check, run.intent.action, run.intent.args
    order, outcome = args.parse(WeightsArgs), result.read(Outcome)
    if action is None or outcome.loss is None:
        return False
    if action.objection(args, result):
        return True
    if old is None or outcome.loss_before(order.before_step):
        return False
    was = max(old.loss, old.loss_before) if old.good else old.loss_before
    return outcome.loss <= order.within * was


def explain_good_weights(
    state: State, incident: Incident, run: RunbookExecution, result: Payload
) -> str:
    """Return why the weights are not taken back now, "" where they are."""
    old, action, args = incident.deferred.weights_check, run.intent.action, run.intent.args
    assert action is not None
    order, outcome = args.parse(WeightsArgs), result.read(Outcome)
    event, change = order.data_event, input_change_since_onset(state, incident)
    if not event and old is None and change is not None and not change.degenerate:
        event = reasons.DataChanged(step=incident.breach_step, change=change.text).text
    if reason := action.objection(args, result):
        return f"{reason}; {event}" if event else reason
    if incident.severity == "SEV0":  # nothing else speaks for weights that give no finite loss
        return ""
    if event:
        return event
    if old is not None and not new_evidence_against_weights(state, incident, old):
        return reasons.NothingNew(step=old.step).text
    loss = outcome.loss
    if old is not None and loss is not None and passes_weights_check(incident, run, result):
        undamaged = reasons.WeightsUndamaged(probe=loss, probe_before=old.loss, step=old.step)
        return undamaged.text
    if other := explain_other_data(state, incident, order, result):
        return other
    # Where nobody can say and the loop goes on, a rollback for batches that are over by then costs
    # steps and mends nothing: it waits once, for as long as it takes to see whether they are.
    # So it does where the loss jumps once more behind other data, as tasks take turns.
    is_turn = loss is not None and old is not None and _may_turn(state, incident, old)
    is_first = old is None and (loss is None or _heals_by_itself(state, incident, loss))
    return reasons.Lack.WEIGHTS_UNJUDGED if order.waits and (is_first or is_turn) else ""


def _may_turn(state: State, incident: Incident, old: WithdrawnRunbook) -> bool:
    """Return whether the loss jumped since other data were seen to come in."""
    monitor, band = state.monitors.get(incident.case.rank), incident.case.band
    if monitor is None or band is None or incident.case.jump is not None:
        return False
    return old.other_data and _jumped_since(monitor, band, old.step)


def _heals_by_itself(state: State, incident: Incident, probe: float) -> bool:
    """Return whether the loss falls with nobody's help, and one answer does not tell by what."""
    monitor, band = state.monitors.get(incident.case.rank), incident.case.band
    if monitor is None or band is None or not probe < math.inf or incident.case.jump is not None:
        return False
    since = [x for step, x in monitor.history.series(LOSS) if step >= incident.breach_step]
    if len(since) < 2 * FEWEST - 1 or _has_tokens(monitor):
        return False
    first, newest = trends.median(since[:FEWEST]), trends.median(since[-FEWEST:])
    excess = first - band.forecast(incident.breach_step)
    return first - newest > max(band.width(FEWEST), trends.FALLEN * excess)


def reduce_to_evidence(
    ctx: StepContext, incident: Incident, run: RunbookExecution, reason: str, result: Payload
) -> None:
    """Leave of the runbook its evidence, and note from when on it may be asked again.

    Args:
        result: of the question whether the weights are good.
    """
    state, old, level = ctx.state, incident.deferred.weights_check, incident.escalation.level
    order, measured = run.intent.args.parse(WeightsArgs), result.read(Outcome).loss
    waits, event = order.again, order.data_event
    is_known = measured is not None
    loss = math.inf if measured is None else measured
    is_open = reason == reasons.Lack.WEIGHTS_UNJUDGED
    if is_open:
        waits = max(1, waits // SOONER)
    if old is not None:
        waits, event = 2 * old.waits, event or old.data_event
    is_changed = bool(event) or input_change_since_onset(state, incident) is not None
    is_good = passes_weights_check(incident, run, result)
    incident.deferred.weights_check = WithdrawnRunbook(
        run.runbook.name,
        level,
        run.terms.escalated,
        state.step,
        state.frame_count + waits,
        waits,
        loss if old is None or (is_open and is_known) else min(loss, old.loss),
        (old is not None and old.good) or is_good,
        event,
        is_changed,
        _probe_before(old, order, result),
        bool(explain_other_data(state, incident, order, result)),
        is_good,
        state.attempt,
        None if old is None or not old.is_good_now else _level_when_tested(state, incident, old),
    )
    if incident.deferred.weights_check.other_data and incident.case.other_peak is None:
        incident.case.other_peak = incident.case.excursion.peak
    run.terms.reduced_reason = reason
    # People know by then that the data changed; that they are learned is no other reason.
    is_same = old is not None and (event == old.data_event or (is_changed and old.changed))
    run.terms.repeated = is_same
    if (is_known and not is_open) or event:
        kind = BATCH if is_changed else GOOD_WEIGHTS
        state.context.happened.append(Happened(incident.breach_step, state.attempt, kind, reason))


def withdrawn_runbook_due(state: State, incident: Incident) -> tuple[WithdrawnRunbook, str] | None:
    """Return what is to be started anew, and the reason."""
    old = incident.deferred.weights_check
    if old is None or state.frame_count < old.retry_frame or state.approvals.pending is not None:
        return None
    evidence = new_evidence_against_weights(state, incident, old)
    if not evidence and not old.data_event:
        evidence = explain_learned_data(state, incident)
    if evidence:
        return old, evidence
    old.retry_frame = state.frame_count + max(1, old.waits // SOONER)
    return None


def evidence_for_rollback(state: State, incident: Incident, result: Payload) -> str:
    """Return why weights are taken back after one withdrawal, "" where there was none."""
    old = incident.deferred.weights_check
    if old is None:
        return ""
    new = new_evidence_against_weights(state, incident, old)
    was_asked = old.loss < math.inf
    judged = reasons.Judged.OTHER_DATA if old.changed else reasons.Judged.UNDECIDED
    judged = judged if was_asked else reasons.Judged.UNJUDGED
    evidence = reasons.NewEvidence(
        evidence=new,
        step=old.step,
        judged=reasons.Judged.GOOD if old.good else judged,
        probe=result.read(Outcome).loss,
        probe_before=old.loss if was_asked else None,
    )
    return evidence.text


def is_affordable(policy: Policy, state: State, incident: Incident, book: Runbook) -> bool:
    """Return whether a runbook that holds the rate can run, and none of its budgets is spent."""
    kinds = [step.budget_class for step in book.steps if step.budget_class is not None]
    spent = (
        state.ledger.exhausted(policy.budgets, kind, state.frame_count, state.at_ns)
        for kind in kinds
    )
    refusal = explain_infeasible(state, incident, book)
    holds_rate = any(step.is_dispensable for step in book.steps)
    return holds_rate and not refusal and not any(spent)


def is_loss_all(policy: Policy, state: State, incident: Incident, verdict: Verdict | None) -> bool:
    """Return whether all that is wrong is how high a loss is: the weights were tested, and good.

    Args:
        verdict: of now, None where there is none yet.
    """
    check, excursion = incident.deferred.weights_check, incident.case.excursion
    if check is None or not check.is_good_now or check.attempt != state.attempt:
        return False
    if excursion.nonfinite is not None:
        return False
    if not _is_about_loss(policy, incident) or excursion.bad_losses:
        return False
    if (verdict is not None and proves_harm(verdict)) or _has_climbed(state, incident, check):
        return False
    return _is_unharmed_since(state, incident, check)


def _is_about_loss(policy: Policy, incident: Incident) -> bool:
    """Return whether no more was reported than what other data move, too."""
    rules = (rule for rule in policy.rules if rule.id in incident.rules and rule.severity != "SEV2")
    is_moved = all(rule_scope.is_moved_by_data(policy, rule) for rule in rules)
    return is_moved and incident.severity != "SEV0"


AROUND = 8  # losses on either side of a test that are the level of then; project default


def _has_climbed(state: State, incident: Incident, check: WithdrawnRunbook) -> bool:
    """Return whether the loss is higher than when the weights were tested, or nobody knows.

    Its newest course shows no slow climb. Within a few steps of the test none is known.
    """
    if state.step - check.step < NEWEST:
        return False
    level = _level_when_tested(state, incident, check)
    course = loss_course_since(state, incident, check.step)
    change = input_change_since_onset(state, incident)
    if course is None or (change is not None and change.degenerate):
        return True
    return level is None or course.newer - level > (UNLIKE - 1.0) * abs(level)


def _level_when_tested(state: State, incident: Incident, check: WithdrawnRunbook) -> float | None:
    """Return the loss around the first of the good tests in a row, None where nobody knows."""
    monitor = state.monitors.get(incident.case.rank)
    if check.loss_level is not None or monitor is None:
        return check.loss_level
    losses = monitor.history.series(LOSS)
    older = [x for step, x in losses if incident.breach_step <= step <= check.step][-AROUND:]
    newer = [x for step, x in losses if step > check.step][:AROUND]
    return trends.median(older + newer) if older and newer else None


def is_end_known(policy: Policy, state: State, incident: Incident, closed: IncidentClosed) -> bool:
    """Return whether an end says no more than that a loss is high, or was, and does no damage.

    A job that failed is news, and so is what anything but the loss and its norms tells, or what an
    action has left in the job.
    """
    is_well = closed.outcome == JOB_ENDED and closed.returncode == 0
    recovery, verdict = incident.recovery, closed.spike
    is_left = recovery.outstanding or bool(recovery.undos)
    if verdict is None or not (is_well or closed.outcome == REBASELINED):
        return False
    if is_left or incident.is_held or not _is_about_loss(policy, incident):
        return False
    return is_loss_normal_again(verdict) or is_loss_all(policy, state, incident, verdict)


def are_weights_sound(state: State, incident: Incident) -> bool:
    """Return whether the weights were tested and good, and nothing went wrong with them since.

    That the loss stays where it was then is no news: it was that high with these weights.
    """
    check = incident.deferred.weights_check
    return check is not None and check.good and _is_unharmed_since(state, incident, check)


def _is_unharmed_since(state: State, incident: Incident, check: WithdrawnRunbook) -> bool:
    if incident.case.rolled_back or incident.is_held:
        return False
    return not _harm_since(state, incident, check)
