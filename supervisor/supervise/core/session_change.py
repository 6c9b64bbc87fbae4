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

from . import approvals, closing, compensation, diagnosis, operator_commands, runbook_runner
from .incident import Incident, RunbookExecution, RunbookFailure
from .model.action import Action
from .model.decisions import SESSION_ENDED, ProgramReplaced, RuleCleared
from .model.events import Announced
from .model.interfaces import ACTION
from .model.policy import Runbook
from .rank_monitor import RankMonitor, RuleWatch
from .run_phase import RunPhase
from .run_state import StepContext

NEXT = "the next session is monitored from scratch"


def on_program_replaced(ctx: StepContext, monitor: RankMonitor, event: Announced) -> None:
    """Another program takes the place of a rank's, all of whose frames were judged."""
    state, rank, last_step = ctx.state, event.rank, monitor.step
    text = f"another program of rank {rank} started after step {last_step} in the same launch: its "
    text += "step numbers may repeat"
    ctx.record(ProgramReplaced(reason=text, rank=rank, pid=event.pid, last_step=last_step))
    if event.again:
        return
    _clear_rules(ctx, monitor, rank)
    incident = state.incident
    # Ranks follow one another: the one that leads, and an incident's own, end it.
    if state.leader() not in (None, rank) and (incident is None or incident.case.rank != rank):
        return
    reason = f"its training session ended after step {last_step}; another one starts"
    if incident is None:
        _start_session(ctx, reason)
        return
    approvals.settle(ctx, "withdrawn", reason)
    # Its frames are forgotten next.
    incident.case.verdict = diagnosis.classify(ctx.policy, state, incident)
    incident.deferred.session_end = f"over: {reason}"
    close_ended_session(ctx)


def close_ended_session(ctx: StepContext) -> None:
    """Close an incident whose training is over once nothing of it is under way."""
    incident = ctx.state.incident
    if incident is None or not incident.deferred.session_end:
        return
    deferred, run = incident.deferred, incident.run
    if run is not None and run.intent.action_id is not None:
        return
    if run is not None and run.failure.reason is not None:
        _report_unfinished(ctx, incident, run, run.failure.reason)
    standing = compensation.session_undos(incident.recovery)
    if standing and ctx.state.job.returncode is None:
        _undo(ctx, incident, standing[0])
        return
    closing.close(ctx, incident, deferred.session_end, SESSION_ENDED, NEXT)
    _start_session(ctx, f"{incident.id} is {deferred.session_end}")
    for event in deferred.commands:
        operator_commands.on_command(ctx, event)


def _undo(ctx: StepContext, incident: Incident, action: Action) -> None:
    """Ask for it once."""
    compensation.remove(incident.recovery, action)
    number, book = incident.escalation.runs, Runbook("undo", (), ())
    failure = RunbookFailure(incident.deferred.session_end, pending_undos=[action])
    run = incident.run = RunbookExecution(number, book, incident.severity, failure=failure)
    runbook_runner.undo(ctx, incident, run, action, "undo")


def _report_unfinished(
    ctx: StepContext, incident: Incident, run: RunbookExecution, reason: str
) -> None:
    """People must know what an operator did not get, and what goes on in the next training."""
    if run.requested.operator:
        ctx.notify(
            "SEV2",
            f"{incident.id}: command of {run.requested.operator} failed",
            verdict=reason,
            kind=ACTION,
        )
    undoing, standing = run.failure.pending_undos, incident.recovery.undos
    if undoing and not any(undoing[0] is undo for _, undo in standing):
        ctx.notify(
            "SEV1",
            f"{incident.id}: undoing an action failed",
            verdict=reason,
            then="it may affect the next training session",
            kind=ACTION,
        )


def _clear_rules(ctx: StepContext, monitor: RankMonitor, rank: int) -> None:
    """What fired on the rank fires no more, so that it can fire again."""
    policy, state = ctx.policy, ctx.state
    for rule, watch in zip(policy.rules, monitor.rules, strict=True):
        if watch.firing or watch.blind:
            text = f"{rule.id} cleared: its training session ended"
            ctx.record(RuleCleared(reason=text, rule=rule.id, severity=rule.severity, rank=rank))
    monitor.rules = [RuleWatch() for _ in monitor.rules]
    firing = state.firing(policy)
    state.rules.unmute_cleared(firing)


def _start_session(ctx: StepContext, reason: str) -> None:
    """What was tried, and how often the loss went astray, was so in the training before."""
    state = ctx.state
    if state.job.returncode is not None:
        return
    state.history.start_session(state.frame_count)
    state.phase = RunPhase()
    state.context.onsets.clear()
    ctx.move("session_started", reason)
