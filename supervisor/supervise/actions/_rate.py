"""Check of a scaled learning rate in the first frame after the action.

Three factors are multiplied: the one that `lr_scale` set, the re-warm after a rollback or a
relaunch, and what `hold_rate` leaves. Each is judged without the others, of which the frame tells:
`lr_scale` is all together, `lr_rewarm` and `lr_hold` are two of them, absent without.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.model.action import PlanContext
from ..core.model.payload import Rewarm

RAMP_STEPS = 5  # how far a ramp may have come in the first frame that shows it
TOLERANCE = 0.01

Metrics = Mapping[str, float | None]


def rewarm_due(context: PlanContext, start: float, steps: int) -> dict[str, float] | None:
    """Return the re-warm behind going back, None where the rate is not to blame."""
    due = steps and not context.rate_cleared
    return {"start": start, "steps": steps} if due else None


def scale_shows(frame: Metrics, scale: float, rewarm_steps: int) -> str | None:
    """Return None when the rate used is `scale` of what the re-warm leaves, else a sentence.

    With `rewarm_steps` it may be a few steps up its ramp already. A job without a rate is not
    judged.
    """
    return _shows(frame, scale, rewarm_steps, _rewarm(frame))


def rewarm_shows(frame: Metrics, rewarm: Rewarm | None, limit: float | None = None) -> str | None:
    """Return None when the rate used is at the beginning of `rewarm`, else a sentence.

    Without one, and in a job without a rate, there is nothing to be judged. `limit`: the ramp leads
    to this rate where the job asks for more, as after a rollback that did not take the loop back.
    """
    if rewarm is None:
        return None
    other_scale = (frame.get("lr_scale") or 1.0) / _rewarm(frame) / _hold(frame)
    return _shows(frame, rewarm.start, rewarm.steps, other_scale, limit)


def hold_shows(frame: Metrics, limit: float) -> str | None:
    """Return None when the rate used is at most `limit`, or back at what the job asks for."""
    used, scale = frame.get("learning_rate"), frame.get("lr_scale") or 1.0
    if used is None or used <= limit * scale / _hold(frame) * (1.0 + TOLERANCE):
        return None
    own_rate = (frame.get("learning_rate_scheduled") or 0.0) * scale
    if frame.get("lr_hold") == 1.0 and used <= own_rate * (1.0 + TOLERANCE):
        return None
    return f"the learning rate is {used:.3g}, not at most {limit:.3g}"


def _rewarm(frame: Metrics) -> float:
    return frame.get("lr_rewarm") or 1.0


def _hold(frame: Metrics) -> float:
    return frame.get("lr_hold") or 1.0


def _shows(
    frame: Metrics, scale: float, steps: int, other_scale: float, limit: float | None = None
) -> str | None:
    used, scheduled_rate = frame.get("learning_rate"), frame.get("learning_rate_scheduled")
    if used is None or not scheduled_rate:
        return None
    scheduled_rate *= _hold(frame)
    least, highest = (
        (scheduled_rate, scheduled_rate) if limit is None else (min(scheduled_rate, limit), limit)
    )
    highest *= scale + (1.0 - scale) * min(1.0, RAMP_STEPS / steps if steps else 0.0)
    if scale * least * (1.0 - TOLERANCE) <= used / other_scale <= highest * (1.0 + TOLERANCE):
        return None
    besides = "" if other_scale == 1.0 else f" times {other_scale:.3g}"
    return (
        f"the learning rate is {used / scheduled_rate:.3g} of the job's own, not {scale:g}{besides}"
    )
