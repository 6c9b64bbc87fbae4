"""The host was looked at, because the job is to be started on it again: what people have to know.

A host that is not fit ends the relaunch, and is in the message of that. Questions without an answer
do not prevent the start; people are notified of them once, and again when they are others.
"""

from __future__ import annotations

from ..model.events import Notice
from ..model.interfaces import WATCHER
from ..model.payload import HostHealth
from ..state.run_state import StepContext

NEXT = (
    "repair or free what is named, or start the job on another host; to look again: "
    "supervise doctor --health -- COMMAND"
)


def on_health(ctx: StepContext, event: Notice) -> None:
    """Keep why the host is not fit; notify people of what could not be decided."""
    job, health = ctx.state.job, event.data.read(HostHealth)
    job.unfit_host = health.unfit
    if health.doubts and not job.unfit_host and health.doubts != job.host_doubts:
        job.host_doubts = health.doubts
        ctx.notify(
            "SEV2",
            event.message,
            verdict="the job is started all the same",
            then="to look again: supervise doctor --health -- COMMAND",
            kind=WATCHER,
        )
