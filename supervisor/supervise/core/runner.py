"""Runbooks in progress: intent, effect, commit, verification, and what happens when one fails.

A step is intended (and on disk) before it is performed; its outcome comes back as `Finished`. The
engine itself carries out `notify` and `verify`. A failed runbook first takes back what it can, then
follows `if_it_fails`.
"""

from __future__ import annotations

from typing import Any

from . import ladder
from .bank import LOSS
from .incident import ACTING, HELD, PROBATION, Incident, Run
from .rule import HOLD
from .shapes import Action, Aim, Refused
from .state import State, Turn
from .values import BREACH, UNKNOWN, Finished, Frame

OVERDUE_S = 30.0  # past an action's own deadline, its outcome is in doubt


def start(turn: Turn, incident: Incident, name: str, rung: int, why: str) -> None:
    """Start runbook `name` for the incident, or hold when that is what the ladder says."""
    if name == HOLD:
        hold(turn, incident, why)
        return
    incident.runs += 1
    incident.rung = rung
    incident.phase = ACTING
    incident.run = Run(incident.runs, turn.policy.runbooks[name], rung)
    turn.state.floor = (rung, turn.state.pace)
    turn.move("run", f"runbook {name}: {why}")
    turn.tell(
        incident.severity, f"{incident.id}: running {name}", why=why, then=f"runbook {name} runs"
    )
    proceed(turn, incident)


def hold(turn: Turn, incident: Incident, why: str) -> None:
    """Stop acting and wait for a person. The job itself goes on."""
    incident.phase, incident.run = HELD, None
    turn.move("hold", why)
    turn.say("incident", f"held: {why}", what="held", severity=incident.severity)
    turn.tell(
        incident.severity if incident.severity != "SEV2" else "SEV1",
        f"{incident.id}: held, a person is needed",
        verdict=why,
        then="no further action until somebody releases the hold; the job goes on",
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
            _intend(turn, incident, run, action, _verb(action), f"undo-{_verb(action)}", {})
            return
        if run.index >= len(run.runbook.steps):
            _verified(turn, incident, "the runbook has no verify step")
            return
        action, verb = run.runbook.steps[run.index], run.runbook.verbs[run.index]
        if verb == "verify":
            run.verify_until = turn.state.pace + int(getattr(action, "within", 100))
            turn.say("verify", f"watching {action.within} steps for recovery", what="started")  # type: ignore[attr-defined]
            return
        if verb == "notify":
            turn.tell(incident.severity, f"{incident.id}: {incident.headline}")
            run.index += 1
            continue
        if not _allowed(turn, incident, run, action, verb):
            return
        try:
            args = action.aim(aim(turn.state, incident))
        except Refused as refusal:
            turn.say("abort", f"{verb} refused: {refusal}", what="refused", verb=verb)
            fail(turn, incident, f"{verb} refused: {refusal}")
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
    fail(turn, incident, why, exhausted=True)
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
        f"{verb} {_brief(args)}".rstrip(),
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
    if event.ok:
        turn.say("commit", f"{event.action_id} done {_brief(result)}".rstrip(),
                 action={"id": event.action_id}, result=result)  # fmt: skip
        if undoing:
            run.undoing.pop(0)
        else:
            run.done.append(run.index)
            run.effects.append((run.index, run.args, result))
            run.index += 1
    else:
        why = f"{event.action_id} failed: {event.error}"
        turn.say("abort", why, action={"id": event.action_id}, result=result)
        if undoing:
            run.undoing.pop(0)
            incident.severity = "SEV0"
            turn.tell("SEV0", f"{incident.id}: taking an action back failed", verdict=why)
        else:
            fail(turn, incident, why)
            return
    proceed(turn, incident)


def fail(turn: Turn, incident: Incident, why: str, *, exhausted: bool = False) -> None:
    """The runbook failed: take back what can be taken back, newest first."""
    run = incident.run
    assert run is not None
    run.failed, run.exhausted = why, exhausted
    verbs = [run.runbook.verbs[i] for i in run.done]
    for position in range(len(run.done) - 1, -1, -1):
        undo = run.runbook.steps[run.done[position]].undo()
        if undo is not None and _verb(undo) not in verbs[position + 1 :]:
            run.undoing.append(undo)
    proceed(turn, incident)


def _after_failure(turn: Turn, incident: Incident, run: Run) -> None:
    assert run.failed is not None
    after, incident.run = run.runbook.if_it_fails, None
    if run.exhausted or after == HOLD or incident.runs > len(turn.policy.runbooks) + 1:
        hold(turn, incident, run.failed)
        return
    rungs = turn.policy.ladder.rungs
    start(turn, incident, after, rungs.index(after) if after in rungs else -1, run.failed)


def climb(turn: Turn, incident: Incident, why: str) -> None:
    """What was tried did not help: the next rung."""
    name, rung = ladder.climb(turn.policy.ladder, incident.rung)
    start(turn, incident, name, rung, why)


# ── verification ──────────────────────────────────────────────────────────────────────────────────


def watch(turn: Turn, incident: Incident, frame: Frame) -> None:
    """Judge the runbook's effect by the frames that follow it."""
    run = incident.run
    if run is None or run.verify_until is None or run.failed is not None:
        return
    missing = _missing_effect(turn, run, frame)
    if missing is not None:
        turn.say("verify", missing, what="failed")
        incident.run = None
        climb(turn, incident, missing)
        return
    trouble = _trouble(turn, incident, frame)
    if trouble:
        run.clear_steps, run.last_trouble = 0, trouble
    else:
        run.clear_steps += 1
    needed = int(getattr(run.runbook.steps[run.index], "clear_for", 20))
    if run.clear_steps >= needed:
        loss = turn.state.banks[frame.rank].value(LOSS)
        band = incident.band
        where = f", loss {loss:.4g}" if loss is not None else ""
        where += f" under {band.limit:.4g}" if band is not None and loss is not None else ""
        _verified(turn, incident, f"{run.runbook.name}: quiet for {needed} steps{where}")
    elif turn.state.pace > run.verify_until:
        why = f"{run.runbook.name} did not help: {run.last_trouble or 'not quiet for long enough'}"
        turn.say("verify", why, what="failed", clear_steps=run.clear_steps)
        incident.run = None
        climb(turn, incident, why)


def _missing_effect(turn: Turn, run: Run, frame: Frame) -> str | None:
    """Check every action's effect on the first frame that can show it."""
    bank = turn.state.banks[frame.rank]
    values = dict(zip(bank.names, bank.latest, strict=False))
    waiting = []
    for index, args, result in run.effects:
        if "attempt" in result:  # a rollback: its first frame is the first of the new attempt
            early = frame.attempt < result["attempt"]
        else:
            early = frame.step <= result.get("ack_step", -1)
        if early:
            waiting.append((index, args, result))
            continue
        found = run.runbook.steps[index].effect(args, result, values, frame.step, frame.attempt)
        if found is not None:
            return f"{run.runbook.verbs[index]} had no effect: {found}"
    run.effects = waiting
    return None


def _trouble(turn: Turn, incident: Incident, frame: Frame) -> str:
    for r, rule in enumerate(turn.policy.rules):
        if rule.id not in incident.rules:
            continue
        for rank, bank in turn.state.banks.items():
            code = bank.rules[r].code
            if code == BREACH or (code == UNKNOWN and rule.unknown == "hold" and bank.active(r)):
                word = "is in breach" if code == BREACH else "cannot be judged"
                return f"{rule.id} {word} at step {frame.step} on rank {rank}"
    loss, band = turn.state.banks[frame.rank].value(LOSS), incident.band
    if loss is None or band is None:
        return ""
    if not loss <= band.limit:
        return f"loss {loss:.4g} at step {frame.step} is not under {band.limit:.4g}"
    return ""


def _verified(turn: Turn, incident: Incident, why: str) -> None:
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


def _verb(action: Action) -> str:
    return type(action).__module__.rpartition(".")[2]


def _brief(args: dict[str, Any]) -> str:
    parts = [f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in args.items()]
    return ", ".join(parts)[:160]
