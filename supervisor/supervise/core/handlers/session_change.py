"""One training after the other in one launch: in a sweep, behind an `exec`, or from a script.

To the supervisor the next one is another program of its ranks. Behind a process that crashed it is
the same training, which a launcher started again, and its incident goes on. Else what is open is of
the one before: its band, its verification, and what was tried about it. So an incident ends with
its training, as it does with the job, a hold too. An action under way comes to its end first, as
only one is performed at a time; it is withdrawn from a job that has not met it yet, and no other
one follows. What stands is kept by the probe and would act on the next training: it is taken back.
A rule that fires meanwhile speaks when it is over.

Budgets, and what operators silenced, are of the run and stay.
"""

from __future__ import annotations

from ..detection.rank_monitor import RankMonitor, RuleWatch
from ..incidents import approvals, closing, diagnosis
from ..model.action import Action
from ..model.events import Announced
from ..model.policy import Runbook
from ..runbooks import steps
from ..state import compensation
from ..state.incident import Incident
from ..state.run_state import StepContext
from ..state.runbook_execution import RunbookExecution, RunbookFailure
from . import operator_commands

NEXT = "the next one is watched from nothing"


def another(turn: StepContext, bank: RankMonitor, event: Announced) -> None:
    """Another program takes the place of a rank's, all of whose frames were judged."""
    state, rank, last = turn.state, event.rank, bank.step
    turn.record(
        "note",
        f"another program of rank {rank} began after step {last}, in the same launch: its "
        "steps may have numbers that were there before",
        what="program-replaced",
        rank=rank,
        pid=event.pid,
        last_step=last,
    )
    if event.again:
        return
    _clear(turn, bank, rank)
    incident = state.incident
    # Ranks follow one another: the one that leads, and an incident's own, end it.
    if state.leader() not in (None, rank) and (incident is None or incident.case.rank != rank):
        return
    why = f"its training ended after step {last}, and another one begins"
    if incident is None:
        _begin(turn, why)
        return
    approvals.settle(turn, "withdrawn", why)
    # Its frames are forgotten next.
    incident.case.verdict = diagnosis.conclude(turn.policy, state, incident)
    incident.deferred.over = f"over: {why}"
    settle(turn)


def settle(turn: StepContext) -> None:
    """Close an incident whose training is over once nothing of it is under way."""
    incident = turn.state.incident
    if incident is None or not incident.deferred.over:
        return
    deferred, run = incident.deferred, incident.run
    if run is not None and run.intent.waiting_for is not None:
        return
    if run is not None and run.failure.why is not None:
        _not_done(turn, incident, run, run.failure.why)
    standing = compensation.of_training(incident.recovery)
    if standing and turn.state.job.returncode is None:
        _take_back(turn, incident, standing[0])
        return
    closing.close(turn, incident, deferred.over, NEXT)
    _begin(turn, f"{incident.id} is {deferred.over}")
    for event in deferred.wanted:
        operator_commands.told(turn, event)


def _take_back(turn: StepContext, incident: Incident, action: Action) -> None:
    """Ask for it once."""
    compensation.tried(incident.recovery, action)
    number, book = incident.escalation.runs, Runbook("undo", (), ())
    failure = RunbookFailure(incident.deferred.over, undoing=[action])
    run = incident.run = RunbookExecution(number, book, incident.severity, failure=failure)
    steps.take_back(turn, incident, run, action, "undo")


def _not_done(turn: StepContext, incident: Incident, run: RunbookExecution, why: str) -> None:
    """People must know what an operator did not get, and what goes on in the next training."""
    if run.order.operator:
        turn.notify("SEV2", f"{incident.id}: not done for {run.order.operator}", verdict=why)
    undoing, standing = run.failure.undoing, incident.recovery.standing
    if undoing and not any(undoing[0] is undo for _, undo in standing):
        turn.notify(
            "SEV1",
            f"{incident.id}: taking an action back failed",
            verdict=why,
            then="it may act on the next training",
        )


def _clear(turn: StepContext, bank: RankMonitor, rank: int) -> None:
    """What fired on the rank fires no more, so that it can fire again."""
    policy, state = turn.policy, turn.state
    for rule, watch in zip(policy.rules, bank.rules, strict=True):
        if watch.firing or watch.blind:
            turn.record(
                "rule",
                f"{rule.id} cleared: its training ended",
                rule=rule.id,
                severity=rule.severity,
                what="cleared",
                rank=rank,
            )
    bank.rules = [RuleWatch() for _ in bank.rules]
    firing = state.firing(policy)
    state.rules.unmute_cleared(firing)


def _begin(turn: StepContext, why: str) -> None:
    """What was tried, and how often the loss went astray, was so in the training before."""
    state = turn.state
    if state.job.returncode is not None:
        return
    state.history.begin_training(state.pace)
    state.context.onsets.clear()
    turn.move("session_started", why)
