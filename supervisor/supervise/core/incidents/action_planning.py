"""Context of actions before they start, feasibility of a runbook, and the savepoint it needs.

Pure questions about the state: nothing is decided, said or done.
"""

from __future__ import annotations

from dataclasses import replace

from ..detection.rank_monitor import LOSS
from ..model.action import PlanContext, Refused
from ..model.checkpoint_registry import Checkpoint
from ..model.decisions import ACTING_MODES, PlannedStep
from ..model.payload import RollbackArgs
from ..model.policy import Policy, Runbook
from ..state.incident import Incident
from ..state.run_state import State
from ..state.runbook_execution import RunbookExecution
from . import weight_evidence


def plan_context(
    state: State, incident: Incident, before: int | None = None, operator: str = ""
) -> PlanContext:
    """Return what an action may know when its arguments are worked out; see `basic_context`."""
    attribution = state.context.attribution
    where = basic_context(state, incident, before, operator)
    sound = _began_with_good_weights(state, incident)
    asked = incident.deferred.weights_check
    event = ""
    if asked is not None and not weight_evidence.new_evidence(state, incident, asked):
        event = weight_evidence.data_event(state, incident)
    suspects, shards = attribution.suspects(), attribution.shards
    return replace(where, sound=sound, data_event=event, suspects=suspects, shards=shards)


def _began_with_good_weights(state: State, incident: Incident) -> bool:
    """Return whether the loss of the first breach's step, which has the weights from before it, was
    in its band."""
    monitor, band = state.monitors.get(incident.case.rank), incident.case.band
    if monitor is None or band is None:
        return False
    step = incident.breach_step
    losses = [loss for at, loss in monitor.history.series(LOSS) if at == step]
    return bool(losses) and losses[0] <= band.limit_at(step)


def basic_context(
    state: State, incident: Incident, before: int | None = None, operator: str = ""
) -> PlanContext:
    """Return what an action may know but for shards and losses, which take long to weigh.

    Args:
        before: the step that counts as the first breach; None: that of the incident.
        operator: who asked for the action; "": the policy did.
    """
    rate = incident.case.rate
    if operator or incident.trigger.still:
        rate = None
    return PlanContext(
        incident=incident.id,
        step=state.step,
        breach_step=incident.breach_step if before is None else before,
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


def refusal(
    state: State, incident: Incident, book: Runbook, before: int | None = None, operator: str = ""
) -> str:
    """Say why a step of the runbook cannot work here, "" when all can: asked before any is done."""
    return _refusal(plan_context(state, incident, before, operator), book)


def lacks_checkpoint(state: State, incident: Incident, book: Runbook) -> bool:
    """Return whether a runbook that cannot work here could if there were an old good checkpoint."""
    where = plan_context(state, incident)
    oldest = Checkpoint("", 0, 0, "", ok=True)
    return not _refusal(replace(where, good=(oldest, *where.good)), book)


def _refusal(where: PlanContext, book: Runbook) -> str:
    apart = where.unavailable.get("fence")
    for verb, step in zip(book.verbs, book.steps, strict=True):
        if not step.is_due(where):
            continue
        if apart and (step.changes_training or verb == "pause"):
            return f"{verb}: {apart}"
        try:
            step.plan(where)
        except Refused as refused:
            return f"{verb}: {refused}"
    return ""


def planned_steps(state: State, incident: Incident, book: Runbook) -> list[PlannedStep]:
    """Return every step that touches the job, with its arguments; all of them can be planned."""
    where = plan_context(state, incident)
    return [
        PlannedStep(verb, step.plan(where))
        for verb, step in zip(book.verbs, book.steps, strict=True)
        if step.touches_job and step.is_due(where)
    ]


def retain_before(policy: Policy, state: State) -> int:
    """Return the step before which the newest savepoint must stay, 0 when none has to.

    Of several rollbacks the one that goes back furthest counts: its savepoint serves all of them. A
    hold changes nothing, for a person may still go back.
    """
    incident = state.incident
    if incident is None or state.job.returncode is not None:
        return 0
    books = [policy.runbooks[name] for name in _reachable(policy, state, incident)]
    found = [step for book in books if (step := _goes_before(state, incident, book))]
    run = incident.run
    if run is not None and (step := _goes_before(state, incident, run.runbook, run)):
        found.append(step)
    return min(found, default=0)


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
    found: dict[str, None] = {}
    while names:
        name = names.pop()
        book = policy.runbooks.get(name)
        if book is not None and name not in found:
            found[name] = None
            names += (book.if_it_fails, book.if_refused)
    return found


OPERATOR_ROLLBACK = {"at_least": 0}  # keys of a rollback that a person orders


def _goes_before(
    state: State, incident: Incident, book: Runbook, run: RunbookExecution | None = None
) -> int:
    """Return the step that the rollback of a runbook goes before, 0 when it has none."""
    before, operator = (None, "") if run is None else (run.requested.before, run.requested.operator)
    where = basic_context(state, incident, before, operator)
    for verb, action in zip(book.verbs, book.steps, strict=True):
        if verb == "rollback":
            try:
                return action.plan(where).parse(RollbackArgs).before_step
            except Refused:
                return 0
    return 0
