"""The job is to be ended from outside: what people have to know of its checkpoint before that."""

from __future__ import annotations

from ..model.events import Notice
from ..model.interfaces import WATCHER
from ..model.payload import PreemptOutcome, SignalSent
from ..state.run_state import State, StepContext

CHECKPOINTS = "good checkpoints: supervise checkpoints RUN"


def on_signal(ctx: StepContext, event: Notice) -> None:
    """Remember what waits: a supervisor that takes over passes it on."""
    job, signal = ctx.state.job, event.data.read(SignalSent)
    job.signalled = True
    if signal.held:
        job.held_signals += (signal.signal,)


def on_preempt(ctx: StepContext, event: Notice) -> None:
    """Notify people of the outcome of a request; see `app.preemptor` for the phases."""
    job, outcome = ctx.state.job, event.data.read(PreemptOutcome)
    phase, cause, signals = outcome.phase, outcome.cause, ", ".join(outcome.signals or ())
    if phase in ("saved", "failed"):
        job.held_signals = ()
    if phase == "saved":
        job.preempted = f"{cause}, with a checkpoint"
        then = f"resume from {outcome.path}" if outcome.path else CHECKPOINTS
        verdict = f"{signals} is passed on" if signals else "the job is ended with exit code 75"
        ctx.notify("SEV2", event.message, verdict=verdict, then=then, kind=WATCHER)
    elif phase == "failed":
        job.preempted = f"{cause}, without a checkpoint"
        severity = "SEV1" if ctx.state.step >= 0 else "SEV2"
        ctx.notify(
            severity, event.message, verdict=_lost(ctx.state), then=CHECKPOINTS, kind=WATCHER
        )
    elif phase == "unavailable":
        verdict = "signals are passed on at once, and no checkpoint is requested before the end"
        ctx.notify("SEV2", event.message, verdict=verdict, kind=WATCHER)


def _lost(state: State) -> str:
    """Return what an end now loses."""
    if state.step < 0:
        return "no step was made, so none is lost"
    good = state.checkpoints.good()
    if not good:
        return f"no checkpoint is verified: an end at step {state.step} may lose every step"
    newest = good[-1]
    return f"an end at step {state.step} loses the steps since {newest.id} (step {newest.step})"
