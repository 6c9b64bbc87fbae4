"""Which savepoint must not give way: the one that a rollback of the open incident would go to.

A request waits for a person, or a milder level is verified, for longer than the newest savepoints
reach. Pure questions about the state: nothing is decided, said or done.
"""

from __future__ import annotations

from ..model.action import Refused
from ..model.decisions import ACTING_MODES
from ..model.policy import Policy, Runbook
from ..state.incident import Incident
from ..state.run_state import State
from ..state.runbook_execution import RunbookExecution
from . import action_planning


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


def _goes_before(
    state: State, incident: Incident, book: Runbook, run: RunbookExecution | None = None
) -> int:
    """Return the step that the rollback of a runbook goes before, 0 when it has none."""
    before, operator = (None, "") if run is None else (run.requested.before, run.requested.operator)
    where = action_planning.basic_context(state, incident, before, operator)
    for verb, action in zip(book.verbs, book.steps, strict=True):
        if verb == "rollback":
            try:
                return int(action.plan(where)["before_step"])
            except Refused:
                return 0
    return 0
