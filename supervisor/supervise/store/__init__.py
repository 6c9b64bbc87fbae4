"""Files of a run: journal, audit log, policies, quarantine list, and the records made of them."""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "audit": (
            "Audit, Chain, decode as decode_audit, read as read_audit, verify as verify_audit"
        ),
        "files": "foreign as foreign_reason, locked as locked_file",
        "journal": ("Journal, pack as pack_event, read as read_journal, unpack as unpack_event"),
        "policies": "Reloader, finder as policy_finder",
        "quarantine_list": "Quarantine",
        "recorder": "Recorder",
        "run_directory": "RunDescription, RunDir, add as add_run",
        "run_records": "rows as run_rows, skim as skim_run",
    },
)
