"""What a rule that fired leads to: an incident, and a runbook when the policy wants one.

All rules of an event are enlisted before anything is answered; the most severe one speaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..detection.rank_monitor import RankMonitor
from ..incidents import (
    action_planning,
    approvals,
    data_suspicion,
    diagnosis,
    flapping,
    grouping,
    opening,
    precedence,
    stall,
    withdrawal,
)
from ..model import escalation, state_machine
from ..model.action import Refused
from ..model.decisions import ACTING_MODES, SEVERITIES
from ..model.policy import HOLD, Policy, Rule
from ..runbooks import runner
from ..state.incident import HELD, PROBATION, first_breach, headline
from ..state.run_state import State, StepContext
from ..state.runbook_execution import RunbookExecution
from . import job_lifecycle


def moved(turn: StepContext, bank: RankMonitor, rank: int, changes: list[tuple[int, bool]]) -> None:
    """Take `(rule index, fired)` of one rank and one event."""
    policy, state = turn.policy, turn.state
    was_in, fired = state.machine, []
    for r, began in changes:
        rule = policy.rules[r]
        if began:
            numbers = bank.numbers(rule)
            fired.append((rule, numbers))
            turn.record(
                "rule",
                f"{rule.id} fired: {headline(numbers, rule.text)}",
                rule=rule.id,
                severity=rule.severity,
                what="fired",
                when=rule.text,
                rank=rank,
                numbers=numbers,
            )
        else:
            turn.record(
                "rule",
                f"{rule.id} cleared",
                rule=rule.id,
                severity=rule.severity,
                what="cleared",
                rank=rank,
            )
        flapping.changed(turn, rule, rank)
        if began:
            flapping.hold_on(policy, state, rule, bank.rules[r])
    firing = set(state.firing(policy))
    state.rules.unmute_cleared(firing)
    if fired:
        _answer(turn, bank, fired, firing, was_in)


def unmuted(turn: StepContext, bank: RankMonitor) -> None:
    """Offer rules again that still fire when what muted them is gone."""
    policy, state, muted = turn.policy, turn.state, turn.state.rules.muted
    firing = set(state.firing(policy))
    free = [
        (rule, bank.numbers(rule))
        for rule in policy.rules
        if rule.id in muted and _muted(policy, state, bank, rule, firing, state.machine) is None
    ]
    for rule, _ in free:
        del muted[rule.id]
    if free:
        _answer(turn, bank, free, firing, state.machine)


def _answer(
    turn: StepContext,
    bank: RankMonitor,
    fired: list[tuple[Rule, dict[str, Any]]],
    firing: set[str],
    was_in: str,
) -> None:
    """Enlist what fired, most severe first, then let the first rule that acts speak."""
    state = turn.state
    fired.sort(key=lambda pair: SEVERITIES.index(pair[0].severity))
    acting: list[Rule] = []
    told = False
    for rule, numbers in fired:
        muted = _muted(turn.policy, state, bank, rule, firing, was_in)
        if muted is not None:
            turn.record(
                "suppressed",
                f"{rule.id} is muted by {muted.partition(':')[2]}",
                rule=rule.id,
                severity=rule.severity,
                suppressed_by=muted,
            )
            state.rules.muted[rule.id] = muted
            continue
        text = headline(numbers, rule.text)
        told |= grouping.group(turn, bank, rule, numbers, text, told=told)
        if rule.runbook is None:
            continue
        mode = turn.policy.mode_of(rule)
        if mode in ACTING_MODES:
            acting.append(rule)
        else:
            _shadow(turn, rule, mode)
    if acting:
        _respond(turn, bank, acting[0])
    elif state.incident is not None and state.machine == state_machine.NOMINAL:
        turn.move("notice", f"{state.incident.id}: {state.incident.headline}")


def _muted(
    policy: Policy, state: State, bank: RankMonitor, rule: Rule, firing: set[str], was_in: str
) -> str | None:
    """Return what mutes a rule, None: it may speak.

    `silence:<who>`, `session_end:<incident>`, `inhibit:<rule, state>` or `planned:<what>`.
    """
    incident = state.incident
    if (silent := state.silence(rule.id)) is not None:
        return f"silence:{silent}"
    if incident is not None and incident.deferred.over:
        return f"session_end:{incident.id}"
    for inhibit in policy.inhibit:
        if rule.id not in inhibit.mute:
            continue
        if inhibit.by_rule is not None and inhibit.by_rule in firing:
            return f"inhibit:{inhibit.by_rule}"
        if was_in in inhibit.by_state:
            return f"inhibit:{was_in}"
    planned = diagnosis.announced(policy, state.step, bank, rule)
    return None if planned is None else f"planned:{planned}"


def _respond(turn: StepContext, bank: RankMonitor, rule: Rule) -> None:
    """A rule with a runbook fired, may act, and nothing mutes it."""
    policy, state, incident = turn.policy, turn.state, turn.state.incident
    assert incident is not None
    assert rule.runbook is not None
    incident.trigger.asks |= policy.mode_of(rule) == "approve"
    floor = escalation.floor(policy.ladder, state.history.floor, state.pace)
    name, rung = escalation.entry(policy.ladder, rule.runbook, floor)
    aside = rung < 0  # on no rung: neither the ladder nor a hold is about it
    if incident.phase == HELD and not aside:
        _suppress(turn, rule, f"{rule.id}: held, a person is needed", "holding")
        return
    place = policy.rules.index(rule)
    watch, same = bank.rules[place], _answered(state.banks, bank, place)
    if same is not None:  # the same trouble, seen from another rank
        watch.answered = True
        _suppress(
            turn, rule, f"{rule.id} still fires on rank {same}, where it was answered", "answered"
        )
        return
    if precedence.over(incident, bank, rule):
        why = f"{rule.id}: from before attempt {incident.recovery.back}"
        _suppress(turn, rule, why, "acting")
        incident.deferred.waiting.append(rule.id)
        return
    if incident.run is not None:
        _meanwhile(turn, bank, rule, incident.run, (name, rung))
        return
    if not aside and approvals.suspended(state, incident, rule.severity):
        _suppress(turn, rule, f"{rule.id}: {incident.id} waits for approval", "approval")
        return
    last = state.history.cooldown.get(rule.id)
    cooling = last is not None and state.pace - last[0] < rule.cooldown_steps
    why = f"{rule.id}: {incident.headline}"
    tried = max(incident.escalation.rung, last[1] if cooling and last is not None else -1)
    again = not aside and (cooling or incident.phase == PROBATION) and rung <= tried
    if again:
        why = f"{rule.id} fired on probation" if not cooling else f"{rule.id} is in its cooldown"
        why += f", and {name} was tried"
        _suppress(turn, rule, why, "cooldown" if cooling else "probation", runbook=name)
        incident.escalation.rung, (_, rung) = tried, escalation.climb(policy.ladder, tried)
    if incident.phase == PROBATION:  # a new trouble: what is gone back before is its own begin
        incident.breach_step = first_breach(bank.numbers(rule), bank.step)
        opening.mark_suspect(state, incident)
        data_suspicion.began(turn, bank, incident, rule, incident.breach_step)
    watch.answered = True
    still = stall.told_by(bank, rule)
    withdrawal.asked(incident.trigger, rule, still=still)
    if still and job_lifecycle.given_up(turn, incident, name):
        return
    if again:
        runner.climb(turn, incident, why)
    else:
        runner.start(turn, incident, name, rung, why, climbed=not aside and name != rule.runbook)
    if state.approvals.pending is None:  # else nothing was tried yet
        state.history.cooldown[rule.id] = (state.pace, rung)


def _suppress(turn: StepContext, rule: Rule, why: str, by: str, **data: Any) -> None:
    """Record that a rule fired and is not answered, and what keeps it."""
    turn.record("suppressed", why, rule=rule.id, severity=rule.severity, suppressed_by=by, **data)


def _meanwhile(
    turn: StepContext, bank: RankMonitor, rule: Rule, run: RunbookExecution, wanted: tuple[str, int]
) -> None:
    """A rule asks for a runbook, and a rung, while another one runs."""
    policy, incident, (name, rung) = turn.policy, turn.state.incident, wanted
    assert incident is not None
    if precedence.outranks(policy, bank, rule, run):
        if 0 <= rung <= (at := incident.escalation.rung):
            name, rung = escalation.climb(policy.ladder, at)
        bank.rules[policy.rules.index(rule)].answered = True
        _preempt(turn, bank, rule, name, rung)
        return
    turn.record(
        "suppressed",
        f"{rule.id}: {run.runbook.name} is running",
        rule=rule.id,
        severity=rule.severity,
        suppressed_by="acting",
    )
    if rung < 0 and rule.runbook != run.runbook.name:  # else it is judged by whether that one helps
        incident.deferred.waiting.append(rule.id)


def _answered(banks: Mapping[int, RankMonitor], bank: RankMonitor, place: int) -> int | None:
    """Return another rank on which the rule at that place fires and was answered."""
    for rank, other in banks.items():
        if other is not bank and other.rules[place].firing and other.rules[place].answered:
            return rank
    return None


def _preempt(turn: StepContext, bank: RankMonitor, rule: Rule, name: str, rung: int) -> None:
    """Something worse came up: leave a runbook that is only being verified; never cut an action."""
    incident = turn.state.incident
    assert incident is not None
    run = incident.run
    assert run is not None
    if run.busy():
        turn.record(
            "suppressed",
            f"{rule.id}: {run.runbook.name} is in the middle of an action",
            rule=rule.id,
            severity=rule.severity,
            suppressed_by="acting",
        )
        incident.deferred.waiting.append(rule.id)
        return
    turn.record("verify", f"{run.runbook.name} is preempted by {rule.id}", what="preempted")
    incident.run = None
    if rung >= 0:
        opening.invalidate_attempt(turn.state, incident)
    turn.state.history.cooldown[rule.id] = (turn.state.pace, rung)
    still = stall.told_by(bank, rule)
    withdrawal.asked(incident.trigger, rule, still=still)
    if still and job_lifecycle.given_up(turn, incident, name):
        return
    climbed = rung >= 0 and name != rule.runbook
    runner.start(turn, incident, name, rung, f"{rule.id}: {incident.headline}", climbed=climbed)


def waited(turn: StepContext) -> None:
    """Answer what had to wait for an action, or for a runbook's end, if it is still a reason to."""
    state, incident = turn.state, turn.state.incident
    if incident is None or not incident.deferred.waiting:
        return
    deferred = incident.deferred
    if incident.run is not None and incident.run.busy():
        return
    firing = set(state.firing(turn.policy))
    found = list(precedence.due(turn.policy, state.banks, incident))
    deferred.waiting = [] if found else [name for name in deferred.waiting if name in firing]
    if found:
        rule, bank = min(found, key=lambda pair: SEVERITIES.index(pair[0].severity))
        _respond(turn, bank, rule)


def _shadow(turn: StepContext, rule: Rule, mode: str) -> None:
    """Write down what enforce would have done; touch nothing."""
    incident = turn.state.incident
    assert incident is not None
    assert rule.runbook is not None
    if turn.state.machine == state_machine.NOMINAL:
        turn.move("notice", f"{incident.id}: {incident.headline}")
    shadowed = incident.escalation.shadowed
    if mode == "observe" or rule.runbook in shadowed:
        return
    shadowed.append(rule.runbook)
    where = action_planning.aim(turn.state, incident)
    steps: list[object] = []
    if rule.runbook != HOLD:
        book = turn.policy.runbooks[rule.runbook]
        for verb, action in zip(book.verbs, book.steps, strict=True):
            try:
                steps.append({"verb": verb, "args": action.aim(where)})
            except Refused as refusal:
                steps.append({"verb": verb, "refused": str(refusal)})
    turn.record(
        "suppressed",
        f"{mode}: would have run {rule.runbook}",
        rule=rule.id,
        severity=rule.severity,
        suppressed_by=f"mode:{mode}",
        runbook=rule.runbook,
        would=steps,
    )
    turn.notify(
        incident.severity,
        f"{incident.id}: {rule.id}",
        then=f"{mode} mode: would have run {rule.runbook}",
    )
