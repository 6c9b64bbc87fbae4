"""A job that reports success before it has made the steps that were planned.

A wrong glob, an exhausted dataset, a `break` too early: the exit code is 0, so a scheduler takes
the run for done. The planned length is that of Trainer or Lightning, as the probe reports it at the
end of their loop, else `job.steps`. An end that was asked for is not early: by a callback for early
stopping, a signal, an operator, or the policy.
"""

from __future__ import annotations

from ..model.events import Notice
from ..model.interfaces import FINISHED
from ..model.payload import TrainingEnd
from ..state.incident import Incident
from ..state.run_state import StepContext

NEXT = "read the end of the job's output, then its data and its stop condition"


def on_training_ended(ctx: StepContext, event: Notice) -> None:
    """Keep what a library made of its plan; the last training of a process counts."""
    end = event.data.read(TrainingEnd)
    if end.done is None or end.total is None:
        return
    is_early = end.done < end.total and not end.stopped
    ctx.state.job.shortfall = f"{end.done} of {end.total} steps" if is_early else ""


def notify(ctx: StepContext, incident: Incident | None) -> bool:
    """Notify people of an end with code 0 that came too early; return whether it did.

    incident: that it ended, if any.
    """
    state, job = ctx.state, ctx.state.job
    shortfall, planned = job.shortfall, ctx.policy.job.steps
    made = state.step + 1
    if shortfall is None and planned and made < planned:
        shortfall = f"{made} of {planned} steps"
    if not shortfall or job.signalled or job.end_requested:
        return False
    ctx.notify(
        "SEV1",
        f"the job ended with code 0 after {shortfall}",
        verdict="it reports success and is not complete; nothing asked it to stop",
        then=NEXT,
        replace=True,
        kind=FINISHED,
        incident=incident,
    )
    return True
