"""Actions of runbooks, by what they act on.

Adding an action is adding a subclass of `Action` to one of the files: its verb in YAML is the name
of the class in snake_case, its keys are the fields.
"""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "engine_steps": "Hold, Notify, Undo, Verify",
        "evidence": "CheckWeights, Profile, RaiseSampling, Snapshot",
        "job_control": "Pause, Resume, Stop",
        "quarantine": "Quarantine, Unquarantine",
        "rate_and_clips": "Clip, HoldRate, LossScale, LrScale, SkipStep, UpdateClip",
        "recovery": "Checkpoint, Relaunch, Rollback, SLOWEST_RELAUNCH, Savepoint",
    },
)
