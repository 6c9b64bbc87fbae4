"""The words of `job.relaunch`, as a job gets them that is started again from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def command(settings: Mapping[str, Any], path: str, step: int) -> str:
    """Return what a job is given that is started again, in words: an error in it ends the job."""
    words = [fill(str(word), path, step) for word in settings.get("args") or ()]
    parts = [f"job.relaunch.args {' '.join(Redactor().command(words))}"] if words else []
    parts += [f"job.relaunch.env {', '.join(settings['env'])}"] if settings.get("env") else []
    resume = settings.get("resume", "args")
    parts += [f"job.relaunch.resume {resume}"] if resume != "args" or not parts else []
    return ", ".join(parts)
