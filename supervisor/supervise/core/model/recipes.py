"""The words of `job.relaunch`, as a job gets them that is started again from a checkpoint."""

from __future__ import annotations

from .policy import RelaunchSettings
from .redaction import Redactor

CHECKPOINT, DIRECTORY, STEP = "{checkpoint}", "{directory}", "{step}"  # of `job.relaunch`


def fill(template: str, path: str, step: int) -> str:
    """Put a checkpoint in the place of {checkpoint}, {directory} and {step}.

    Args:
        step: 0-based, the last one that is in it.
    """
    values = {CHECKPOINT: path, DIRECTORY: path.rpartition("/")[0], STEP: str(step + 1)}
    for name, value in values.items():
        template = template.replace(name, value)
    return template


def command(settings: RelaunchSettings | None, path: str, step: int) -> str:
    """Return what a job is given that is started again, in words: an error in it ends the job."""
    settings = settings or RelaunchSettings()
    words = [fill(word, path, step) for word in settings.args]
    parts = [f"job.relaunch.args {' '.join(Redactor().command(words))}"] if words else []
    parts += [f"job.relaunch.env {', '.join(settings.env)}"] if settings.env else []
    if settings.resume != "args" or not parts:
        parts.append(f"job.relaunch.resume {settings.resume}")
    return ", ".join(parts)
