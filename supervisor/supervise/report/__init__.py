"""Documents for people: incident reports, stability records, metrics pages, messages' texts."""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "incident_builder": "build_incident_report, describe_rate_left",
        "incident_facts": "Tapes, sparkline, status_of",
        "incident_files": "IncidentFiles, add_report_to_message, describe_run, read_tapes",
        "incident_report": (
            "Action, Approval, Candidate, Check, Condition, Estimate, IncidentReport, Move, "
            "RunOrigin, Status, UnchangedArea, incident_schema"
        ),
        "incident_sentences": (
            "action_texts, change_text, data_change, describe_cause, describe_condition, "
            "describe_cost, describe_observation, "
            "describe_probation, describe_proof, describe_response, estimate_unaided_cost, "
            "next_step, title_trigger"
        ),
        "incident_views": ("render_card, render_files, render_full, render_markdown, outcome_text"),
        "openmetrics": "RunMetrics",
        "receipt": "closing_receipt",
        "records": (
            "Record, count_outcomes, failure_lines, launch_failures, is_closing, "
            "decode_log, read_records, records_of"
        ),
        "stability_record": "stability_schema",
    },
)
