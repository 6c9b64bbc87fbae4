"""Where an incident comes to: closed, held until a person comes, or past all help here."""

from __future__ import annotations

from typing import Any

from ..state.incident import CLOSED, HELD, Incident
from ..state.run_state import StepContext
from ..state.runbook_execution import RunbookExecution
from . import approvals, diagnosis, opening, stall

NOTHING = "nothing to do"


def hold(turn: StepContext, incident: Incident, why: str, *, exhausted: bool = False) -> None:
    """Stop acting and wait for a person. The job itself is left as it is; an ended one is over.

    Args:
        exhausted: the trouble outlived the ladder; then the class says that no knob will fix it.
    """
    policy, state = turn.policy, turn.state
    approvals.settle(turn, "withdrawn", f"{incident.id} is held")
    incident.phase, incident.run, incident.deferred.anew = HELD, None, None
    opening.invalidate_attempt(state, incident)
    if state.job.returncode is not None:
        state.job.stays = why
        return
    case = incident.case
    case.exhausted |= exhausted
    case.verdict = diagnosis.conclude(policy, state, incident) if exhausted else case.verdict
    found, then = case.verdict, "no further action until `supervise release RUN`; "
    then += stall.word(policy, state)
    turn.move("hold", why)
    data: dict[str, Any] = {} if found is None else {"spike": found.data()}
    turn.record("incident", f"held: {why}", what="held", severity=incident.severity, **data)
    turn.notify(
        incident.severity if incident.severity != "SEV2" else "SEV1",
        f"{incident.id}: held, a person is needed",
        verdict=why if found is None else f"{why}; {found.text}",
        then=then if found is None else f"{then}; {found.advice}",
        news=True,
    )


def hold_by(turn: StepContext, incident: Incident, run: RunbookExecution) -> None:
    """Hold as the last step of a runbook says, whatever became of the evidence before it."""
    if incident.phase == HELD and run.failure.why is None:
        run.index += 1  # it ran in a hold: people know
        return
    why = f"{run.runbook.name}: {incident.headline}"
    why += f"; {run.failure.why}" if run.failure.why else ""
    hold(turn, incident, why, exhausted=run.terms.climbed)


def report_unactionable(turn: StepContext, incident: Incident, name: str, refusal: str) -> None:
    """Say that the runbook that is wanted cannot work here, and why."""
    turn.record("abort", f"{name} cannot run: {refusal}", what="refused", runbook=name)
    turn.state.job.stays = f"{name}: {refusal}"
    turn.notify(
        incident.severity if incident.severity != "SEV2" else "SEV1",
        f"{incident.id}: nothing can be done about it here",
        verdict=incident.headline,
        why=f"{name}: {refusal}",
        then=f"evidence is taken; {stall.word(turn.policy, turn.state)}; a person should look",
        news=True,
    )


def close(
    turn: StepContext, incident: Incident, why: str, then: str = NOTHING, *, recovered: bool = False
) -> None:
    """Close an incident; a request that waits for it is withdrawn."""
    approvals.settle(turn, "withdrawn", f"{incident.id} is over")
    turn.state.checkpoints.judge(incident.id, turn.state.attempt if recovered else None)
    acted = incident.escalation.runs > 0
    found = incident.case.verdict
    if not incident.deferred.over:
        found = diagnosis.conclude(turn.policy, turn.state, incident)
    data: dict[str, Any] = {} if found is None else {"spike": found.data()}
    incident.phase = CLOSED
    turn.record(
        "incident",
        f"closed: {why}",
        severity=incident.severity,
        what="closed",
        acted=acted,
        opened_step=incident.opened_step,
        breach_step=incident.breach_step,
        rules=incident.rules,
        **data,
    )
    if found is not None:
        diagnosis.remember_onset(turn.state.context, incident.case)
        why, then = f"{why}; {diagnosis.told(found)}", found.advice if then == NOTHING else then
    turn.notify(incident.severity, f"{incident.id}: closed", verdict=why, then=then)
    if acted:
        turn.state.history.floor = (incident.escalation.rung, turn.state.pace)
    turn.state.incident = None
