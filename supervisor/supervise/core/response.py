"""What a rule that fired leads to: an incident, and a runbook when the policy wants one.

All rules of an event are enlisted before anything is answered; the most severe one speaks.
"""

from __future__ import annotations

from collections import deque

from . import ladder, machine, runner
from .bank import Bank
from .incident import HELD, PROBATION, Incident, band_of, first_breach, headline
from .rule import HOLD, Rule
from .shapes import Refused
from .state import Turn
from .values import MODES, SEVERITIES

FLAP_CHANGES, FLAP_STEPS = 6, 500  # policy.md 2.6, after Nagios


def moved(turn: Turn, bank: Bank, rank: int, changes: list[tuple[int, bool]]) -> None:
    """Take `(rule index, fired)` of one rank and one event."""
    policy, state = turn.policy, turn.state
    was_in, fired = state.machine, []
    for r, began in changes:
        rule = policy.rules[r]
        if began:
            numbers = bank.numbers(rule)
            fired.append((rule, numbers))
            turn.say(
                "rule", f"{rule.id} fired: {headline(numbers, rule.text)}", rule=rule.id,
                severity=rule.severity, what="fired", when=rule.text, rank=rank, numbers=numbers,
            )  # fmt: skip
        else:
            turn.say(
                "rule", f"{rule.id} cleared", rule=rule.id, severity=rule.severity,
                what="cleared", rank=rank,
            )  # fmt: skip
        _flap(turn, rule)
    if not fired:
        return
    fired.sort(key=lambda pair: SEVERITIES.index(pair[0].severity))
    firing = set(state.firing(policy))
    acting: list[Rule] = []
    for rule, numbers in fired:
        muted = _muted(turn, rule, firing, was_in)
        if muted is not None:
            turn.say(
                "suppressed", f"{rule.id} is muted by {muted}", rule=rule.id,
                severity=rule.severity, suppressed_by=f"inhibit:{muted}",
            )  # fmt: skip
            continue
        _enlist(turn, bank, rule, numbers)
        if rule.runbook is not None:
            acting.append(rule)
    if acting:
        _respond(turn, acting[0])
    elif state.incident is not None and state.machine == machine.NOMINAL:
        turn.move("notice", f"{state.incident.id}: {state.incident.headline}")


def _flap(turn: Turn, rule: Rule) -> None:
    state = turn.state
    flips = state.flips.setdefault(rule.id, deque(maxlen=FLAP_CHANGES + 1))
    flips.append(state.pace)
    busy = len(flips) == flips.maxlen and state.pace - flips[0] <= FLAP_STEPS
    if busy and rule.id not in state.flapping:
        state.flapping.add(rule.id)
        turn.say("note", f"{rule.id} is flapping: {len(flips)} changes in {FLAP_STEPS} steps",
                 rule=rule.id, what="flapping")  # fmt: skip
    elif not busy:
        state.flapping.discard(rule.id)


def _muted(turn: Turn, rule: Rule, firing: set[str], was_in: str) -> str | None:
    for inhibit in turn.policy.inhibit:
        if rule.id not in inhibit.mute:
            continue
        if inhibit.by_rule is not None and inhibit.by_rule in firing:
            return inhibit.by_rule
        if was_in in inhibit.by_state:
            return was_in
    return None


def _enlist(turn: Turn, bank: Bank, rule: Rule, numbers: dict[str, dict[str, object]]) -> None:
    """Open an incident for a rule, or let the rule join the open one."""
    state, incident = turn.state, turn.state.incident
    text, breach = headline(numbers, rule.text), first_breach(numbers, bank.step)
    if incident is None:
        state.incidents += 1
        incident = state.incident = Incident(
            f"inc-{state.incidents}", state.step, breach, rule.severity, [rule.id], headline=text
        )
        incident.band = band_of(bank.losses, breach)
        band = incident.band
        turn.say(
            "incident", f"{rule.severity} {rule.id}: {text}", rule=rule.id, severity=rule.severity,
            what="opened", breach_step=breach,
            band=None if band is None else {"level": band.level, "limit": band.limit},
        )  # fmt: skip
    elif incident.join(rule.id, rule.severity):
        incident.headline = text
        if incident.run is None:  # what was advisory until now may be much older than the trouble
            incident.breach_step, incident.band = breach, band_of(bank.losses, breach)
        turn.say("incident", f"raised to {rule.severity} by {rule.id}: {text}", rule=rule.id,
                 severity=rule.severity, what="raised",
                 breach_step=incident.breach_step)  # fmt: skip
    else:
        turn.say(
            "incident", f"{rule.id} joins", rule=rule.id, severity=rule.severity, what="joined"
        )
        return
    incident.quiet_since = None
    if rule.id not in state.flapping:
        turn.tell(rule.severity, f"{incident.id}: {rule.id} at step {state.step}",
                  verdict=text, why=f"when: {rule.text}", then="watching")  # fmt: skip


def _respond(turn: Turn, rule: Rule) -> None:
    """A rule with a runbook fired and nothing mutes it."""
    policy, state, incident = turn.policy, turn.state, turn.state.incident
    assert incident is not None and rule.runbook is not None
    mode = min(policy.mode, rule.mode or policy.mode, key=MODES.index)
    if mode != "enforce":
        _shadow(turn, incident, rule, mode)
        return
    if state.machine in (machine.HOLDING, machine.HALTED) or incident.phase == HELD:
        turn.say("suppressed", f"{rule.id}: {state.machine}, a person is needed", rule=rule.id,
                 severity=rule.severity, suppressed_by=state.machine)  # fmt: skip
        return
    floor = -1
    if state.floor is not None and state.pace - state.floor[1] < policy.ladder.reset_after_steps:
        floor = state.floor[0]
    name, rung = ladder.entry(policy.ladder, rule.runbook, floor)
    last = state.cooldown.get(rule.id)
    cooling = last is not None and state.pace - last[0] < rule.cooldown_steps
    if incident.run is not None:
        if SEVERITIES.index(rule.severity) < SEVERITIES.index(incident.run.severity):
            if rung <= incident.rung:
                name, rung = ladder.climb(policy.ladder, incident.rung)
            _preempt(turn, incident, rule, name, rung)
        return
    if cooling or incident.phase == PROBATION:
        assert last is not None or incident.phase == PROBATION
        before = max(rung, incident.rung, last[1] if cooling and last is not None else -1)
        why = f"{rule.id} fired again " + ("on probation" if not cooling else "inside its cooldown")
        turn.say("suppressed", f"{name}: {why}", rule=rule.id, severity=rule.severity,
                 suppressed_by="cooldown" if cooling else "probation", runbook=name)  # fmt: skip
        incident.rung = before
        name, rung = ladder.climb(policy.ladder, before)
        state.cooldown[rule.id] = (state.pace, rung)
        runner.start(turn, incident, name, rung, why)
        return
    state.cooldown[rule.id] = (state.pace, rung)
    runner.start(turn, incident, name, rung, f"{rule.id}: {incident.headline}")


def _preempt(turn: Turn, incident: Incident, rule: Rule, name: str, rung: int) -> None:
    """Something worse came up: leave a runbook that is only being verified; never cut an action."""
    run = incident.run
    assert run is not None
    if run.waiting_for is not None or run.failed is not None:
        turn.say("suppressed", f"{rule.id}: {run.runbook.name} is in the middle of an action",
                 rule=rule.id, severity=rule.severity, suppressed_by="acting")  # fmt: skip
        return
    turn.say("verify", f"{run.runbook.name} is preempted by {rule.id}", what="preempted")
    incident.run = None
    turn.state.cooldown[rule.id] = (turn.state.pace, rung)
    runner.start(turn, incident, name, rung, f"{rule.id}: {incident.headline}")


def _shadow(turn: Turn, incident: Incident, rule: Rule, mode: str) -> None:
    """Write down what enforce would have done; touch nothing."""
    assert rule.runbook is not None
    if turn.state.machine == machine.NOMINAL:
        turn.move("notice", f"{incident.id}: {incident.headline}")
    if mode == "observe" or rule.runbook in incident.shadowed:
        return
    incident.shadowed.append(rule.runbook)
    where = runner.aim(turn.state, incident)
    steps: list[object] = []
    if rule.runbook != HOLD:
        book = turn.policy.runbooks[rule.runbook]
        for verb, action in zip(book.verbs, book.steps, strict=True):
            try:
                steps.append({"verb": verb, "args": action.aim(where)})
            except Refused as refusal:
                steps.append({"verb": verb, "refused": str(refusal)})
    turn.say("suppressed", f"{mode}: would have run {rule.runbook}", rule=rule.id,
             severity=rule.severity, suppressed_by=f"mode:{mode}", runbook=rule.runbook,
             would=steps)  # fmt: skip
    turn.tell(incident.severity, f"{incident.id}: {rule.id}",
              then=f"{mode} mode: would have run {rule.runbook}")  # fmt: skip
