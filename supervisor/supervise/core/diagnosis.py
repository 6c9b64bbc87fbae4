"""Collects what the spike classifier asks for, while an incident is open.

What was before the onset is taken down when the incident opens: the frames of then may be gone when
it closes, and a rollback takes back those of the trouble itself. The rest is read from the frames
kept by the incident's rank. Nothing here runs without an open incident.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import structs

from . import rule_scope, run_phase, spike_classifier
from .frames import LOSS, THROUGHPUT
from .incident import Incident, LossCase
from .model import formats
from .model.decisions import BREACH, OK, Suppressor
from .model.policy import EARLY, Planned, Policy, Rule
from .model.verdicts import NO, ContextEvent, MechanismSigns, SlowStep, Verdict
from .notices import RateGrew
from .rank_monitor import RankMonitor, first_breach
from .run_state import LossContext, State
from .spike_classifier import CLIPPED, DEADLINE, NORM_RATIO, OWN_RATE, Evidence
from .trends import (
    BRIEF_S,
    EXCLUDED,
    LEAST,
    PRE,
    Band,
    find_change,
    find_jump,
    find_slow_step,
    fit_loss_band,
    healthy_value,
    is_cpu_contention,
    loss_rise_step,
    median,
    robust_spread,
)

LATER = 64  # steps from which on a new onset has another level before it; project default
RATE, SCHEDULED, SKIPPED = "learning_rate", "learning_rate_scheduled", "update_skipped"
BATCH = ("batch_token_entropy", "batch_unique_ratio", "batch_top1_share", "loss_dispersion")
COUNTS = ("tokens_per_update",)  # the denominator of a loss
BEFORE, AFTER, NEAR = 50, 5, 5  # steps around the onset that question 4 looks at
OUTLIER, OUTLIER_SHARE = 8.0, 0.01  # scales, and least share, of a batch that is unlike the others
TURNS = "optimizers that take turns"
RATE_SEARCH = "a search for the highest learning rate"
OWN_JUMP = 2.0  # times its last value a job's own rate explains what follows; project default
GRAD, UPDATE = "grad_global_norm", "update_norm"
# What faults of their own move: of a kernel, of a router, of the rate.
MECHANISMS = {
    "attention": frozenset(
        (
            *("key_gradient_sum", "max_attn_logit", "attn_logit_heads_over_100", "attn_entropy"),
            *("dw_spectral_entropy", "dw_spectral_entropy_band", "qk_d2_spectral_entropy_band"),
            "qk_d3_spectral_entropy_band",
        )
    ),
    "routers": frozenset(
        (
            *("router_token_entropy", "router_weight_similarity", "router_conditioning"),
            *("router_token_entropy_min", "router_token_entropy_max", "router_similarity_max"),
            *("router_conditioning_min", "router_conditioning_max"),
            *("moe_util_entropy", "moe_load_balance_loss", "moe_drop_rate"),
        )
    ),
    "step size": frozenset(("qk_d3_ratio", "learning_rate", UPDATE, "update_to_weight")),
}
# Those that move first, or alone.
EARLIEST = frozenset(
    (
        *("key_gradient_sum", "dw_spectral_entropy", "dw_spectral_entropy_band", "qk_d3_ratio"),
        *("qk_d2_spectral_entropy_band", "qk_d3_spectral_entropy_band", "router_token_entropy"),
        *("router_weight_similarity", "router_conditioning"),
        *("router_token_entropy_min", "router_token_entropy_max", "router_similarity_max"),
        *("router_conditioning_min", "router_conditioning_max"),
    )
)
# Where its layers are, and which of them is the worst; of others those of its own name, the least.
WORST: Mapping[str, tuple[str, Callable[..., int]]] = {
    "max_attn_logit": ("max_attn_logit", max),
    "attn_logit_heads_over_100": ("max_attn_logit", max),
    "router_token_entropy_min": ("router_token_entropy", min),
    "router_token_entropy_max": ("router_token_entropy", max),
    "router_similarity_max": ("router_similarity_max", max),
    "router_conditioning_min": ("router_conditioning_max", min),
    "router_conditioning_max": ("router_conditioning_max", max),
    "qk_d3_ratio": ("qk_d3_ratio", max),
}
NORMS = 32  # frames whose median a norm had just before: they grow and fall with the training
ARTEFACT = "eval_artifact_hash"
LOSSES = (LOSS, "train_loss_ema")
FAR_GROWTH = 2.5  # times: at a jump of the rate by as much it is held
GROWN_BEFORE = 32  # steps before a breach: a loss turns soon at a rate. Project default
JUDGED = (LOSS, GRAD, UPDATE, SKIPPED)
RECUR_COUNT, RECUR_FRAMES, RECUR_GAPS = 3, 2000, 4  # these make a spike that recovers structural
# Onset, project defaults. Two frames: one hard batch, which every run shows, is no series.
SERIES_MADS, SERIES_NATS, SERIES_FRAMES = 8.0, 0.1, 2


def start_loss_case(
    policy: Policy, state: State, monitor: RankMonitor, rank: int, incident: Incident
) -> None:
    """Take down what was before the first breach, and what is known of the frames since."""
    if LOSS not in monitor.history.names:
        rank = state.leader() or rank
        monitor = state.monitors.get(rank, monitor)
    onset, history, case = incident.breach_step, monitor.history, incident.case
    case.rank, case.attempt, case.first_step = rank, monitor.attempt, onset
    case.since_frame, case.last_step, case.verdict = state.frame_count, monitor.step, None
    # Of an onset that it had before.
    case.excursion.outliers, case.excursion.peak, case.excursion.bad_losses = 0, None, 0
    case.other_peak = None
    case.opened_at_frame = (
        case.opened_at_frame or state.frame_count
    )  # it may be opened anew, when raised
    losses, band = history.series(LOSS), case.band
    is_raised = band is not None and _is_raised(band, losses, onset)
    if not is_raised:  # else it would be the level of the trouble itself
        calm = loss_rise_step(losses, onset) if monitor.is_objective else onset
        case.band = fit_loss_band(losses, calm)
        if case.loss_before is None or onset - incident.opened_step > LATER:
            case.loss_before = _value_before(losses, calm)
    if case.jump is None:
        case.jump = run_phase.find_rate_jump(history.series(RATE), onset, state.phase.settled)
    case.norms = {
        metric: median(values[-NORMS:])
        for metric in (GRAD, UPDATE, CLIPPED)
        if len(values := values_before(monitor, metric, onset)) >= LEAST
    }
    case.rate = run_phase.find_rate_cause(
        history.series(RATE),
        history.series(UPDATE),
        onset,
        state.phase.settled,
        warms_up=state.phase.name == EARLY,
    )
    case.excursion.largest_update = dict(history.series(UPDATE)).get(onset - 1)
    for frame in history.frames:
        if frame.step >= onset:
            _observe(case, monitor, frame.values, frame.step)
    case.context = context_events(policy, state, monitor, incident)


def _is_raised(band: Band, losses: Sequence[tuple[int, float]], onset: int) -> bool:
    """Return whether the newest losses before `onset` are out of the band of an earlier onset."""
    between = [(step, loss) for step, loss in losses if band.onset <= step < onset][-LEAST:]
    return bool(between) and median([loss - band.limit_at(step) for step, loss in between]) > 0.0


def _value_before(losses: Sequence[tuple[int, float]], onset: int) -> float | None:
    """Return the healthy loss just before an onset, None with too few of them."""
    points = [point for point in losses if point[0] < onset]
    change = find_change(losses, onset)
    if change is not None and change.is_up:
        return change.before
    return healthy_value(points, 0.0) if len(points) >= LEAST else None


def _update_loss_before(monitor: RankMonitor, incident: Incident) -> None:
    """By now with what came after the onset, which shows where the loss left its course."""
    onset, case = incident.breach_step, incident.case
    losses = [p for p in monitor.history.series(LOSS) if p[0] < monitor.step]
    if onset <= incident.opened_step and case.loss_before is not None and losses:
        change = find_change(losses, onset) if losses[0][0] < onset else None
        if change is not None and change.is_up:
            case.loss_before = change.before


def update_diagnosis(policy: Policy, state: State, incident: Incident) -> Verdict | None:
    """Look at the newest frame; return a verdict once, when it is time for one."""
    case = incident.case
    monitor = state.monitors.get(case.rank)
    if monitor is None or LOSS not in monitor.history.names:
        return None
    if monitor.attempt != case.attempt:  # it went back: the question is asked anew
        _update_loss_before(monitor, incident)
        case.attempt, case.first_step = monitor.attempt, monitor.step
        case.since_frame, case.rolled_back, case.verdict = state.frame_count, True, None
        case.excursion.came_back = False
    if monitor.step != case.last_step:
        case.last_step = monitor.step
        _observe(case, monitor, monitor.latest, monitor.step)
        if not case.rolled_back and monitor.step == incident.breach_step + AFTER:  # else forgotten
            case.context = context_events(policy, state, monitor, incident)
            _update_loss_before(monitor, incident)
    if case.verdict is not None or state.frame_count - case.since_frame < DEADLINE:
        return None
    case.verdict = classify_incident(policy, state, incident)
    return case.verdict


def awaits_recovery(policy: Policy, state: State, incident: Incident) -> bool:
    """Return whether an incident that is quiet is not over: its loss is not back, and still may be.

    Asked every tenth frame only; one that waits is not urgent.
    """
    frame_count, quiet_since = state.frame_count, incident.ending.quiet_since
    if (
        not incident_judges_loss(policy, incident)
        or frame_count - incident.case.since_frame >= DEADLINE
    ):
        return False
    if quiet_since is not None and (frame_count - quiet_since) % 10:
        return True
    evidence = _evidence(policy, state, incident)
    if evidence is None:
        return False
    is_before_onset = incident.case.rolled_back and len(evidence.after) < spike_classifier.WAIT
    return is_before_onset or spike_classifier.answer_rejoined(evidence).answer == NO


def classify_incident(policy: Policy, state: State, incident: Incident) -> Verdict | None:
    """Answer the four questions; None where the job publishes no loss."""
    evidence = _evidence(policy, state, incident)
    return None if evidence is None else spike_classifier.classify_spike(evidence)


def is_loss_back(policy: Policy, state: State, incident: Incident) -> bool:
    """Return whether the loss of an incident came back into its band."""
    verdict = classify_incident(policy, state, incident)
    return verdict is not None and spike_classifier.is_loss_rejoined(verdict)


def rules_freezing_baselines(state: State) -> Sequence[str]:
    """Return the rules of the open incident whose detectors must not get used to what they flag.

    They do once a person says that it may stay, by a word or by denying the remedy, or where it is
    on record that the weights are good or the data others. An advisory one is told once: open for
    as long as the run it would take in all that comes after it.
    """
    incident = state.incident
    if incident is None or incident.severity == "SEV2":
        return ()
    withdrawn, pending = incident.deferred.weights_check, state.approvals.pending
    is_wanted = bool(incident.acknowledged_by or incident.denied_by)
    is_good = withdrawn is not None and (withdrawn.good or bool(withdrawn.data_event))
    is_good |= pending is not None and pending.unneeded
    return () if is_wanted or is_good else incident.rules


def nonfinite_since(monitor: RankMonitor) -> int | None:
    """Return the first of the newest steps whose losses are all NaN or Inf, None for none.

    A single one whose update was skipped did the weights no harm.
    """
    names, steps, skipped = monitor.history.names, list[int](), False
    for frame in reversed(monitor.history.frames):
        values = dict(zip(names, frame.values, strict=False))
        loss = values.get(LOSS)
        if loss is not None and loss - loss == 0.0:
            break
        if loss is not None:
            skipped = values.get(SKIPPED) == 1.0
            steps.append(frame.step)
    return None if not steps or (len(steps) == 1 and skipped) else steps[-1]


def is_newest_nonfinite(monitor: RankMonitor) -> bool:
    """Return whether the newest loss, gradient or update is NaN or Inf, and was not skipped."""
    values = {metric: monitor.value(metric) for metric in (LOSS, GRAD, UPDATE)}
    wrong = [metric for metric, v in values.items() if v is not None and v - v != 0.0]
    return bool(wrong) and (UPDATE in wrong or monitor.value(SKIPPED) != 1.0)


def verdict_summary(verdict: Verdict | None) -> str:
    """Return a verdict for a message, one clause without numbers; the audit record has those."""
    return "" if verdict is None else spike_classifier.verdict_clause(verdict)


def highest_rate(state: State, monitor: RankMonitor | None) -> float | None:
    """Return the highest learning rate of the run, None where its newest frames show it."""
    rates = [] if monitor is None else monitor.history.series(RATE)[-PRE:]
    highest = state.phase.settled
    return highest if rates and highest > max(rate for _, rate in rates) else None


def remember_onset(context: LossContext, case: LossCase) -> None:
    """Count an excursion of the loss, so that a series of them is seen."""
    if _is_series_excursion(case):
        context.onsets.append(case.opened_at_frame)


def _is_series_excursion(case: LossCase) -> bool:
    """Return whether the loss went so far, for so long, that more of the same are a series."""
    return case.excursion.outliers >= SERIES_FRAMES


def incident_judges_loss(policy: Policy, incident: Incident) -> bool:
    """Return whether a rule of the incident judges how large the loss is."""
    return any(rule_judges_loss(policy, rule) for rule in policy.rules if rule.id in incident.rules)


def rule_judges_loss(policy: Policy, rule: Rule) -> bool:
    """Return whether a rule judges how large the loss is.

    A detector of one metric does; one of several (`nonfinite`) asks whether they are numbers.
    """
    behind = (policy.detectors[name] for name in policy.detectors_of(rule))
    return any(d.reads != "metrics" and not set(d.metrics).isdisjoint(LOSSES) for d in behind)


def slow_step_of_rule(
    policy: Policy, monitor: RankMonitor, rule: Rule, breach: int
) -> SlowStep | None:
    """Return since when steps take longer, and what in them, for a rule about speed; else None."""
    if rule_scope.rule_family(policy, rule) != rule_scope.SPEED:
        return None
    slow = find_slow_step(monitor.history.series, breach)
    readings = monitor.numbers(rule).values()
    where = next((r["where"] for r in readings if r.get("code") == "BREACH" and "where" in r), "")
    # What rank 0 spends in its backward pass is the wait for that rank.
    return slow and structs.replace(slow, where=str(where))


def explain_passing_slowness(
    policy: Policy, state: State, monitor: RankMonitor, rule: Rule
) -> Suppressor | None:
    """Return why slow steps are no news: they are over within seconds, or of other processes."""
    if rule.severity != "SEV2" or rule.runbook:
        return None
    about = rule_scope.rule_metrics(policy, rule)
    if not about or not about <= THROUGHPUT:
        return None
    watch = monitor.rules[policy.rules.index(rule)]
    breach = first_breach(monitor.numbers(rule), monitor.step)
    slow_ns = (frame.at_ns for frame in monitor.history.frames if frame.step >= breach)
    began_ns = min([watch.fired_ns, *slow_ns])
    if watch.code != BREACH or state.at_ns - began_ns < BRIEF_S * 1e9:
        return Suppressor("brief", f"the {BRIEF_S:g} s that slow steps must last")
    slow = find_slow_step(monitor.history.series, breach)
    wait = max(m.value("host_cpu_wait") or 0.0 for m in state.monitors.values())
    if is_cpu_contention(slow, wait):
        return Suppressor("host", "the load of other processes")
    return None


def explain_by_rate(policy: Policy, monitor: RankMonitor, rule: Rule) -> RateGrew | None:
    """Return how the learning rate may explain large updates, or a loss, None where it does not.

    A loss rises for other reasons, too: there the rate must have grown far, until a few steps
    before at least, and in no warm-up of a known length. Where the rule has a rate that breached,
    that is named already.
    """
    is_update = rule_scope.rule_metrics(policy, rule) == {UPDATE}
    if not is_update and not rule_judges_loss(policy, rule):
        return None
    rates = monitor.history.series(RATE)
    if is_update:
        return run_phase.find_rate_growth(rates, monitor.step)
    numbers = monitor.numbers(rule)
    breached = (name for name, reading in numbers.items() if reading.get("code") == "BREACH")
    if any(RATE in policy.detectors[name].metrics for name in breached):  # it is named already
        return None
    rises = [n for n, ((_, before), (_, rate)) in enumerate(pairwise(rates)) if rate > before]
    begin = rises[-1] if rises else len(rates)
    for n in reversed(rises):  # a plateau ends what grew before it
        if rates[begin][0] - rates[n][0] > GROWN_BEFORE:
            break
        begin = n
    growth = run_phase.find_rate_growth(rates[begin:], monitor.step)
    if growth is None or growth.times < FAR_GROWTH:
        return None
    newest_rise = rates[rises[-1] + 1][0]
    is_near = newest_rise >= first_breach(numbers, monitor.step) - GROWN_BEFORE
    phase = dict(monitor.history.series(run_phase.LR_PHASE)).get(newest_rise, 0.0)
    is_planned = 0.0 < phase < run_phase.STABLE
    return growth if is_near and not is_planned else None


def compare_mechanisms(policy: Policy, monitor: RankMonitor, rule: Rule) -> MechanismSigns | None:
    """Return which of attention, routers and step size moved, None where no two are judged.

    Of a rule about one of them, and of one about the loss: there only what moves before a loss
    counts, since a loss that jumps moves the updates too.
    """
    about = rule_scope.rule_metrics(policy, rule)
    own = next((name for name, ids in MECHANISMS.items() if about and about <= ids), None)
    if own is not None and about.isdisjoint(EARLIEST):
        return None
    if own is None and not rule_judges_loss(policy, rule):
        return None
    moved: dict[str, tuple[int, str]] = {}
    judged, breached = set(), set()
    for (_, detector), watch, code in zip(
        monitor.detectors, monitor.watches, monitor.codes, strict=True
    ):
        metrics = frozenset(detector.metrics)
        name = next((name for name, ids in MECHANISMS.items() if metrics and metrics <= ids), None)
        if name is None or code not in (OK, BREACH):
            continue
        judged.add(name)
        if code == BREACH:
            breached.add(name)
        if code == BREACH and (own is not None or metrics <= EARLIEST):
            metric = detector.metrics[0]
            reading = {**watch.numbers(), "code": "BREACH"}
            step = first_breach({"": reading}, formats.reading_integer(reading, "step", 0))
            change = find_change(monitor.history.series(metric), step)
            step = step if change is None else min(step, change.step)
            moved[name] = min(moved.get(name, (step, metric)), (step, metric))
    if not moved or len(judged) < 2:
        return None
    order = sorted(moved, key=lambda name: (moved[name][0], name != own))
    step, metric = moved[order[0]]
    stayed = tuple(name for name in MECHANISMS if name in judged - breached)
    layer = _worst_layer(monitor, metric)
    return MechanismSigns(order[0], step, metric, layer, tuple(order[1:]), stayed)


def _worst_layer(monitor: RankMonitor, metric: str) -> int | None:
    """Return the layer whose own value is furthest in the direction of a fault."""
    family, find = WORST.get(metric, (metric.removesuffix("_band"), min))
    values = monitor.members(family)
    return find(values, key=values.__getitem__) if values else None


def matching_planned_event(
    policy: Policy, state: State, monitor: RankMonitor, rule: Rule
) -> str | None:
    """Return the planned event that explains what the rule sees; SEV0 is never explained away.

    A search for the highest rate explains such ones, too: its loss breaks on purpose, and its
    weights are dropped. So do optimizers that take turns, each with a loss of its own.
    """
    planned, step = (*policy.planned, *state.context.planned), monitor.step_of(rule)
    searches = (monitor.value(run_phase.LR_PHASE) or 0.0) >= run_phase.SEARCH
    if searches and rule_scope.is_moved_by_rate_search(policy, rule):
        return RATE_SEARCH
    if state.context.takes_turns and rule_scope.is_moved_by_turns(policy, rule):
        readings = monitor.numbers(rule).values()
        breaching = [reading for reading in readings if reading.get("code") == "BREACH"]
        is_else = any(r.get("nonfinite") or r.get("metric") == RATE for r in breaching)
        if not is_else:
            return TURNS
    if rule.severity == "SEV0" or not planned:
        return None
    if not rule_scope.rule_metrics(policy, rule) <= rule_scope.MOVED_BY_SPIKE | rule_scope.AGE:
        return None
    for event in planned:
        if event.from_step <= step <= event.to_step and _as_expected(monitor, event):
            return event.what
    return None


def _as_expected(monitor: RankMonitor, event: Planned) -> bool:
    """Return whether the newest loss is on the side where the event was said to take it."""
    if event.expect == "either":
        return True
    losses = monitor.history.series(LOSS)
    earlier_losses = [loss for step, loss in losses if step < event.from_step][-PRE:]
    if not earlier_losses:
        return False
    newest = monitor.value(LOSS)
    middle = median(earlier_losses)
    return newest is not None and (newest > middle if event.expect == "up" else newest < middle)


def _evidence(policy: Policy, state: State, incident: Incident) -> Evidence | None:
    case, monitor = incident.case, state.monitors.get(incident.case.rank)
    if monitor is None or LOSS not in monitor.history.names:
        return None
    history, begin, onsets = monitor.history, case.first_step, state.context.onsets
    if not case.rolled_back and _history_covers(monitor, incident.breach_step):
        # By now with what came after it.
        case.context = context_events(policy, state, monitor, incident)
    probes: dict[str, list[tuple[int, float]]] = {}
    for name, step, value in history.evaluations:
        probes.setdefault(name, []).append((step, value))
    series = {m: history.series(m) for m in case.norms}
    begin, end = max(begin, incident.breach_step), case.data_returned
    after = [p for p in history.series(LOSS) if begin <= p[0] and (end is None or p[0] < end)]
    sums = None if case.rolled_back else _per_amount(monitor, after, incident.breach_step)
    if sums and (grads := _per_amount(monitor, series.get(GRAD, ()), incident.breach_step)):
        series[GRAD] = grads  # that of a sum grows with it
    peak = max((loss for _, loss in sums), default=None) if sums else case.excursion.peak
    return Evidence(
        band=case.band,
        after=after if sums is None else sums,
        is_sum=sums is not None,
        norms={
            m: (case.norms[m], [value for step, value in points if step >= begin])
            for m, points in series.items()
        },
        probes=probes,
        artefact=_artefact(monitor, incident.breach_step),
        happened=case.context,
        peak=peak,
        nonfinite=case.excursion.nonfinite,
        lasting=case.excursion.lasting,
        skipped=case.excursion.skipped,
        bad_losses=case.excursion.bad_losses,
        came_back=case.excursion.came_back,
        unseen=case.excursion.unseen,
        planned=_planned(policy, state, case, incident.breach_step),
        exhausted=case.exhausted,
        recurring=describe_recurring_onsets([*onsets, case.opened_at_frame])
        if _is_series_excursion(case)
        else "",
        about_loss=incident_judges_loss(policy, incident),
        objective=monitor.is_objective,
        rolled_back=case.rolled_back,
        sound=(check := incident.deferred.weights_check) is not None and check.good,
    )


def _per_amount(
    monitor: RankMonitor, points: Sequence[tuple[int, float]], onset: int
) -> list[tuple[int, float]] | None:
    """Return losses, or norms, of as many tokens as before an onset; None where it is no sum."""
    metric = monitor.metric_behind_loss_growth
    usual = values_before(monitor, metric, onset) if metric else []
    if not usual:
        return None
    middle, amounts = median(usual), dict(monitor.history.series(metric))
    return [(s, value * middle / amounts[s]) for s, value in points if amounts.get(s, 0.0) > 0.0]


def _observe(
    case: LossCase, monitor: RankMonitor, values: tuple[float | None, ...], step: int
) -> None:
    """Keep the largest loss, and the steps whose loss, gradient or update is not finite.

    What was skipped was kept from the weights, unless the update itself tells otherwise.
    """
    names, excursion = monitor.history.names, case.excursion
    values_by_metric = {m: values[i] for i, m in enumerate(names[: len(values)]) if m in JUDGED}
    loss = values_by_metric.get(LOSS)
    wrong = [
        m
        for m in (LOSS, GRAD, UPDATE)
        if (v := values_by_metric.get(m)) is not None and v - v != 0.0
    ]
    was_skipped = values_by_metric.get(SKIPPED) == 1.0 and UPDATE not in wrong
    excursion.lasting = bool(wrong) and not was_skipped
    moved, largest = values_by_metric.get(UPDATE), excursion.largest_update
    if moved is not None and moved - moved == 0.0 and not case.rolled_back:
        excursion.largest_update = moved if largest is None else max(moved, largest)
    if loss is not None:  # a finite one shows that the weights are
        excursion.bad_losses = excursion.bad_losses + 1 if LOSS in wrong else 0
    if wrong and was_skipped:
        excursion.skipped = (*excursion.skipped[:1], step)
    elif wrong:
        excursion.nonfinite = step if excursion.nonfinite is None else excursion.nonfinite
        excursion.came_back |= case.rolled_back
    if loss is not None and loss - loss == 0.0:
        excursion.peak = loss if excursion.peak is None else max(excursion.peak, loss)
        band = case.band
        if band is not None and not monitor.metric_behind_loss_growth:
            far = max(SERIES_MADS * band.spread, SERIES_NATS)
            excursion.outliers += loss - band.forecast(step) > far


def _history_covers(monitor: RankMonitor, onset: int) -> bool:
    """Return whether the frames that are kept go back to what question 4 looks at."""
    frames = monitor.history.frames
    is_complete = len(frames) < (frames.maxlen or 0)  # none was forgotten
    return is_complete or frames[0].step < onset - BEFORE - 1


def _artefact(monitor: RankMonitor, onset: int) -> str:
    """Say whether the evaluation before and after the onset was the same one."""
    points = monitor.history.series(ARTEFACT)
    earlier_hashes = {value for step, value in points if step < onset}
    later_hashes = {value for step, value in points if step >= onset}
    if not earlier_hashes or not later_hashes:
        return "unknown"
    return (
        "same"
        if earlier_hashes | later_hashes == earlier_hashes and len(earlier_hashes) == 1
        else "changed"
    )


def _planned(policy: Policy, state: State, case: LossCase, onset: int) -> bool:
    """Return whether an announced event covers the onset and the loss went as expected."""
    band, peak = case.band, case.excursion.peak
    up = band is not None and peak is not None and peak > band.limit
    return any(
        event.expect == "either" or (event.expect == "up") == up
        for event in planned_events_near(policy, state, onset)
    )


def describe_recurring_onsets(onsets: Sequence[int]) -> str:
    """Say why excursions at these frame counts (ascending) are a series, "" when they are none."""
    recent = [count for count in onsets if onsets[-1] - count < RECUR_FRAMES] if onsets else []
    if len(recent) >= RECUR_COUNT:
        return f"{len(recent)} excursions within {recent[-1] - recent[0]} steps"
    newest = onsets[-RECUR_GAPS:]
    gaps = [b - a for a, b in pairwise(newest)]
    if len(newest) == RECUR_GAPS and all(b < a for a, b in pairwise(gaps)):
        return f"they come ever faster: {', '.join(str(gap) for gap in gaps)} steps apart"
    return ""


# ── what happened around the onset ───────────────────────────────────────────────────────────────


def values_before(monitor: RankMonitor, metric: str, onset: int) -> list[float]:
    """Return the values from before an onset that its trend is taken from."""
    return [v for step, v in monitor.history.series(metric) if step < onset - EXCLUDED][-PRE:]


def level_before(monitor: RankMonitor, metric: str, breach: int) -> float | None:
    """Return the healthy value of a metric just before it changed, None where it did not."""
    levels = monitor.history.levels  # several rules of one event ask for the same
    if (metric, breach) not in levels:
        points = monitor.history.series(metric)
        change = find_jump(points, breach) if metric == RATE else find_change(points, breach)
        levels[metric, breach] = None if change is None else change.before
    return levels[metric, breach]


def planned_events_near(policy: Policy, state: State, onset: int) -> list[Planned]:
    """Return the announced events that an onset may belong to."""
    planned = (*policy.planned, *state.context.planned)
    return [p for p in planned if p.from_step - AFTER <= onset <= p.to_step + BEFORE]


def context_events(
    policy: Policy, state: State, monitor: RankMonitor, incident: Incident
) -> list[ContextEvent]:
    """Return what happened from 50 steps before the onset to 5 after it, oldest first."""
    onset = incident.breach_step
    events = [
        ContextEvent(plan.from_step, "planned", plan.what)
        for plan in planned_events_near(policy, state, onset)
    ]
    events += [
        ContextEvent(happened.step, happened.kind, happened.text)
        for happened in state.context.happened
        if onset - BEFORE <= happened.step <= onset + AFTER
        and happened.attempt == incident.case.attempt
        and happened.incident != incident.id  # what was done about it is not its cause
    ]
    events += [
        *_rates(monitor, onset, state.phase.settled),
        *_odd(monitor, onset),
        *_marks(monitor, onset),
        *_wiring(policy, state, incident),
    ]
    return sorted(events, key=lambda event: event.step)


def _wiring(policy: Policy, state: State, incident: Incident) -> Iterator[ContextEvent]:
    """Yield the faults of the job's wiring that people were told of by the onset, and that last.

    However long ago: such a job trains wrongly in each of its steps.
    """
    rules = state.rules
    if not rules.wiring_reported or not rule_scope.may_speak_against_weights(policy, incident):
        return
    firing = set(state.firing(policy))
    for rule in policy.rules:
        if rule.id not in firing or rule.id in rules.muted or state.silence(rule.id) is not None:
            continue
        if rule_scope.rule_family(policy, rule) != rule_scope.WIRING:
            continue
        metrics = rule_scope.rule_metrics(policy, rule) & rules.wiring_reported.keys()
        steps = [rules.wiring_reported[metric] for metric in metrics]
        if not steps or min(steps) > incident.breach_step + AFTER:
            continue
        facts = [rules.wiring[metric] for metric in sorted(metrics) if metric in rules.wiring]
        names = ", ".join(fact.named for fact in facts if fact.names)
        title = rule.title[:1].lower() + rule.title[1:] or rule.id
        text = f"{title} ({names})" if names else title
        tensors = tuple(name for fact in facts for name in fact.names)
        yield ContextEvent(min(steps), spike_classifier.WIRING, text, rule.id, tensors)


def _rates(monitor: RankMonitor, onset: int, highest: float) -> Iterator[ContextEvent]:
    """Yield the jump of the learning rate that its schedule does not explain."""
    rates = monitor.history.series(RATE)
    jump = find_jump(rates, onset, highest)
    if jump is None:
        return
    scheduled = dict(monitor.history.series(SCHEDULED))
    steps = [step for step in scheduled if step < jump.step]
    own = scheduled.get(jump.step, 0.0)
    is_own = bool(steps) and own >= OWN_JUMP * scheduled[steps[-1]] > 0.0
    whose = "the job's own learning rate" if is_own else "learning rate"
    text = f"{whose} went from {jump.before:.3g} to {dict(rates)[jump.step]:.3g}"
    yield ContextEvent(jump.step, OWN_RATE if is_own else "rate", text)


def _odd(monitor: RankMonitor, onset: int) -> Iterator[ContextEvent]:
    """Yield batches, and counts of tokens, that were unlike those before.

    A count that stays so is another size of the batch; a single one is the end of an epoch.
    """
    for kind, metrics in (("data", BATCH), ("logging", COUNTS)):
        for metric in metrics:
            usual = values_before(monitor, metric, onset)
            if len(usual) < LEAST:
                continue
            middle = median(usual)
            scale = max(robust_spread(usual, middle), OUTLIER_SHARE * abs(middle) / OUTLIER, 1e-12)
            near = [p for p in monitor.history.series(metric) if abs(p[0] - onset) <= NEAR]
            far = max(near, key=lambda p: abs(p[1] - middle), default=None)
            if far is not None and abs(far[1] - middle) > OUTLIER * scale:
                late = [
                    v
                    for frame_step, v in monitor.history.series(metric)
                    if frame_step > onset + NEAR
                ]
                stays = abs(median(late or [far[1]]) - middle) > OUTLIER * scale
                if kind == "logging" and stays:
                    kind = "batch"
                text = f"{formats.readable_metric(metric)} {far[1]:.3g}, {middle:.3g} before"
                yield ContextEvent(far[0], kind, text)


def _marks(monitor: RankMonitor, onset: int) -> Iterator[ContextEvent]:
    """Yield checkpoints, skipped updates and changes of the loss scale."""

    def near(metric: str) -> list[tuple[int, float]]:
        points = monitor.history.series(metric)
        return [p for p in points if onset - BEFORE <= p[0] <= onset + AFTER]

    for step, value in near("checkpoint_time"):
        yield ContextEvent(step, "checkpoint", f"a checkpoint took {value:.3g} s")
    skips = [step for step, value in near(SKIPPED) if value == 1.0]
    if skips:
        yield ContextEvent(skips[0], "skipped", f"{len(skips)} updates were skipped")
    scales = near("loss_scale")
    for (_, a), (step, b) in pairwise(scales):
        if b != a:
            yield ContextEvent(step, "precision", f"loss scale {a:.4g} to {b:.4g}")
            return


# ── what advice asks for ──────────────────────────────────────────────────────────────────────────

SKIPS_APART = 16  # steps at most between two skipped updates of one trouble; project default
REWARDS = frozenset(("reward", "rewards", "return", "returns", "episode", "episodic"))
NAME_PART = re.compile(r"[a-z]+")
SAMPLES = 3  # of a metric before the onset, to say that it moved; project default
WAITING = "dataloader_stall_frac"


def first_and_last_skip(state: State, incident: Incident, skipped: Sequence[int]) -> Sequence[int]:
    """Return the first and the last skipped update; some come before a rule fires."""
    monitor = state.monitors.get(incident.case.rank)
    if not skipped or monitor is None:
        return skipped
    first = skipped[0]
    for step, value in reversed(monitor.history.series(SKIPPED)):
        if value == 1.0 and first - SKIPS_APART <= step < first:
            first = step
    return first, skipped[-1]


def has_reward(metrics: Iterable[str]) -> bool:
    """Return whether a job reports what reinforcement learning maximises, by names of metrics."""
    return any(not REWARDS.isdisjoint(NAME_PART.findall(name.lower())) for name in metrics)


def incident_involves_metrics(
    policy: Policy,
    incident: Incident,
    monitor: RankMonitor | None,
    metric_prefixes: tuple[str, ...],
) -> bool:
    """Return whether a rule of the incident reads such a metric, or one moved since the onset."""
    for rule in policy.rules:
        if rule.id in incident.rules and any(
            metric.startswith(metric_prefixes) for metric in rule_scope.rule_metrics(policy, rule)
        ):
            return True
    if monitor is None:
        return False
    for metric in monitor.history.names:
        if not metric.startswith(metric_prefixes):
            continue
        before = values_before(monitor, metric, incident.breach_step)
        since = [v for step, v in monitor.history.series(metric) if step >= incident.breach_step]
        if len(before) < SAMPLES or not since:
            continue
        low, high = sorted((abs(median(before)), abs(median(since))))
        if high > NORM_RATIO * low:
            return True
    return False


def waiting_slowdown_factor(policy: Policy, monitor: RankMonitor, rule: Rule) -> float:
    """Return how many times as long a step takes, by the share of it that waits for data."""
    if WAITING not in rule_scope.rule_metrics(policy, rule):
        return 1.0
    share = monitor.value(WAITING)
    before = level_before(monitor, WAITING, monitor.first_breach(rule))
    if share is None or before is None or not before < share < 100.0:
        return 1.0
    return (100.0 - before) / (100.0 - share)


MEMORY, GROWTH, DAY_S = "host_mem_used", "host_mem_growth", 86_400.0


def describe_time_to_full_memory(policy: Policy, monitor: RankMonitor, rule: Rule) -> str:
    """Return when the host's memory is full as it grows now, "" where that is not within a day.

    By the frames that are kept, and only for a rule about its growth: a step is no rate.
    """
    names, frames = monitor.history.names, monitor.history.frames
    if MEMORY not in names or GROWTH not in rule_scope.rule_metrics(policy, rule):
        return ""
    column = names.index(MEMORY)
    rows = ((f.at_ns, f.values[column]) for f in frames if column < len(f.values))
    points = [(at_ns, share) for at_ns, share in rows if share is not None]
    if len(points) < 2 or points[-1][1] <= points[0][1]:
        return ""
    (begin, before), (end, now) = points[0], points[-1]
    left_s = (100.0 - now) / (now - before) * (end - begin) / 1e9
    if left_s > DAY_S:
        return ""
    return f"at this rate the memory of the machine is full in about {formats.format_age(left_s)}"
