"""step(policy, state, event) -> (state, decisions). The only place where something is decided.

Order within one event: the detectors and rules of the rank, then inhibition, then the incident,
then actions. So the order of rules does not matter, and a cause that trips in the same step as its
consequences mutes them in time.

`step` is pure as seen from outside: the same state and event give the same state and decisions. It
uses up the state it is given; keep `state.copy()` to go back.
"""

from __future__ import annotations

from dataclasses import replace

from .analysis.spike_classifier import SCHEDULE, STRUCTURAL, Verdict
from .detection.rank_monitor import RankMonitor
from .handlers import (
    adoption,
    approval_answers,
    job_lifecycle,
    operator_commands,
    policy_reload,
    rule_fired,
    session_change,
)
from .incidents import closing, data_suspicion, diagnosis, flapping, grouping
from .model import escalation, state_machine
from .model.decisions import ACTING_MODES, BREACH, Decision
from .model.events import (
    LOADING,
    SUSPENDED,
    Adopted,
    Announced,
    Event,
    Exited,
    Finished,
    Frame,
    Gap,
    Launched,
    Notice,
    OperatorCommand,
    Reloaded,
    Tick,
)
from .model.policy import HOLD, Policy, Rule
from .runbooks import checkpoint_choice, effect_verification, runner
from .state.incident import HELD, OPEN, PROBATION, QUIET_STEPS, Incident
from .state.job_life import JobLife
from .state.run_state import State, StepContext

NOTE_STEPS = 100  # between two notes of one kind of a detector, or they would fill the record
UNSEEN_STEPS = 20  # without a frame, and people are told: a recovery needs as many; project default


def start(policy: Policy) -> State:
    """Return the state before the first event."""
    return State(job=JobLife(unable=dict(policy.unable)))


def step(policy: Policy, state: State, event: Event) -> tuple[State, list[Decision]]:
    """Judge one event."""
    turn = StepContext(policy, state, event)
    if event.at_ns > state.at_ns:
        state.at_ns = event.at_ns
    if isinstance(event, Frame):
        _frame(turn, event)
    elif isinstance(event, Tick):
        _tick(turn, event)
    elif isinstance(event, Announced):
        _announced(turn, event)
    elif isinstance(event, Finished):
        runner.finished(turn, event)
        _waited(turn)
    elif isinstance(event, Gap):
        turn.record(
            "gap",
            f"rank {event.rank}: {event.count} frames were lost",
            rank=event.rank,
            first_seq=event.first_seq,
            count=event.count,
        )
        _bank(policy, state, event.rank).lost += event.count
    elif isinstance(event, Notice):
        job_lifecycle.noticed(turn, event)
    elif isinstance(event, OperatorCommand):
        operator_commands.told(turn, event)
    elif isinstance(event, Launched):
        job_lifecycle.launched(turn, event)
    elif isinstance(event, Adopted):
        adoption.take(turn, event)
    elif isinstance(event, Exited):
        job_lifecycle.exited(turn, event)
    elif isinstance(event, Reloaded):
        policy_reload.take(turn, event)
    if state.job.returncode is not None:
        job_lifecycle.conclude(turn)
    return state, turn.close()


# ── events ────────────────────────────────────────────────────────────────────────────────────────


def _bank(policy: Policy, state: State, rank: int) -> RankMonitor:
    banks = state.banks
    if rank not in banks:
        banks[rank] = RankMonitor(policy)
        state.banks = dict(sorted(banks.items()))
    return state.banks[rank]


def _announced(turn: StepContext, event: Announced) -> None:
    state, rank = turn.state, event.rank
    bank = _bank(turn.policy, state, rank)
    if bank.replaced(event.program):
        session_change.another(turn, bank, event)
    bank.announce(event.names, event.program)
    state.context.blame.announced(rank, event.names, event.program)
    state.job.world_size = event.world_size


def _frame(turn: StepContext, frame: Frame) -> None:
    state, rank, step = turn.state, frame.rank, frame.step
    if frame.attempt < state.job.launched:  # of a process that has ended, read late
        return
    bank = state.banks.get(rank) or _bank(turn.policy, state, rank)
    leads = not rank or (leader := state.leader()) is None or rank <= leader
    if leads:  # rank 0 does whenever it speaks
        state.pace += 1
        state.step, state.attempt = step, frame.attempt
    if state.machine == state_machine.LAUNCHING:
        turn.move("first_frame", f"first frame, step {step} of rank {rank}")
    blame = state.context.blame
    if rank in blame.columns:
        blame.feed(frame, calm=data_suspicion.calm(state))
    if step > bank.step + 1 and frame.attempt == bank.attempt and bank.step >= 0:
        _jump(turn, bank, frame)
    bank.lost = 0
    moved = bank.feed(frame, state.pace)
    seen = state.pace - state.history.began
    if state.machine == state_machine.WARMING and seen >= turn.policy.warmup_steps:
        turn.move("ready", f"{seen} frames seen")
    if bank.notes:
        _notes(turn, bank)
    if state.incident is not None:
        data_suspicion.watch(turn.policy, state, bank, state.incident)
    if moved:
        rule_fired.moved(turn, bank, rank, moved)
    if state.rules.muted:
        rule_fired.unmuted(turn, bank)
    if state.rules.flapping and leads:
        flapping.settled(turn)
    incident = state.incident
    if incident is not None and incident.deferred.waiting:
        rule_fired.waited(turn)
    if incident is not None and leads and not incident.deferred.over:
        effect_verification.watch(turn, incident, frame)
        _settle(turn, incident)


def _jump(turn: StepContext, bank: RankMonitor, frame: Frame) -> None:
    """Steps of a rank have no frame, and no gap told of them: nobody has looked at them."""
    first, last = bank.step + 1, frame.step - 1
    unseen = last - first + 1
    if unseen <= bank.lost:
        return
    steps = f"step {first} has" if unseen == 1 else f"steps {first} to {last} have"
    text = f"rank {frame.rank}: {steps} no frame"
    turn.record("gap", text, rank=frame.rank, first_step=first, last_step=last)
    if unseen > UNSEEN_STEPS:
        turn.notify("SEV2", text, verdict="nobody has looked at these steps")


def _tick(turn: StepContext, tick: Tick) -> None:
    state = turn.state
    beats = {beat.rank: beat for beat in tick.beats}
    for rank, bank in state.banks.items():
        moved = bank.tick(tick.at_ns, beats.get(rank), state.pace)
        if moved:
            rule_fired.moved(turn, bank, rank, moved)
        for r in bank.blind(state.pace, tick.at_ns):
            _blind(turn, turn.policy.rules[r], rank)
    incident, run = state.incident, state.run()
    if incident is not None and run is not None and run.intent.waiting_for is not None:
        if tick.at_ns > run.intent.overdue_ns:
            action_id = run.intent.waiting_for
            why = f"{action_id} has no outcome"
            turn.record("in_doubt", why, action={"id": action_id})
            runner.fail(turn, incident, why)
            _waited(turn)
    elif incident is not None:
        waits = any(beat.phase in (SUSPENDED, LOADING) for beat in tick.beats)
        effect_verification.overdue(turn, incident, waits=waits)
        _settle(turn, incident)
    approval_answers.unanswered(turn)
    if incident is not None and incident.acked:
        return
    if state.held_ns is not None and tick.at_ns - state.held_ns > turn.policy.hold_max_s * 1e9:
        state.held_ns = tick.at_ns
        turn.notify(
            "SEV1", "still held, a person is needed", then="release the hold, or stop the run"
        )


def _waited(turn: StepContext) -> None:
    """An action is over: first the words that waited for it, then what was worse than it."""
    session_change.settle(turn)
    operator_commands.waited(turn)
    rule_fired.waited(turn)


def _notes(turn: StepContext, bank: RankMonitor) -> None:
    state, incident = turn.state, turn.state.incident
    noted = state.rules.noted
    for name, note in bank.notes:
        kind = str(note.get("kind", "note"))
        data = {key: value for key, value in note.items() if key not in ("kind", "reason")}
        if state.pace >= noted.get((name, kind), 0):
            noted[name, kind] = state.pace + NOTE_STEPS
            turn.record(kind, f"{name}: {note.get('reason', '')}", detector=name, details=data)
        if kind == "rebaseline" and incident is not None:
            rules = (rule for rule in turn.policy.rules if rule.id in incident.rules)
            incident.ending.rebaselined |= any(name in turn.policy.behind(rule) for rule in rules)
    bank.notes.clear()


def _blind(turn: StepContext, rule: Rule, rank: int) -> None:
    """A metric that was there went missing: an incident of its own, not health."""
    if turn.state.silence(rule.id) is not None:
        return
    severity = "SEV0" if rule.severity == "SEV0" else "SEV1"
    why = f"{rule.id} cannot be judged on rank {rank}: its metrics went missing"
    turn.record("blind", why, rule=rule.id, severity=severity, rank=rank)
    grouping.group(turn, turn.state.banks[rank], replace(rule, severity=severity), {}, why)
    turn.move("notice", why)


# ── the end of an incident ────────────────────────────────────────────────────────────────────────


def _settle(turn: StepContext, incident: Incident) -> None:
    """Classify an incident when it is time to, and close it when it is over."""
    policy, state, ending = turn.policy, turn.state, incident.ending
    found = diagnosis.follow(policy, state, incident)
    if found is not None:
        _classified(turn, incident, found)
    if incident.phase == PROBATION and incident.run is None:
        relapsed = _relapsed(policy, state, incident)
        if relapsed is not None:
            data_suspicion.relapsed(state, incident)
            runner.climb(turn, incident, f"{relapsed} is in breach on probation")
        elif state.pace >= ending.probation_until and state.step >= incident.recovery.settled:
            steps = policy.probation_steps
            closing.close(turn, incident, f"recovered: no relapse in {steps} steps", recovered=True)
            turn.move("passed", f"{incident.id} recovered")
    elif incident.phase == OPEN:
        if state.firing(policy) or checkpoint_choice.waits(state, incident):
            ending.quiet_since = None
        elif ending.quiet_since is None:
            ending.quiet_since = state.pace
        elif state.pace - ending.quiet_since >= QUIET_STEPS and not diagnosis.waits(
            policy, state, incident
        ):
            over = "its rules cleared by themselves"
            if ending.rebaselined:
                over = "not recovered, but the new level is the baseline now"
            closing.close(turn, incident, f"over: {over}")
            turn.move("clear", f"{incident.id} is over")


def _classified(turn: StepContext, incident: Incident, found: Verdict) -> None:
    """An incident is open for so long that its class can be told; no rung left means hold."""
    turn.record(
        "incident",
        f"classified: {found.text}",
        severity=incident.severity,
        what="classified",
        spike=found.data(),
    )
    turn.notify(
        incident.severity,
        f"{incident.id}: {found.kind}",
        verdict=diagnosis.told(found),
        then=found.advice,
    )
    rung = incident.escalation.rung
    name, _ = escalation.climb(turn.policy.ladder, rung)
    idle = incident.run is None and incident.phase != HELD
    lasting = found.kind in (STRUCTURAL, SCHEDULE)
    if lasting and idle and rung >= 0 and name == HOLD:
        closing.hold(turn, incident, f"{found.kind}, and the ladder is at its end", exhausted=True)


def _relapsed(policy: Policy, state: State, incident: Incident) -> str | None:
    """Return a rule of the incident that acts and is in breach, also one that never cleared."""
    rungs = policy.ladder.rungs
    for r, rule in enumerate(policy.rules):
        if rule.id not in incident.rules or rule.severity == "SEV2" or rule.runbook not in rungs:
            continue
        mode = policy.mode_of(rule)
        if mode not in ACTING_MODES or state.silence(rule.id) is not None:
            continue
        if any(bank.rules[r].code == BREACH for bank in state.banks.values()):
            return rule.id
    return None
