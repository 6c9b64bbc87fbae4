"""Check of weights against batches as the cause, before a runbook restores the weights.

A loss out of its band tells of either. A rollback mends weights; for bad batches it costs the steps
since the savepoint, and they go on coming. So a runbook may begin with `check_weights`; where that
objects, its evidence is collected, nothing else is done, and the trouble counts as one of the data.
Where nobody can say, as with shards of several ranks, and the loop goes on, it waits once, as well.
While the losses stay out of their band it is asked again, each time after twice as many steps.
Where a rollback takes the loop back, and so ends such a trouble, that is sooner, and once in any
case: repeated tokens are learned in a few steps, and their loss tells of nothing any more. There
the evidence waits for the second answer: the job would be some steps further by the time it is
collected, and weights that had bad batches come back in as few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..incidents import diagnosis, withdrawal
from ..model.policy import Policy
from ..state.incident import Incident, WithdrawnRunbook
from ..state.run_state import State, StepContext
from ..state.runbook_execution import RunbookExecution

VERB = "check_weights"
SOONER = 4  # times, where a rollback takes the loop back, too
BATCH = "data"  # kind of an event, see `spike_classifier`


def begins(policy: Policy, incident: Incident, run: RunbookExecution) -> bool:
    """Return whether nothing is decided before it is asked."""
    return run.runbook.verbs[:1] == (VERB,) and applies(policy, incident, run)


def applies(policy: Policy, incident: Incident, run: RunbookExecution) -> bool:
    """Return whether the size of a loss is why the runbook runs, nobody has ordered it, and the
    probe keeps a batch to ask."""
    if not policy.job.get("probe_batch"):
        return False
    if run.requested.operator or run.terms.approved is not None or incident.severity == "SEV0":
        return False
    asked = incident.trigger.asked_by
    return any(rule.id == asked and diagnosis.is_about_loss(policy, rule) for rule in policy.rules)


def reason_to_wait(incident: Incident, run: RunbookExecution, result: Mapping[str, Any]) -> str:
    """Return why the runbook waits although nobody objects, "" where it does not.

    Where nobody can say and the loop goes on, a rollback for batches that are over by then costs
    steps and mends nothing: it waits once, for as long as it takes to see whether they are.
    """
    known = "loss" in result or not run.intent.args.get("waits")
    if known or incident.deferred.weights_check is not None:
        return ""
    return f"whether the weights are good is not known ({result.get('why', 'no answer')})"


def reduce(
    ctx: StepContext, incident: Incident, run: RunbookExecution, why: str, loss: float
) -> None:
    """Leave of the runbook its evidence, or nothing yet, and plan to ask again.

    Args:
        loss: of the probe batch, with weights that are good; infinite where that is not known.
    """
    state, old, level = ctx.state, incident.deferred.weights_check, incident.escalation.level
    waits = int(run.intent.args["again"])
    rewinds = "rewind" not in state.job.unavailable
    known = loss < math.inf
    if rewinds or not known:  # other batches would come instead of the bad ones
        waits = max(1, waits // SOONER)
    if old is not None:
        waits = 2 * old.waits
    incident.deferred.weights_check = WithdrawnRunbook(
        run.runbook.name,
        level,
        run.terms.escalated,
        state.frame_count + waits,
        waits,
        loss if old is None else min(loss, old.loss),
        surely=rewinds and old is None,  # some bad batches have low losses
    )
    run.terms.reduced_reason, run.terms.repeated = why, old is not None
    if incident.deferred.weights_check.surely:
        run.index = len(run.runbook.steps)
    if known:
        state.context.happened.append((incident.breach_step, state.attempt, BATCH, why))


def due(state: State, incident: Incident) -> WithdrawnRunbook | None:
    """Return what is to be started anew: the losses since are still out of their band."""
    old = incident.deferred.weights_check
    if old is None or state.frame_count < old.at or state.approvals.pending is not None:
        return None
    ill = old.surely or withdrawal.is_loss_out_of_band(state, incident)
    return old if ill else None
