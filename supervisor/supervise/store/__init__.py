"""Files of a run: journal, audit log, policies, quarantine list, and the records made of them."""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "audit": "Audit, Chain, read_audit, verify_audit",
        "files": (
            "create_file, find_foreign_writer, is_locked, make_directory, open_file, "
            "read_file, replace_file, replacing_file"
        ),
        "journal": "Journal, pack_event, read_journal, unpack_event",
        "policies": "Reloader, make_policy_finder",
        "quarantine_list": "Quarantine",
        "recorder": "Recorder",
        "run_directory": "RunDescription, RunDir, add_run",
        "run_records": "RunOutcome, read_rows, skim_run",
    },
)
