"""Runbooks in progress: intent, effect, commit, and what happens when one fails.

A step is intended (and on disk) before it is performed; its outcome comes back as `Finished`. The
engine itself carries out `hold`, `notify`, `undo` and `verify`. A failed runbook first takes back
what it can, then follows `if_it_fails`; one that did not help is taken back before the next rung.
"""

from __future__ import annotations

from typing import Any

from ..incidents import action_planning, approvals, closing, opening, withdrawal
from ..model import escalation
from ..model.approval_request import Pending
from ..model.events import Finished
from ..model.policy import HOLD, Runbook
from ..state import compensation
from ..state.incident import ACTING, HELD, OPEN, PROBATION, Incident, brief
from ..state.run_state import State, StepContext
from ..state.runbook_execution import OperatorOrder, RunbookExecution, RunbookFailure, StartTerms
from . import checkpoint_choice, steps


def start(
    turn: StepContext,
    incident: Incident,
    name: str,
    rung: int,
    why: str,
    *,
    climbed: bool = False,
    instead: bool = False,
    approved: Pending | None = None,
) -> None:
    """Start runbook `name` for the incident, ask for it, or hold when the ladder says so.

    Args:
        climbed: it was not asked for: what is below it on the ladder was tried.
        instead: it stands in for one that cannot work here; it has no stand-in itself.
        approved: the request that people said yes to.
    """
    if name == HOLD:
        closing.hold(turn, incident, why, exhausted=climbed)
        return
    policy, state, tried = turn.policy, turn.state, incident.escalation
    incident.deferred.anew = None
    book = policy.runbooks[name]
    refusal = action_planning.refusal(state, incident, book)
    if refusal and book.if_refused and not instead:
        _stand_in(turn, incident, book, rung, why, refusal)
        return
    asked = None if refusal or approved else approvals.gate(policy, incident, book)
    tried.runs += 1
    reason = withdrawal.reason(policy, state, incident)
    terms = StartTerms(reason, climbed, instead, entered=tried.rung, reduced=refusal)
    incident.run = RunbookExecution(tried.runs, book, incident.severity, terms=terms)
    if asked is not None:
        terms.reduced = "it waits for approval"
        approvals.ask(turn, incident, book, asked, rung, why, climbed=climbed)
    elif refusal:
        tried.rung = rung
        checkpoint_choice.refused(turn, incident, book, refusal, why, climbed=climbed)
    else:
        tried.rung, state.history.tried[name] = rung, "verify" not in book.verbs
        terms.approved = None if approved is None else approved.plan
        if any(step.touches_job for step in book.steps):
            _acts(turn, incident, f"runbook {name}: {why}")
            state.history.floor = (rung, state.pace)
            title = f"{incident.id}: running {name}"
            turn.notify(incident.severity, title, why=why, then=f"runbook {name} runs")
    proceed(turn, incident)


def start_waiting(turn: StepContext) -> None:
    """Start what waited: what people said yes to, or are asked anew, or what can work by now."""
    state, incident = turn.state, turn.state.incident
    if incident is None or incident.run is not None:
        return
    anew = incident.deferred.anew or checkpoint_choice.lacked(turn.policy, state, incident)
    if anew is not None:
        name, rung, why, climbed = anew
        start(turn, incident, name, rung, why, climbed=climbed)
        return
    pending = state.approvals.pending
    if pending is None or not pending.granted:
        return
    approvals.settle(turn, "approved", f"by {pending.granted}", pending.granted)
    for rule in turn.policy.rules:
        if rule.id in incident.rules and rule.runbook is not None:
            state.history.cooldown[rule.id] = (state.pace, pending.rung)
    why = f"{pending.why}; approved by {pending.granted}"
    start(
        turn,
        incident,
        pending.runbook,
        pending.rung,
        why,
        climbed=pending.climbed,
        approved=pending,
    )


def start_asked(
    turn: StepContext, incident: Incident, book: Runbook, operator: str, before: int | None
) -> None:
    """Start what an operator asked for; whoever calls has seen that it can work here."""
    tried, held = incident.escalation, incident.phase == HELD
    tried.runs += 1
    order = OperatorOrder(operator, held, before)
    incident.run = RunbookExecution(tried.runs, book, incident.severity, order=order)
    _acts(turn, incident, f"{book.name} asked by {operator}")
    proceed(turn, incident)


def _stand_in(
    turn: StepContext, incident: Incident, book: Runbook, rung: int, why: str, refusal: str
) -> None:
    """Try what the runbook names for where it cannot work; what did not help is not tried again."""
    name = HOLD if turn.state.history.tried.get(book.if_refused) is False else book.if_refused
    turn.record(
        "abort",
        f"{book.name} cannot run: {refusal}; {name} is tried instead",
        what="refused",
        runbook=book.name,
        instead=name,
    )
    start(turn, incident, name, escalation.place(turn.policy.ladder, name, rung), why, instead=True)


def _acts(turn: StepContext, incident: Incident, why: str) -> None:
    incident.phase = ACTING
    turn.move("run", why)


def proceed(turn: StepContext, incident: Incident) -> None:
    """Take the runbook to the next step that must wait for something."""
    while (run := incident.run) is not None:
        if incident.deferred.over:
            return  # nothing follows, see `session_change`
        failure = run.failure
        if failure.unpaused and failure.why is None:
            turn.record("abort", f"{run.runbook.name}: {failure.unpaused}", what="pause-ended")
            fail(turn, incident, failure.unpaused, sent=False)
            return
        if failure.why is not None:
            if not failure.undoing or turn.state.job.returncode is not None:
                _after_failure(turn, incident, run)
            else:
                steps.take_back(turn, incident, run, failure.undoing[0], "undo")
            return
        if run.index >= len(run.runbook.steps):
            _ended(turn, incident, run)
            return
        action, verb = run.runbook.steps[run.index], run.runbook.verbs[run.index]
        dead = turn.state.job.returncode is not None and verb != "relaunch"
        if (run.terms.reduced or dead) and (action.touches_job or verb == "verify"):
            run.index += 1  # of a job that has ended there is only evidence, and another start
        elif verb == "verify":
            run.verification.until = turn.state.pace + int(getattr(action, "within", 100))
            run.verification.frame_ns = turn.state.at_ns
            turn.record("verify", f"watching {action.within} steps for recovery", what="started")  # type: ignore[attr-defined]
            return
        elif verb == "notify":
            turn.notify(incident.severity, f"{incident.id}: {incident.headline}")
            run.index += 1
        elif verb == HOLD:
            closing.hold_by(turn, incident, run)
        elif verb == "undo":
            if incident.recovery.standing:
                newest = incident.recovery.standing[-1][1]
                steps.take_back(turn, incident, run, newest, f"{run.index}-undo")
                return
            run.index += 1
        elif action.destructive and (gone := withdrawal.gone(turn.policy, turn.state, action)):
            withdraw(turn, incident, gone)
            return
        else:
            why = steps.intend(turn, incident, run, action, verb)
            if why is not None:
                fail(turn, incident, why, sent=False)
            return


def finished(turn: StepContext, event: Finished) -> None:
    """Take an action's outcome; anything that nobody waits for is only noted."""
    incident, run = turn.state.incident, turn.state.run()
    if incident is None or run is None or run.intent.waiting_for != event.action_id:
        turn.record("note", f"late outcome of {event.action_id}", what="late-outcome", ok=event.ok)
        return
    run.intent.waiting_for, result = None, dict(event.result)
    job = turn.state.job
    if job.stopping:  # refused, or the job had ended by itself: then its own end counts
        job.stopping = event.ok and result.get("exit_code") is not None
    if not event.ok and run.intent.action is not None and run.intent.action.destructive:
        gone = withdrawal.gone(turn.policy, turn.state, run.intent.action)
        if gone:
            withdraw(turn, incident, gone, action={"id": event.action_id}, result=result)
            return
    if not event.ok:
        why = f"{event.action_id} failed: {event.error}"
        failure, refused = run.failure, result.get("refused") is True
        failure.refused = failure.why is None and refused and not failure.unpaused
        turn.record("abort", why, action={"id": event.action_id}, result=result)
        fail(turn, incident, why)
        return
    turn.record(
        "commit",
        f"{event.action_id} done {brief(result)}".rstrip(),
        action={"id": event.action_id},
        result=result,
    )
    _committed(turn.state, incident, run, result)
    proceed(turn, incident)


def _committed(
    state: State, incident: Incident, run: RunbookExecution, result: dict[str, Any]
) -> None:
    intent, job = run.intent, state.job
    assert intent.action is not None
    if intent.verb in ("resume", "relaunch"):
        job.paused = False
    if intent.verb == "relaunch" and result.get("attempt") != job.launched:
        # Another process runs that nobody has told of; one that was may have ended since.
        job.returncode, job.ended = None, False
    if run.failure.why is not None:
        compensation.tried(incident.recovery, run.failure.undoing.pop(0))
    elif run.runbook.verbs[run.index] == "undo":
        compensation.tried(incident.recovery, intent.action)
    else:
        compensation.committed(incident, run, intent.action, intent.verb, result)
        run.done.append(run.index)
        # The attempt tells a frame after a rollback from one before the action.
        shown = {"seen_attempt": state.attempt, **result}
        run.verification.effects.append((run.index, intent.args, shown))
        run.index += 1


def withdraw(turn: StepContext, incident: Incident, why: str, **data: Any) -> None:
    """Leave a runbook whose reason is gone: what it did is taken back, and nothing else is tried.

    Its rules may ask for it again: this one does not count as tried.
    """
    run, state = incident.run, turn.state
    assert run is not None
    turn.record(
        "abort",
        f"{run.runbook.name} withdrawn: {why}",
        what="withdrawn",
        runbook=run.runbook.name,
        **data,
    )
    run.failure.withdrawn = True
    incident.escalation.rung = run.terms.entered
    state.history.tried.pop(run.runbook.name, None)
    state.history.cooldown.pop(incident.trigger.asked_by, None)
    fail(turn, incident, why, sent=False)


def fail(turn: StepContext, incident: Incident, why: str, *, sent: bool = True) -> None:
    """A step failed: take back what can be, newest first; with `sent` the step itself too."""
    run, recovery = incident.run, incident.recovery
    assert run is not None
    failure, run.intent.waiting_for = run.failure, None
    if incident.deferred.over:
        compensation.left_open(recovery, run)
        failure.why = why
    elif failure.why is None and run.runbook.verbs[run.index] != "undo":
        failure.why = why
        failure.undoing = compensation.of_run(recovery, run, run.index if sent else None)
    else:  # an undo: it is not tried again, a person must know
        assert run.intent.action is not None
        compensation.tried(recovery, run.intent.action)
        rest = failure.undoing[1:] if failure.why else compensation.of_run(recovery, run, None)
        failure.why, failure.undoing, failure.exhausted = failure.why or why, rest, True
        incident.severity = "SEV0"
        turn.notify("SEV0", f"{incident.id}: taking an action back failed", verdict=why)
    proceed(turn, incident)


def _after_failure(turn: StepContext, incident: Incident, run: RunbookExecution) -> None:
    failure, why = run.failure, run.failure.why
    assert why is not None
    after, incident.run = run.runbook.if_it_fails, None
    if turn.state.job.returncode is not None:  # nothing is left to be acted upon
        incident.phase, turn.state.job.stays = OPEN, why
    elif failure.withdrawn and not failure.exhausted:
        _left_alone(turn, incident, run)
    elif run.order.operator:
        _handed_back(turn, incident, run)
    elif failure.exhausted or incident.escalation.runs > 2 * len(turn.policy.runbooks) + 1:
        closing.hold(turn, incident, why)
    elif failure.useless:
        climb(turn, incident, why)
    elif failure.refused and run.runbook.if_refused and not run.terms.instead:
        _stand_in(turn, incident, run.runbook, incident.escalation.rung, why, why)
    elif HOLD in run.runbook.verbs:
        closing.hold_by(turn, incident, run)
    elif after == HOLD:
        closing.hold(turn, incident, why)
    else:
        start(turn, incident, after, escalation.place(turn.policy.ladder, after, -1), why)


def _left_alone(turn: StepContext, incident: Incident, run: RunbookExecution) -> None:
    """The reason for a runbook is gone: the incident is watched until its rules stay quiet."""
    incident.reopen()
    turn.move("given_up", f"{run.runbook.name} withdrawn: {run.failure.why}")
    turn.notify(
        incident.severity,
        f"{incident.id}: {run.runbook.name} withdrawn",
        verdict=str(run.failure.why),
        why=incident.headline,
        news=True,
        then="the job goes on; no action is under way",
    )
    start_waiting(turn)


def climb(turn: StepContext, incident: Incident, why: str) -> None:
    """What was tried did not help: it is taken back, and then comes the next rung."""
    opening.invalidate_attempt(turn.state, incident)
    standing = compensation.everything(incident.recovery)
    if standing:
        incident.phase = ACTING
        number, book = incident.escalation.runs, Runbook("undo", (), ())
        failure = RunbookFailure(why, standing, useless=True)
        incident.run = RunbookExecution(number, book, incident.severity, failure=failure)
        proceed(turn, incident)
        return
    tried = incident.escalation.rung
    name, rung = escalation.climb(turn.policy.ladder, tried)
    start(turn, incident, name, rung, why, climbed=tried >= 0)


def _ended(turn: StepContext, incident: Incident, run: RunbookExecution) -> None:
    """The runbook is through without a verify step: it only told, took evidence, or stopped."""
    incident.run = None
    if run.order.operator:
        _handed_back(turn, incident, run)
    elif any(run.runbook.steps[i].touches_job for i in run.done):
        _on_probation(turn, incident, f"{run.runbook.name} is done")
    else:
        if incident.phase != HELD:
            incident.reopen()
        start_waiting(turn)


def _handed_back(turn: StepContext, incident: Incident, run: RunbookExecution) -> None:
    """What an operator asked for is done, or could not be: the incident goes on from there."""
    order, failed = run.order, run.failure.why
    if failed is not None:
        turn.notify("SEV2", f"{incident.id}: not done for {order.operator}", verdict=failed)
    if order.held:
        incident.phase = HELD
    elif failed is None:
        _on_probation(turn, incident, f"{run.runbook.name} is done for {order.operator}")
    else:
        incident.reopen()
        turn.move("given_up", failed)
    start_waiting(turn)


def _on_probation(turn: StepContext, incident: Incident, why: str) -> None:
    if turn.state.approvals.pending is not None or incident.deferred.anew is not None:
        incident.reopen()
        turn.move("ask", f"{why}; a request of {incident.id} waits")
        start_waiting(turn)
        return
    incident.phase = PROBATION
    incident.ending.probation_until = turn.state.pace + turn.policy.probation_steps
    turn.move("verified", why)


def verified(turn: StepContext, incident: Incident, why: str) -> None:
    """The runbook did what it was for: on to probation."""
    steps.helped(turn.state.history, incident)
    incident.run = None
    turn.record("verify", why, what="passed", severity=incident.severity)
    _on_probation(turn, incident, why)
    if incident.phase == PROBATION:
        turn.notify(
            incident.severity,
            f"{incident.id}: contained, on probation",
            verdict=why,
            then=f"on probation for {turn.policy.probation_steps} steps",
        )
