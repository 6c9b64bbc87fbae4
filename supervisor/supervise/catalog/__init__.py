"""YAML files and the parts they name -> one frozen policy. Nothing here runs anything.

A module is imported when a name of it is asked for: most commands need only a few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy_exports

if TYPE_CHECKING:
    from .diagnostics import PolicyErrors, Problem
    from .loader import load_policy
    from .shipped import locate_policy

__all__ = ["PolicyErrors", "Problem", "load_policy", "locate_policy"]

__getattr__ = lazy_exports(
    __name__,
    {
        "diagnostics": "PolicyErrors, Problem, Problems, Source",
        "discover": "action_classes, detector_classes, yaml_name_of, drill_facts, parse_drill",
        "docs": "rules_judging, schema_files",
        "loader": (
            "compose_policy, failure_classes, load_isolated_policy, load_policy, policy_document"
        ),
        "metrics": "ABSENCE_REASONS, BUILD, JUDGED_AS, all_metrics, measured_metrics",
        "rules": "ExpressionError, parse_expression",
        "scenario_subject": "Subject, check_file",
        "scenarios": "Injection, Scenario",
        "shipped": "locate_policy, shipped_folder, shipped_names",
        "yaml_document": "parse_yaml, plain_yaml",
    },
)
