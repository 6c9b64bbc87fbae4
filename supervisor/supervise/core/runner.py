"""Runbooks in progress: intent, effect, commit, and what happens when one fails.

A step is intended (and on disk) before it is performed; its outcome comes back as `Finished`. The
engine itself carries out `notify` and `verify` (see verification.py). A failed runbook first takes
back what it can, then follows `if_it_fails`.
"""

from __future__ import annotations

from typing import Any

from . import ladder, questions
from .action import Action, Aim, Refused
from .incident import ACTING, HELD, OPEN, PROBATION, Incident, Run, brief, verb_of
from .rule import HOLD, Runbook
from .state import State, Turn
from .values import Finished

OVERDUE_S = 30.0  # past an action's own deadline, its outcome is in doubt


def start(
    turn: Turn, incident: Incident, name: str, rung: int, why: str, *, climbed: bool = False
) -> None:
    """Start runbook `name` for the incident, or hold when that is what the ladder says.

    Args:
        climbed: it was not asked for: what is below it on the ladder was tried.
    """
    if name == HOLD:
        hold(turn, incident, why, exhausted=climbed)
        return
    book = turn.policy.runbooks[name]
    refusal = _refusal(turn, incident, book)
    incident.runs += 1
    incident.rung = rung
    incident.run = Run(incident.runs, book, incident.severity, reduced=refusal)
    if refusal:
        turn.say("abort", f"{name} cannot run: {refusal}", what="refused", runbook=name)
        turn.tell(
            incident.severity if incident.severity != "SEV2" else "SEV1",
            f"{incident.id}: nothing can be done about it here",
            verdict=incident.headline,
            why=f"{name}: {refusal}",
            then="evidence is taken; the job goes on; a person should look",
            news=True,
        )
    elif any(step.touches_job for step in book.steps):
        incident.phase = ACTING
        turn.state.floor = (rung, turn.state.pace)
        turn.move("run", f"runbook {name}: {why}")
        title = f"{incident.id}: running {name}"
        turn.tell(incident.severity, title, why=why, then=f"runbook {name} runs")
    proceed(turn, incident)


def _refusal(turn: Turn, incident: Incident, book: Runbook) -> str:
    """Say why a step of the runbook cannot work here, "" when all can: asked before any is done."""
    where = aim(turn.state, incident)
    for verb, step in zip(book.verbs, book.steps, strict=True):
        try:
            step.aim(where)
        except Refused as refusal:
            return f"{verb}: {refusal}"
    return ""


def hold(turn: Turn, incident: Incident, why: str, *, exhausted: bool = False) -> None:
    """Stop acting and wait for a person. The job itself goes on.

    Args:
        exhausted: the trouble outlived the ladder; then the class says that no knob will fix it.
    """
    incident.phase, incident.run = HELD, None
    incident.exhausted |= exhausted
    incident.verdict = questions.conclude(turn, incident) if exhausted else incident.verdict
    found, then = incident.verdict, "no further action until `supervise release RUN`"
    turn.move("hold", why)
    data: dict[str, Any] = {} if found is None else {"spike": found.data()}
    turn.say("incident", f"held: {why}", what="held", severity=incident.severity, **data)
    turn.tell(
        incident.severity if incident.severity != "SEV2" else "SEV1",
        f"{incident.id}: held, a person is needed",
        verdict=why if found is None else f"{why}; {found.text}",
        then=f"{then}; the job goes on" + (f"; {found.advice}" if found is not None else ""),
        news=True,
    )


def proceed(turn: Turn, incident: Incident) -> None:
    """Take the runbook to the next step that must wait for something."""
    run = incident.run
    while run is not None:
        if run.failed is not None:
            if not run.undoing:
                _after_failure(turn, incident, run)
                return
            action = run.undoing[0]
            try:
                args = action.aim(aim(turn.state, incident))
            except Refused:
                args = {}  # it is tried all the same: what it cannot do must be heard of
            _intend(turn, incident, run, action, verb_of(action), f"undo-{verb_of(action)}", args)
            return
        if run.index >= len(run.runbook.steps):
            _ended(turn, incident, run)
            return
        action, verb = run.runbook.steps[run.index], run.runbook.verbs[run.index]
        if run.reduced and (action.touches_job or verb == "verify"):
            run.index += 1
            continue
        if verb == "verify":
            run.verify_until = turn.state.pace + int(getattr(action, "within", 100))
            run.verify_ns = turn.state.at_ns
            turn.say("verify", f"watching {action.within} steps for recovery", what="started")  # type: ignore[attr-defined]
            return
        if verb == "notify":
            turn.tell(incident.severity, f"{incident.id}: {incident.headline}")
            run.index += 1
            continue
        try:
            args = action.aim(aim(turn.state, incident))
        except Refused as refusal:
            turn.say("abort", f"{verb} refused: {refusal}", what="refused", verb=verb)
            fail(turn, incident, f"{verb} refused: {refusal}", sent=False)
            return
        if not _allowed(turn, incident, run, action, verb):
            return
        _intend(turn, incident, run, action, verb, f"{run.index}-{verb}", args)
        return


def awaited(state: State) -> Action:
    """Return the action that the newest intent asked for."""
    run = state.incident.run if state.incident is not None else None
    assert run is not None
    assert run.waiting_for is not None
    return run.undoing[0] if run.failed is not None else run.runbook.steps[run.index]


def aim(state: State, incident: Incident) -> Aim:
    """Return what an action may know when its arguments are worked out."""
    return Aim(
        incident=incident.id,
        step=state.step,
        breach_step=incident.breach_step,
        attempt=state.attempt,
        world_size=state.world_size,
        severity=incident.severity,
        unable=state.unable,
    )


def _allowed(turn: Turn, incident: Incident, run: Run, action: Action, verb: str) -> bool:
    state, kind = turn.state, action.budget
    if kind is None:
        return True
    spent = state.ledger.exhausted(turn.policy.budgets, kind, state.pace, state.at_ns)
    if spent is None:
        state.ledger.spend(kind, state.pace, state.at_ns)
        return True
    name, budget, used = spent
    why = f"budget {name} is spent ({used} of {budget.max})"
    turn.say(
        "suppressed", f"{verb}: {why}", suppressed_by=f"budget:{name}", verb=verb, used=used,
        max=budget.max,
    )  # fmt: skip
    run.exhausted = True
    fail(turn, incident, why, sent=False)
    return False


def _intend(
    turn: Turn,
    incident: Incident,
    run: Run,
    action: Action,
    verb: str,
    label: str,
    args: dict[str, Any],
) -> None:
    state = turn.state
    run.waiting_for = f"{incident.id}/{run.number}/{label}"
    run.args = args
    run.overdue_ns = state.at_ns + int((action.deadline_s + OVERDUE_S) * 1e9)
    turn.say(
        "intent",
        f"{verb} {brief(args)}".rstrip(),
        severity=incident.severity,
        action={
            "id": run.waiting_for,
            "verb": verb,
            "runbook": run.runbook.name,
            "args": args,
            "destructive": action.destructive,
            "touches_job": action.touches_job,
        },
        budget=state.ledger.usage(turn.policy.budgets, state.pace, state.at_ns),
    )
    if verb == "stop":
        state.stopping = True


def finished(turn: Turn, event: Finished) -> None:
    """Take an action's outcome; anything that nobody waits for is only noted."""
    incident = turn.state.incident
    run = incident.run if incident is not None else None
    if incident is None or run is None or run.waiting_for != event.action_id:
        turn.say("note", f"late outcome of {event.action_id}", what="late-outcome", ok=event.ok)
        return
    run.waiting_for = None
    undoing = run.failed is not None
    result = dict(event.result)
    if turn.state.stopping:  # refused, or the job had ended by itself: then its own end counts
        turn.state.stopping = event.ok and result.get("exit_code") is not None
    if event.ok:
        turn.say("commit", f"{event.action_id} done {brief(result)}".rstrip(),
                 action={"id": event.action_id}, result=result)  # fmt: skip
        if undoing:
            run.undoing.pop(0)
        else:
            run.done.append(run.index)
            # The attempt tells a frame after a rollback from one before the action.
            shown = {"seen_attempt": turn.state.attempt, **result}
            run.effects.append((run.index, run.args, shown))
            run.index += 1
    else:
        why = f"{event.action_id} failed: {event.error}"
        turn.say("abort", why, action={"id": event.action_id}, result=result)
        fail(turn, incident, why)
        return
    proceed(turn, incident)


def fail(turn: Turn, incident: Incident, why: str, *, sent: bool = True) -> None:
    """A step failed: take back what can be, newest first; with `sent` the step itself too."""
    run = incident.run
    assert run is not None
    run.waiting_for = None
    if run.failed is not None:  # an undo: it is not tried again, a person must know
        run.undoing.pop(0)
        incident.severity = "SEV0"
        turn.tell("SEV0", f"{incident.id}: taking an action back failed", verdict=why)
    else:
        run.failed = why
        run.undoing = _undos(run, [*run.done, run.index] if sent else run.done)
    proceed(turn, incident)


def _undos(run: Run, steps: list[int]) -> list[Action]:
    verbs, found = [run.runbook.verbs[i] for i in steps], []
    for position in reversed(range(len(steps))):
        undo = run.runbook.steps[steps[position]].undo()
        if undo is not None and verb_of(undo) not in verbs[position + 1 :]:
            found.append(undo)
    return found


def _after_failure(turn: Turn, incident: Incident, run: Run) -> None:
    assert run.failed is not None
    after, incident.run = run.runbook.if_it_fails, None
    if run.exhausted or after == HOLD or incident.runs > len(turn.policy.runbooks) + 1:
        hold(turn, incident, run.failed)
    else:
        rungs = turn.policy.ladder.rungs
        start(turn, incident, after, rungs.index(after) if after in rungs else -1, run.failed)


def climb(turn: Turn, incident: Incident, why: str) -> None:
    """What was tried did not help: the next rung."""
    name, rung = ladder.climb(turn.policy.ladder, incident.rung)
    start(turn, incident, name, rung, why, climbed=incident.rung >= 0)


def _ended(turn: Turn, incident: Incident, run: Run) -> None:
    """The runbook is through without a verify step: it only told, took evidence, or stopped."""
    incident.run = None
    if any(run.runbook.steps[i].touches_job for i in run.done):
        incident.phase = PROBATION
        incident.probation_until = turn.state.pace + turn.policy.probation_steps
        turn.move("verified", f"{run.runbook.name} is done")
    else:
        incident.phase, incident.quiet_since = OPEN, None


def verified(turn: Turn, incident: Incident, why: str) -> None:
    """The runbook did what it was for: on to probation."""
    incident.run, incident.phase = None, PROBATION
    incident.probation_until = turn.state.pace + turn.policy.probation_steps
    turn.say("verify", why, what="passed", severity=incident.severity)
    turn.move("verified", why)
    turn.tell(
        incident.severity,
        f"{incident.id}: contained, on probation",
        verdict=why,
        then=f"on probation for {turn.policy.probation_steps} steps",
    )
