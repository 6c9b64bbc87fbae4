"""The record of the run needs space: without it nothing is acted on, and people are told at once.

An action begins only when its intent is on disk. So a disk without space ends the protection of the
run, once the reserve that was set aside at the start is used up.
"""

from __future__ import annotations

from ..model.events import Notice
from ..model.interfaces import WATCHER
from ..model.payload import RecordSpace
from ..state.message_draft import MessageDraft
from ..state.run_state import StepContext

SHORT, ENOUGH, UNPROTECTED = "record-space-short", "record-space-enough", "unprotected"


def on_short(ctx: StepContext, event: Notice) -> None:
    """The disk is full: the reserve is in use."""
    space = event.data.read(RecordSpace)
    lasts = "" if space.seconds is None else f", about {_duration(space.seconds)} at this rate"
    verdict = f"it is written from a reserve of {_size(space.reserve_bytes)}{lasts}"
    if space.acts:
        verdict += ", and actions go on; when it is used up, nothing is acted on any more"
    title = "no space is left for the record of this run"
    _notify(ctx, event, "SEV1", title, verdict, _to_free(event))


def on_enough(ctx: StepContext, event: Notice) -> None:
    """There is space again."""
    verdict = "its reserve is whole again, and it has no gap"
    _notify(ctx, event, "SEV2", "there is space for the record of this run again", verdict, "")


def on_unprotected(ctx: StepContext, event: Notice) -> None:
    """The record has ended before the run."""
    space = event.data.read(RecordSpace)
    then = (
        "protection comes back with the next start of the job; to go on from: "
        "supervise checkpoints RUN"
    )
    if space.need_bytes is not None:
        then = f"{_to_free(event)}; {then}"
    title = "the record of this run has ended, and nothing more of it is kept"
    if space.acts:
        title = "this run is not protected any more: nothing is acted on"
    _notify(ctx, event, "SEV1", title, "the job goes on, and what its rules find is reported", then)


def _notify(
    ctx: StepContext, event: Notice, severity: str, title: str, verdict: str, then: str
) -> None:
    """Notify all channels, where the run counts on actions."""
    acts = event.data.read(RecordSpace).acts
    severity = severity if acts else "SEV2"
    draft = MessageDraft(None, WATCHER, severity, title, verdict, event.message, then, to_all=acts)
    ctx.messages.add(draft, replace=False)


def _to_free(event: Notice) -> str:
    space = event.data.read(RecordSpace)
    return (
        f"free {_size(space.need_bytes or 0)} on {space.mount}; what fills it: du -xm "
        f"{space.mount} | sort -n | tail; old runs: supervise gc --older-than 1d {space.runs}"
    )


def _size(count: int) -> str:
    return f"{max(1, round(count / 1e6))} MB" if count >= 1e5 else f"{round(count / 1e3)} kB"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"
