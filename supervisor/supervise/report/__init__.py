"""Documents for people: incident reports, stability records, metrics pages, messages' texts."""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "incident_builder": "build as build_incident_report, summarize as summarize_incident",
        "incident_facts": (
            "AFTER as STEPS_AFTER, BEFORE as STEPS_BEFORE, Tape, Tapes, "
            "actions as incident_actions, spark as sparkline"
        ),
        "incident_files": "IncidentFiles, describe as describe_incident_files, read_tapes",
        "incident_report": (
            "Action, Condition, FiredRule, IncidentReport, RunOrigin, Status, "
            "schema as incident_schema"
        ),
        "incident_sentences": (
            "action_texts, cause as cause_sentence, cost as cost_sentence, "
            "inputs as input_sentences, observation as observation_sentence"
        ),
        "incident_views": (
            "card as incident_card, files_of as files_of_incident, full as full_incident, "
            "markdown as incident_markdown, outcome_text, page as incident_page, "
            "rows as incident_rows, with_report"
        ),
        "metrics_endpoint": "MAX_OPEN",
        "openmetrics": "RunMetrics",
        "receipt": "closing as closing_receipt, dear as cost_warning",
        "records": (
            "Record, count_outcomes, failure_lines, failures as failed_records, incident_ids, "
            "is_closing, parse as parse_record, read_records, records_of, "
            "troubles as record_troubles"
        ),
        "stability_record": "schema as stability_schema",
    },
)
