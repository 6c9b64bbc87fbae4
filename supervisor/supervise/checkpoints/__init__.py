"""Finds the job's checkpoints, verifies them, keeps good ones safe, and puts them back."""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "discovery": (
            "FileIdentity, explain_unusable, find_current_path, find_matches, stamp_files"
        ),
        "registry": "Entry, Register, RunFacts, VERIFIED, predecessors, read_registry",
        "service": "CheckpointService, RestoredCheckpoint",
        "tracker": "RunPosition, save_report",
        "verification": (
            "Evaluation, VerifierProcess, evaluate_checkpoint, harness_request, "
            "has_group_oom_kill, resolve_evaluate_paths, seconds_between_saves"
        ),
    },
)
