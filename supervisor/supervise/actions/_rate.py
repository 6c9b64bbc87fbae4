"""What a scaled learning rate looks like in the first frame after the action."""

from __future__ import annotations

from collections.abc import Mapping

RAMP_STEPS = 5  # how far a re-warm may have come in the first frame that shows it
TOLERANCE = 0.01


def rate_shows(frame: Mapping[str, float | None], scale: float, rewarm_steps: int) -> str | None:
    """Return None when the rate used is `scale` of what the job asked for, else a sentence.

    With a re-warm it may be a few steps up its ramp already. A job without a rate is not judged.
    """
    used, asked = frame.get("learning_rate"), frame.get("learning_rate_scheduled")
    if used is None or not asked:
        return None
    most = scale + (1.0 - scale) * min(1.0, RAMP_STEPS / rewarm_steps if rewarm_steps else 0.0)
    if scale * (1.0 - TOLERANCE) <= used / asked <= most * (1.0 + TOLERANCE):
        return None
    return f"the learning rate is {used / asked:.3g} of the job's own, not {scale:g}"
