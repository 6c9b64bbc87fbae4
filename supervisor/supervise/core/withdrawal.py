"""Check that the reason for a destructive action still holds, until the moment it acts.

Evidence, an idle watch or a checkpoint's preparation lie between the rule that fired and the action
that answers it. A job that recovered meanwhile must not be stopped for what is over.

- A standstill: any new frame of the rank that stood still withdraws the action, as its rule's
  clearing does.
- Any other trouble: what ends the job (`stop`, `relaunch`) is withdrawn once every rule of the
  incident above SEV2 has cleared and the losses since the first breach are back in its band. Rules
  that look for a change clear in the next step, and ratios get used to a ruined loss: clearing
  alone does not show that it is well. Nor does it undo what a bad shard or an oversized update did:
  `rollback`, `skip_step` and `quarantine` answer that, and verification judges them.
- What a person ordered or approved, and the restart of a job that has ended, needs no reason. Only
  an approved answer to a standstill does: a job that makes steps again does not stand still.
- A training that is over (see `job_end`) withdraws what was meant for it.
- A pause that ended by itself withdraws what relied on it. The probe holds a job only while its
  pause is renewed (see `job.ranks.lease`), and tells when it let the job go without a `resume`: a
  runbook between its `pause` and its `resume` fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from . import notices
from .frames import LOSS
from .incident import Incident, Reason, RunbookExecution, Trigger, forget_undo
from .model.action import Action
from .model.decisions import ACTING_MODES
from .model.events import Notice
from .model.payload import PauseEnd
from .model.policy import STOP, STOP_SEV0, Policy, Rule
from .notices import LostReason
from .rank_monitor import RankMonitor
from .run_state import State, StepContext
from .trends import median

SILENT_S = 900.0  # longer than an evaluation or a checkpoint; project default


def reports_stall(monitor: RankMonitor, rule: Rule) -> bool:
    """Return whether a rule is in breach because something did not come."""
    readings = monitor.numbers(rule).values()
    return any("signal" in reading and reading.get("code") == "BREACH" for reading in readings)


def describe_job_status(policy: Policy, state: State) -> str:
    """Return how it is with the job while nothing is done about it, as a clause."""
    if state.job.has_ended:
        return notices.JobStatus.ENDED
    if state.job.paused:
        return notices.JobStatus.PAUSED
    if is_stalled(policy, state):
        return notices.JobStalled(step=state.step).text
    return notices.JobStatus.TRAINING


def is_stalled(policy: Policy, state: State) -> bool:
    """Return whether any rank makes no step; one that has ended only where all have."""
    monitors = list(state.monitors.values())
    monitors = [monitor for monitor in monitors if not monitor.exited] or monitors
    return any(_is_stalled(policy, state.at_ns, monitor) for monitor in monitors)


def _is_stalled(policy: Policy, at_ns: int, monitor: RankMonitor) -> bool:
    rules = zip(policy.rules, monitor.rules, strict=True)
    if any(watch.firing and reports_stall(monitor, rule) for rule, watch in rules):
        return True
    frames = monitor.history.frames
    return bool(frames) and at_ns - frames[-1].at_ns > SILENT_S * 1e9


LOOKED_AT = 20  # newest losses; as many as a verification asks to be calm


def runbook_reason(policy: Policy, state: State, incident: Incident) -> Reason | None:
    """Return the reason for a runbook that starts now; None when none can go away."""
    trigger = incident.trigger
    if state.job.returncode is not None:
        return None
    index = next((r for r, rule in enumerate(policy.rules) if rule.id == trigger.asked_by), None)
    if trigger.still:
        frames = {} if index is None else _silent(state.monitors, policy.rules[index], index)
        return Reason((trigger.asked_by,), frames)
    if index is None:
        return None
    firing = set(state.firing(policy)) & set(incident.rules)
    rules = (rule for rule in policy.rules if rule.id in firing and rule.runbook is not None)
    return Reason(tuple(rule.id for rule in rules if policy.mode_of(rule) in ACTING_MODES))


def set_trigger(trigger: Trigger, rule: Rule, *, still: bool) -> None:
    """Note the rule that asks for a runbook, and whether it does because the job stands still."""
    trigger.asked_by, trigger.still = rule.id, still


def explain_lost_reason(policy: Policy, state: State, action: Action) -> LostReason | None:
    """Return why a destructive step of the runbook is not to be performed any more, None: it is."""
    incident, run = state.incident, state.run()
    if incident is None or run is None or state.job.returncode is not None:
        return None
    reason, failure = run.terms.reason, run.failure
    if (
        reason is None
        or run.requested.operator
        or failure.pending_undos
        or failure.reason is not None
    ):
        return None
    if reason.frames is not None:
        silent = _still_silent(policy, state.monitors, reason.rules[0], reason.frames)
        return None if silent else LostReason.STEPS_AGAIN
    if not action.ends_job or run.terms.approved is not None or not reason.rules:
        return None
    lasts = trouble_lasts(policy, state, incident, reason.rules)
    return None if lasts else LostReason.CLEARED


def trouble_lasts(
    policy: Policy, state: State, incident: Incident, rule_ids: Iterable[str] = ()
) -> bool:
    """Return whether a rule of the incident or of `rule_ids` fires, or losses are out of band."""
    firing = set(state.firing(policy)) & {*rule_ids, *incident.rules}
    lasting = any(rule.id in firing and rule.severity != "SEV2" for rule in policy.rules)
    return lasting or is_loss_out_of_band(state, incident)


def policy_ends_job(policy: Policy, state: State, incident: Incident) -> bool:
    """Return whether the policy ends a job of which this lasts, and that nothing can help."""
    if policy.give_up != STOP_SEV0:
        return policy.give_up == STOP
    firing = set(state.firing(policy)) & {*incident.rules}
    return any(rule.id in firing and rule.severity == "SEV0" for rule in policy.rules)


def explain_withdrawal(policy: Policy, state: State) -> str:
    """Say why the action under way is not to be carried out any more, "" when it is.

    That an operator wants the job to stop is not about a training.
    """
    incident, run = state.incident, state.run()
    if incident is None or run is None or run.intent.action_id is None or run.failure.pending_undos:
        return ""
    if incident.deferred.session_end is not None:
        is_meant = run.requested.operator and run.intent.verb == "stop"
        return "" if is_meant else LostReason.TRAINING_OVER
    if is_pause_gone(state):
        return LostReason.UNPAUSED
    action = run.intent.action
    if action is None or not action.destructive:
        return ""
    return explain_lost_reason(policy, state, action) or ""


def answers_stall(state: State) -> bool:
    """Return whether the runbook under way answers a job that stands still."""
    run = state.run()
    return run is not None and run.terms.reason is not None and run.terms.reason.frames is not None


def _silent(monitors: Mapping[int, RankMonitor], rule: Rule, index: int) -> dict[int, int]:
    """Return how many frames each rank on which the rule tells a standstill has sent so far."""
    return {
        rank: monitor.frames
        for rank, monitor in monitors.items()
        if monitor.rules[index].firing and reports_stall(monitor, rule)
    }


def _still_silent(
    policy: Policy, monitors: Mapping[int, RankMonitor], rule_id: str, frames: dict[int, int]
) -> bool:
    index = next((r for r, rule in enumerate(policy.rules) if rule.id == rule_id), None)
    return index is not None and any(
        rank in frames and monitor.frames == frames[rank] and monitor.rules[index].firing
        for rank, monitor in monitors.items()
    )


def newest_losses(state: State, incident: Incident) -> list[tuple[int, float]]:
    """Return the newest losses since the first breach, with their steps."""
    monitor = state.monitors.get(incident.case.rank)
    points = () if monitor is None else monitor.history.series(LOSS)[-LOOKED_AT:]
    return [(step, loss) for step, loss in points if step >= incident.breach_step]


def is_loss_out_of_band(state: State, incident: Incident) -> bool:
    """Return whether most losses since the first breach are out of the incident's band."""
    monitor, band = state.monitors.get(incident.case.rank), incident.case.band
    if monitor is None or band is None:
        return False
    since = newest_losses(state, incident)
    if not since:
        return False
    residual = median([loss - band.forecast(step) for step, loss in since])
    return residual > band.width(len(since))


ENDED = "pause-ended"  # kind of the notice


def on_pause_ended(ctx: StepContext, event: Notice) -> None:
    """Take note that the job goes on by itself, unless that was of a pause before the newest."""
    state, incident, run = ctx.state, ctx.state.incident, ctx.state.run()
    pauses = run is not None and run.intent.awaits_outcome("pause")
    key = event.data.read(PauseEnd).key
    if run is not None and pauses and key and key.rpartition(":")[2] != run.intent.action_id:
        return
    if not state.job.paused:
        return
    state.job.paused = False
    if incident is not None:
        forget_undo(incident.recovery, "resume")  # what goes on by itself needs none
    if run is not None and _relies_on_pause(run):
        run.failure.pause_ended = event.message
    if not state.job.end_requested:
        ctx.send(notices.PauseOver(severity="SEV1", step=state.step, cause=event.message))


def is_pause_gone(state: State) -> bool:
    """Return whether the action under way is not to be carried out, since the job goes on."""
    run = state.run()
    if run is None or not run.failure.pause_ended or run.failure.reason is not None:
        return False
    action, awaited = run.intent.action, run.intent.action_id
    return awaited is not None and action is not None and action.touches_job


def _relies_on_pause(run: RunbookExecution) -> bool:
    """Return whether the step under way was to find the job paused, or is the pause itself."""
    if run.failure.reason is not None:
        return False
    paused = False
    for i in (*run.committed, run.index):
        verb = run.runbook.verbs[i] if i < len(run.runbook.verbs) else ""
        paused = verb == "pause" or (paused and verb not in ("resume", "relaunch"))
    return paused
