"""Documents for people: incident reports, stability records, metrics pages, messages' texts."""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "incident_builder": "build as build_incident_report",
        "incident_facts": "Tapes, spark as sparkline",
        "incident_files": "IncidentFiles, describe as describe_incident_files, read_tapes",
        "incident_report": "Action, IncidentReport, RunOrigin, schema as incident_schema",
        "incident_sentences": "describe_observation",
        "incident_views": (
            "render_card, files_of as files_of_incident, render_full, render_markdown, "
            "outcome_text, with_report"
        ),
        "openmetrics": "RunMetrics",
        "receipt": "closing as closing_receipt",
        "records": (
            "Record, count_outcomes, failure_lines, failures as failed_records, is_closing, "
            "parse as parse_record, read_records, records_of"
        ),
        "stability_record": "schema as stability_schema",
    },
)
