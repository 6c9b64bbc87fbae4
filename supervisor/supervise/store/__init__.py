"""Files of a run: journal, audit log, policies, quarantine list, and the records made of them."""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "audit": (
            "Audit, Chain, decode as decode_audit, genesis as genesis_hash, "
            "leaf as audit_leaf, read as read_audit, verify as verify_audit"
        ),
        "files": (
            "create as create_file, foreign as foreign_reason, locked as locked_file, "
            "make_directory"
        ),
        "journal": (
            "Journal, KINDS as EVENT_KINDS, MAGIC as JOURNAL_MAGIC, encode_record, "
            "heads as journal_heads, pack as pack_event, read as read_journal, "
            "thinned as thinned_events, unpack as unpack_event, until as events_until"
        ),
        "policies": "Reloader, finder as policy_finder, path_of",
        "quarantine_list": "CHANGES as QUARANTINE_CHANGES, Quarantine",
        "recorder": "Recorder",
        "run_directory": "RunDescription, RunDir, add as add_run",
        "run_records": (
            "PARTS as RUN_PARTS, WallClock, digest_of, export_csv, export_parquet, metric_ids, "
            "rows as run_rows, skim as skim_run"
        ),
    },
)
