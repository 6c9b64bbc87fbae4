"""Another supervisor took the run over: what went on unwatched, and what waits for it.

Budgets, holds, requests for approval and the open incident are in the state, and stay as they were.
"""

from __future__ import annotations

from ..model.events import Adopted
from ..runbooks import steps
from ..state.run_state import StepContext


def on_adopted(ctx: StepContext, event: Adopted) -> None:
    """Say so, and let every deadline begin anew: nobody listened meanwhile."""
    job = "the job runs" if event.alive else "the job ended meanwhile"
    text = (
        f"process {event.pid} took over from a supervisor that died, "
        f"after {event.unwatched_ns / 1e9:.0f} s without monitoring; {job}"
    )
    ctx.record("note", text, what="adopted", alive=event.alive)
    ctx.notify("INFO", "the run is monitored again", verdict=text)
    state = ctx.state
    for monitor in state.monitors.values():
        monitor.reset_deadlines(event.at_ns)
    pending = state.approvals.pending
    if pending is not None:
        pending.deadline_ns += event.unwatched_ns
    run = state.run()
    if run is not None:
        run.verification.frame_ns = event.at_ns
        if run.intent.action_id is not None:
            within_s = steps.awaited_action(state).limit_s(run.intent.args) + steps.OVERDUE_S
            run.intent.deadline_ns = event.at_ns + int(within_s * 1e9)
