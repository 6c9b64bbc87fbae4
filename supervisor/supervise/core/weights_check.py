"""Check of weights against batches as the cause, before a runbook restores the weights.

A loss out of its band tells of either. A rollback mends weights; for bad batches it costs the steps
since the savepoint, and they go on coming. So a runbook may begin with `check_weights`; where that
objects, its evidence is collected, nothing else is done, and the trouble counts as one of the data.
Where nobody can say, as with shards of several ranks, it waits once, as well.

That is one decision per onset. From then on the model learns what comes in, and a probe batch of
other data rises with it: weights are taken back only where something new speaks against them
(`action_planning`), each time after twice as many steps, and the action names it.

Where token statistics stepped at the onset and the loss falls by itself, the data changed. That is
told, nothing is taken back for it, and the probe takes another batch, of the new data.
"""

from __future__ import annotations

import math

from . import diagnosis
from .action_planning import better_on_new_data, data_event, input_change, new_evidence
from .incident import Incident, RunbookExecution, WithdrawnRunbook
from .model.payload import Outcome, Payload, WeightsArgs
from .model.policy import Policy
from .run_state import Happened, State, StepContext

VERB = "check_weights"
SOONER = 4  # times, where nobody can say
BATCH = "data"  # kind of an event, see `spike_classifier`


def begins(policy: Policy, incident: Incident, run: RunbookExecution) -> bool:
    """Return whether nothing is decided before it is asked."""
    return run.runbook.verbs[:1] == (VERB,) and applies(policy, incident, run)


def applies(policy: Policy, incident: Incident, run: RunbookExecution) -> bool:
    """Return whether the size of a loss is why the runbook runs, nobody has ordered it, and the
    probe keeps a batch to ask."""
    if not policy.job.probe_batch:
        return False
    if run.requested.operator or run.terms.approved is not None or incident.severity == "SEV0":
        return False
    rule_id = incident.trigger.asked_by
    return any(
        rule.id == rule_id and diagnosis.is_about_loss(policy, rule) for rule in policy.rules
    )


def objection(state: State, incident: Incident, run: RunbookExecution, result: Payload) -> str:
    """Return why the weights are not taken back now, "" where they are."""
    old, action, args = incident.deferred.weights_check, run.intent.action, run.intent.args
    assert action is not None
    order, outcome = args.parse(WeightsArgs), result.read(Outcome)
    event = order.data_event
    if reason := action.objection(args, result):
        return f"{reason}; {event}" if event else reason
    change = input_change(state, incident)
    if event:
        return event
    if old is None and change is not None and not change.degenerate:
        return f"the data changed at step {incident.breach_step}: {change.text}"
    if old is not None and not new_evidence(state, incident, old):
        return f"nothing new speaks against the weights since step {old.step}"
    loss = outcome.loss
    if old is not None and loss is not None:
        return better_on_new_data(state, incident, old, loss)
    # Where nobody can say and the loop goes on, a rollback for batches that are over by then costs
    # steps and mends nothing: it waits once, for as long as it takes to see whether they are.
    if loss is not None or not order.waits or old is not None:
        return ""
    return f"whether the weights are good is not known ({outcome.why})"


def reduce(
    ctx: StepContext, incident: Incident, run: RunbookExecution, reason: str, loss: float
) -> None:
    """Leave of the runbook its evidence, and note from when on it may be asked again.

    Args:
        loss: of the probe batch, with weights that are good; infinite where that is not known.
    """
    state, old, level = ctx.state, incident.deferred.weights_check, incident.escalation.level
    order = run.intent.args.parse(WeightsArgs)
    waits, event = order.again, order.data_event
    is_known = loss < math.inf
    if not is_known:
        waits = max(1, waits // SOONER)
    if old is not None:
        waits, event = 2 * old.waits, event or old.data_event
    incident.deferred.weights_check = WithdrawnRunbook(
        run.runbook.name,
        level,
        run.terms.escalated,
        state.step,
        state.frame_count + waits,
        waits,
        loss if old is None else min(loss, old.loss),
        event,
    )
    run.terms.reduced_reason = reason
    run.terms.repeated = old is not None and event == old.data_event
    if is_known or event:
        state.context.happened.append(Happened(incident.breach_step, state.attempt, BATCH, reason))


def due(state: State, incident: Incident) -> tuple[WithdrawnRunbook, str] | None:
    """Return what is to be started anew, and the reason."""
    old = incident.deferred.weights_check
    if old is None or state.frame_count < old.retry_frame or state.approvals.pending is not None:
        return None
    evidence = new_evidence(state, incident, old)
    if not evidence and not old.data_event:
        evidence = data_event(state, incident)
    if evidence:
        return old, evidence
    old.retry_frame = state.frame_count + max(1, old.waits // SOONER)
    return None


def evidence(state: State, incident: Incident, result: Payload) -> str:
    """Return why weights are taken back after one withdrawal, "" where there was none."""
    old = incident.deferred.weights_check
    if old is None:
        return ""
    new = new_evidence(state, incident, old)
    loss = result.read(Outcome).loss
    was_judged = old.loss < math.inf
    probe = "" if loss is None else f"; the probe batch has a loss of {loss:.4g}"
    if probe and was_judged:
        probe += f", {old.loss:.4g} then"
    judged = "the weights were good" if was_judged else "nothing could judge the weights"
    return f"new since step {old.step}, when {judged}: {new}{probe}"
