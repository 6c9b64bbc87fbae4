"""A pause that ended by itself: the job goes on, and what relied on the pause is given up.

The probe holds a job only while its pause is renewed (see `job.lease`). It tells when it let the
job go without a `resume`. A runbook that is between its `pause` and its `resume` then fails: the
step under way is not carried out if the job has not met it yet, and no other step follows.
"""

from __future__ import annotations

from ..model.events import Notice
from ..state import compensation
from ..state.run_state import State, StepContext
from ..state.runbook_execution import RunbookExecution

ENDED = "pause-ended"  # kind of the notice
UNPAUSED = "the pause that it depends on has ended"


def on_pause_ended(ctx: StepContext, event: Notice) -> None:
    """Take note that the job goes on by itself, unless that was of a pause before the newest."""
    state, incident, run = ctx.state, ctx.state.incident, ctx.state.run()
    pauses = run is not None and run.intent.awaits("pause")
    key = str(event.data.get("key", ""))
    if run is not None and pauses and key and key.rpartition(":")[2] != run.intent.action_id:
        return
    if not state.job.paused:
        return
    state.job.paused = False
    if incident is not None:
        compensation.forget(incident.recovery, "resume")  # what goes on by itself needs none
    if run is not None and _relies_on_pause(run):
        run.failure.pause_ended = event.message
    if not state.job.end_requested:
        ctx.notify(
            "SEV1",
            "the pause ended by itself, and the job continues",
            verdict=event.message,
            then="to pause it again: supervise pause RUN",
        )


def withdrawn(state: State) -> bool:
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
    for i in (*run.done, run.index):
        verb = run.runbook.verbs[i] if i < len(run.runbook.verbs) else ""
        paused = verb == "pause" or (paused and verb not in ("resume", "relaunch"))
    return paused
