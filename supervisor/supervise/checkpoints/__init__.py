"""Finds the job's checkpoints, verifies them, keeps good ones safe, and puts them back."""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "discovery": (
            "FileIdentity, find_current_path, has_optimizer_alongside, find_matches, "
            "find_missing_files, find_checkpoint_root, stamp_files, explain_unusable"
        ),
        "registry": (
            "Entry, FileFacts, METRICS as CHECKPOINT_METRICS, Register, RunFacts, VERIFIED, "
            "read_registry"
        ),
        "retention": "PinStore",
        "service": "CheckpointService, RestoredCheckpoint",
        "tracker": "RunPosition, save_report",
        "verification": "VerifierProcess",
    },
)
