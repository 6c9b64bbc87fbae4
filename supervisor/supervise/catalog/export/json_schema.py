"""JSON Schema, draft-07, of policy, pack, runbook and test files: for editors, and for other tools.

Generated from the same dataclasses that the loader reads, so the two cannot disagree about form.
The loader checks more: names, orders, budgets. Draft-07 is what the YAML language server speaks.
`python -m supervise.catalog.export.docs` writes the files.
"""

from __future__ import annotations

import json
from typing import Any

from ..forms.file_forms import PackFile, PolicyFile, RunbookFile, ScenarioFile
from ..forms.part_types import definitions
from ..schema.dataclass_types import record_schema

FILES: dict[str, tuple[type, str]] = {
    "policies/policy.schema.json": (PolicyFile, "A policy of supervise"),
    "policies/pack.schema.json": (PackFile, "A pack of detectors and rules of supervise"),
    "runbooks/runbook.schema.json": (RunbookFile, "A runbook of supervise"),
    "policies/test.schema.json": (ScenarioFile, "Scenarios for a policy of supervise"),
}


def schema(form: type, title: str) -> dict[str, Any]:
    """Return the schema of one sort of file."""
    used = json.dumps(body := record_schema(form))
    parts = {name: part for name, part in definitions().items() if f"definitions/{name}" in used}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": title,
        **body,
        "definitions": parts,
    }


def text(file: str) -> str:
    """Return what a schema file should hold."""
    return json.dumps(schema(*FILES[file]), indent=2, ensure_ascii=False) + "\n"
