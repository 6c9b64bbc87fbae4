"""Finds the job's checkpoints, verifies them, keeps good ones safe, and puts them back."""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "discovery": (
            "FileIdentity, current_name as current_checkpoint_name, has_optimizer_alongside, "
            "matches as matches_checkpoint, missing as missing_shards, "
            "root_of as checkpoint_root, stamp as file_stamp, unusable as unusable_reason"
        ),
        "registry": (
            "Entry, FileFacts, METRICS as CHECKPOINT_METRICS, Register, RunFacts, VERIFIED, "
            "read as read_registry"
        ),
        "retention": "PinStore",
        "service": "CheckpointService, RestoredCheckpoint",
        "tracker": "RunPosition, save_report",
        "verification": "VerifierProcess",
    },
)
