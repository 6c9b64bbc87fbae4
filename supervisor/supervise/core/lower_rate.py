"""The trouble is back behind a rollback: was it the rate, and is a lower one left to try?

Weights that were good for some steps at a rate, and then went bad again at it, have tested the rate
as the cause. Then the runbook that went back runs again with half of that rate, before anything is
given up, as far as its budgets reach. A rollback after which the loss was never good tells nothing
of the rate, nor does one that takes the loop back to meet the same step again.
"""

from __future__ import annotations

from . import action_planning, advice, opening, run_phase
from .diagnosis import RATE
from .frames import LOSS
from .incident import Incident
from .model.decisions import Advice, Lead, RateBlamed
from .model.policy import HOLD, Policy, Runbook, next_level
from .rank_monitor import RankMonitor
from .run_state import State, StepContext

GOOD_STEPS = 10  # losses in their band show that the weights were good; those just before an onset
SAME_STEP = 2  # steps around the first breach, when the loop meets it again


def weigh(ctx: StepContext, incident: Incident) -> None:
    """Note what it proves that the trouble is back or never went, if it is anything."""
    state, case, recovery = ctx.state, incident.case, incident.recovery
    monitor, rate_before = state.monitors.get(case.rank), case.rate
    if monitor is None or rate_before is None or recovery.rolled_back_to != monitor.attempt:
        return
    onset = _onset(monitor, incident)
    if onset is None or (not recovery.loop_kept and abs(onset - recovery.must_pass) <= SAME_STEP):
        return
    rates = [rate for step, rate in _since(monitor, RATE) if onset - GOOD_STEPS <= step <= onset]
    limit_before = recovery.rate_limits[-1] if recovery.rate_limits else None
    weighed = run_phase.came_back(max(rates, default=0.0), rate_before, limit_before)
    if weighed is None:
        return
    case.rate, incident.breach_step = weighed, onset
    opening.mark_suspect(state, incident)
    ctx.record(RateBlamed(reason=f"the learning rate is the cause: {weighed.reason}"))


def again(policy: Policy, state: State, incident: Incident) -> Runbook | None:
    """Return the runbook of the newest level, when it can run again at a lower rate than before."""
    level, levels = incident.escalation.level, policy.ladder.levels
    book = policy.runbooks.get(levels[level]) if 0 <= level < len(levels) else None
    rate, limits = incident.case.rate, incident.recovery.rate_limits
    if book is None or rate is None or rate.limit is None or (limits and rate.limit >= limits[-1]):
        return None
    return book if _is_affordable(policy, state, incident, book) else None


def is_disproved(incident: Incident) -> bool:
    """Return whether the trouble came back at two rates that it was held at: it is not the rate."""
    return len(incident.recovery.rate_limits) > 1


def after_relapse(policy: Policy, state: State, incident: Incident) -> Advice:
    """Return what follows if the trouble comes back."""
    level, levels = incident.escalation.level, policy.ladder.levels
    book = policy.runbooks.get(levels[level]) if 0 <= level < len(levels) else None
    name, _ = next_level(policy.ladder, level)
    then = "automatic actions stop, and a person is needed" if name == HOLD else f"{name} runs"
    if book and incident.case.rate and _is_affordable(policy, state, incident, book):
        then = (
            f"{book.name} runs again if it is the learning rate, which is held lower; else {then}"
        )
    if wrong := advice.still_wrong(state, incident):
        return Advice(None, f"{wrong}; if it comes back, {then}")
    return Advice(Lead.NOTHING, f"if it comes back, {then}")


def holds(state: State, incident: Incident, book: Runbook) -> bool:
    """Return whether a runbook is to hold the learning rate."""
    context = action_planning.basic_context(state, incident)
    pairs = zip(book.verbs, book.steps, strict=True)
    return any(verb == "hold_rate" and step.is_due(context) for verb, step in pairs)


def _is_affordable(policy: Policy, state: State, incident: Incident, book: Runbook) -> bool:
    kinds = [step.budget_class for step in book.steps if step.budget_class is not None]
    spent = (
        state.ledger.exhausted(policy.budgets, kind, state.frame_count, state.at_ns)
        for kind in kinds
    )
    refusal = action_planning.refusal(state, incident, book)
    holds_rate = any(getattr(step, "tested", False) for step in book.steps)
    return holds_rate and not refusal and not any(spent)


def _onset(monitor: RankMonitor, incident: Incident) -> int | None:
    """Return where the losses left their band again since the rollback, None if they did not, or
    had never been in it."""
    band, good = incident.case.band, 0
    if band is None:
        return None
    for step, loss in _since(monitor, LOSS):
        if loss <= band.limit_at(step):
            good += 1
        elif good >= GOOD_STEPS:
            return step
    return monitor.step if good >= GOOD_STEPS and incident.case.excursion.lasting else None


def _since(monitor: RankMonitor, metric: str) -> list[tuple[int, float]]:
    """Return the values of a metric in the attempt under way."""
    began = next((f.step for f in monitor.history.frames if f.attempt == monitor.attempt), 0)
    return [point for point in monitor.history.series(metric) if point[0] >= began]
