"""YAML files and the parts they name -> one frozen policy. Nothing here runs anything.

The loader is imported when it is asked for: a job whose policy is in the cache starts without it.
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
        "discover": "action_classes, detector_classes, name_of, parse_drill",
        "docs": "documents",
        "expression": "ExpressionError, parse_expression",
        "loader": (
            "compose_policy, policy_document, failure_classes, load_isolated_policy, load_policy"
        ),
        "metrics": "ABSENCE_REASONS, all_metrics, measured_metrics",
        "scenario_subject": "Subject, check_file",
        "scenarios": "Injection, Scenario",
        "shipped": "shipped_folder, locate_policy, shipped_names",
        "yaml_document": "parse_yaml, plain_yaml",
    },
)
