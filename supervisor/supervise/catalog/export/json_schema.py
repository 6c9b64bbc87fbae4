"""JSON Schema, draft-07, of policies, packs, runbooks, tests, incidents, records and messages.

Generated from the dataclasses that the loader validates with; those of what we write are written by
hand. The loader checks more: names,
orders, budgets. Draft-07 is what the YAML language server supports.
`make docs` writes the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...notifiers import webhook
from ...report.card import incident_schema
from ...report.record import record_form
from ..forms.failure_form import FailuresFile
from ..forms.file_forms import (
    InhibitForm,
    PackFile,
    PolicyFile,
    RuleForm,
    RunbookFile,
    RunbookForm,
    ScenarioFile,
)
from ..forms.part_types import StepType, summary
from ..inventory import discover, shipped
from ..schema.dataclass_types import record_schema
from ..schema.field_types import ListOf

FILES: dict[str, tuple[type, str]] = {
    "policies/policy.schema.json": (PolicyFile, "A policy of supervise"),
    "policies/pack.schema.json": (PackFile, "A pack of detectors and rules of supervise"),
    "runbooks/runbook.schema.json": (RunbookFile, "A runbook of supervise"),
    "policies/failures.schema.json": (FailuresFile, "Classes of failures of supervise"),
    "policies/test.schema.json": (ScenarioFile, "Scenarios for a policy of supervise"),
}

INCIDENT, RECORD = "policies/incident.schema.json", "docs/record.schema.json"
MESSAGE = "docs/message.schema.json"
DOCUMENTS = {
    INCIDENT: incident_schema.schema,
    RECORD: record_form.schema,
    MESSAGE: webhook.schema,
}


def schema(form: type, title: str) -> dict[str, Any]:
    """Return the schema of one sort of file."""
    body = record_schema(form)
    parts = _definitions()
    step, reference = parts["step"], {"$ref": "#/definitions/step"}
    body, parts = _replace(body, step, reference), _replace(parts, step, reference)
    used: dict[str, Any] = {}
    todo = [body]
    while todo:
        text = json.dumps(todo.pop())
        for name in parts:
            if f'"#/definitions/{name}"' in text and name not in used:
                used[name] = step if name == "step" else parts[name]
                todo.append(used[name])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": title,
        **body,
        "definitions": {name: used[name] for name in parts if name in used},
    }


def _definitions() -> dict[str, Any]:
    """Return the schemas of the parts that `Deferred` names, and of a step."""
    return {
        "detector": _detector(),
        "rule": record_schema(RuleForm),
        "inhibition": record_schema(InhibitForm),
        "override": {"type": "object"},
        "runbook": {"anyOf": [ListOf(StepType()).schema(), record_schema(RunbookForm)]},
        "step": StepType().schema(),
    }


def _detector() -> dict[str, Any]:
    """Return the schema of all kinds of detectors.

    They are distinguished by `kind` with if/then: under `oneOf` a validator reports errors of the
    wrong alternative.
    """
    kinds = discover.detectors()
    branches = [
        {
            "if": {"properties": {"kind": {"const": name}}, "required": ["kind"]},
            "then": {
                "description": summary(form),
                **record_schema(form, {"kind": {"const": name}}),
            },
        }
        for name, form in kinds.items()
    ]
    return {
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": list(kinds)}},
        "allOf": branches,
    }


def _replace(value: Any, part: dict[str, Any], reference: dict[str, Any]) -> Any:
    """Return JSON with a reference in each place where it holds `part`."""
    if value == part:
        return dict(reference)
    if isinstance(value, dict):
        return {key: _replace(inner, part, reference) for key, inner in value.items()}
    return [_replace(each, part, reference) for each in value] if isinstance(value, list) else value


def text(file: str) -> str:
    """Return what a schema file should hold."""
    made = DOCUMENTS[file]() if file in DOCUMENTS else schema(*FILES[file])
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def path_of(file: str) -> Path:
    """Return where one of `FILES` or `DOCUMENTS` is kept."""
    folder, _, name = file.partition("/")
    return shipped.folder(folder) / name


if __name__ == "__main__":
    for each in (*FILES, *DOCUMENTS):
        path_of(each).write_text(text(each), "utf-8")
