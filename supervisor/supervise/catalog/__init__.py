"""YAML files and the parts they name -> one frozen policy. Nothing here runs anything.

The loader is imported when it is asked for: a job whose policy is in the cache starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy_exports

if TYPE_CHECKING:
    from .diagnostics import PolicyErrors, Problem
    from .loader import load_policy
    from .shipped import locate

__all__ = ["PolicyErrors", "Problem", "load_policy", "locate"]

__getattr__ = lazy_exports(
    __name__,
    {
        "diagnostics": "MAX_PROBLEMS, PolicyErrors, Problem, Problems, Source, did_you_mean",
        "discover": (
            "actions as action_classes, detectors as detector_classes, name_of, parse_drill"
        ),
        "docs": (
            "DOCUMENTS, FILES as DOCUMENT_FILES, PARTS as DOCUMENT_PARTS, "
            "path_of as document_path, text as document_text"
        ),
        "expression": "ExpressionError, MAX_LENGTH, parse as parse_expression",
        "loader": (
            "compose as compose_policy, document as policy_document, failure_classes, "
            "isolated as isolated_policy, load_policy"
        ),
        "metrics": (
            "METRICS, REASONS as ABSENCE_REASONS, everything as all_metrics, "
            "is_known as is_known_metric, measured as measured_metrics"
        ),
        "scenario_subject": "Subject, check_file, of_tests as policy_of_tests",
        "scenarios": "Injection, Scenario",
        "schema": "json_schema, keys_of, written_value",
        "sections": (
            "PackFile, PolicyFile, RunbookFile, ScenarioFile, Step, read_detector, "
            "summary as section_summary"
        ),
        "shipped": "folder as shipped_folder, locate, names as shipped_names",
        "validation": "describe as describe_mistakes",
        "yaml_document": (
            "MapNode, PARSER as YAML_PARSER, dump as dump_yaml, parse as parse_yaml, "
            "plain as plain_yaml, read as read_yaml"
        ),
    },
)
