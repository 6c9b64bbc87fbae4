"""The schemas of all files, and what is to be known of a metric or a problem, as data.

`make docs` writes the schema files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from ..core.model.interfaces import Detector
from ..core.model.policy import Inhibit, detectors_behind
from ..core.model.values import OPEN
from ..data.manifest import manifest_schema
from ..notifiers import webhook
from ..report import incident_report, stability_record
from . import discover, metrics, shipped, yaml_document
from .diagnostics import Problem, Problems
from .pack import PACKS
from .rules import parse_expression
from .schema import json_schema
from .sections import (
    FailuresFile,
    PackFile,
    PolicyFile,
    RunbookFile,
    ScenarioFile,
    Step,
    WrittenRule,
    WrittenRunbook,
    first_sentence,
    read_detector,
)
from .yaml_document import MapNode, inline_yaml, plain_yaml

FILES: dict[str, tuple[type, str]] = {
    "policies/policy.schema.json": (PolicyFile, "A policy of supervise"),
    "policies/pack.schema.json": (PackFile, "A pack of detectors and rules of supervise"),
    "runbooks/runbook.schema.json": (RunbookFile, "A runbook of supervise"),
    "policies/failures.schema.json": (FailuresFile, "Classes of failures of supervise"),
    "policies/test.schema.json": (ScenarioFile, "Scenarios for a policy of supervise"),
}

INCIDENT, RECORD = "policies/incident.schema.json", "docs/record.schema.json"
MESSAGE, MANIFEST = "docs/message.schema.json", "docs/data-manifest.schema.json"
DOCUMENTS = {
    INCIDENT: incident_report.incident_schema,
    RECORD: stability_record.stability_schema,
    MESSAGE: webhook.message_schema,
    MANIFEST: manifest_schema,
}


def file_schema(form: type, title: str) -> dict[str, Any]:
    """Return the schema of one sort of file."""
    body = json_schema(form)
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
    """Return the schemas of the parts that are `Any` in a section, and of a step."""
    step = Step.schema()  # type: ignore[attr-defined]
    return {
        "detector": _detector(),
        "rule": json_schema(WrittenRule),
        "inhibition": json_schema(Inhibit),
        "override": OPEN,
        "runbook": {"anyOf": [{"type": "array", "items": step}, json_schema(WrittenRunbook)]},
        "step": step,
    }


def _detector() -> dict[str, Any]:
    """Return the schema of all kinds of detectors.

    They are distinguished by `kind` with if/then: under `oneOf` a validator reports errors of the
    wrong alternative.
    """
    kinds = discover.detector_classes()
    branches = [
        {
            "if": {"properties": {"kind": {"const": name}}, "required": ["kind"]},
            "then": {"description": first_sentence(form), **_of_kind(form, name)},
        }
        for name, form in kinds.items()
    ]
    return {
        **OPEN,
        "required": ["kind"],
        "properties": {"kind": {"enum": list(kinds)}},
        "allOf": branches,
    }


def _of_kind(form: type, name: str) -> dict[str, Any]:
    """Return the schema of a detector with its key `kind`."""
    schema = json_schema(form)
    properties = {"kind": {"const": name}, **schema["properties"]}
    required = ["kind", *schema.get("required", ())]
    return {**schema, "properties": properties, "required": required}


def _replace(value: Any, part: dict[str, Any], reference: dict[str, Any]) -> Any:
    """Return JSON with a reference in each place where it holds `part`."""
    if value == part:
        return dict(reference)
    if isinstance(value, dict):
        return {key: _replace(inner, part, reference) for key, inner in value.items()}
    return [_replace(item, part, reference) for item in value] if isinstance(value, list) else value


def schema_file_text(file: str) -> str:
    """Return what a schema file should hold."""
    document = DOCUMENTS[file]() if file in DOCUMENTS else file_schema(*FILES[file])
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def schema_files() -> Iterator[tuple[Path, str]]:
    """Yield each schema file, and what it should hold."""
    for file in (*FILES, *DOCUMENTS):
        folder, _, name = file.partition("/")
        yield shipped.shipped_folder(folder) / name, schema_file_text(file)


if __name__ == "__main__":
    for path, content in schema_files():
        path.write_text(content, "utf-8")

PROBE, SUPERVISOR, BUILD, JOB = "probe", "supervisor", "build", "job"
BY = {
    PROBE: "measured by the probe",
    SUPERVISOR: "measured by the supervisor",
    BUILD: "measured of training data, by supervise data check",
    JOB: "to be reported by the job",
}


def measuring_component(metric: str, supervisor_metrics: Collection[str]) -> str:
    """Return who measures a metric: one of `PROBE`, `SUPERVISOR`, `BUILD`, `JOB`.

    Args:
        supervisor_metrics: the ids of what the supervisor measures beside the job.
    """
    spec = metrics.spec_of(metric)
    if spec is not None and spec.id in metrics.measured_metrics():
        return PROBE
    if spec is not None and spec.id in metrics.BUILD:
        return BUILD
    return (
        SUPERVISOR
        if metric in supervisor_metrics or (spec is not None and spec.id in supervisor_metrics)
        else JOB
    )


def detectors_reading(metric: str) -> dict[str, str]:
    """Return `{"pack.detector": "robust_z, gt: 6.0, ..."}` for a metric, in order of the packs."""
    return {
        f"{pack.name}.{name}": inline_yaml(pack.written_keys[name]).strip("{}")
        for pack in _packs()
        for name, detector in pack.detectors.items()
        if _reads(detector, metric)
    }


def rules_judging(metric: str) -> list[str]:
    """Return the shipped rules, as `pack.rule`, that read a metric directly or through others."""
    return [
        f"{pack.name}.{rule}"
        for pack in _packs()
        for rule, names in pack.rules.items()
        if any(_reads(pack.detectors[d], metric) for d in detectors_behind(pack.detectors, names))
    ]


def _reads(detector: Detector, metric: str) -> bool:
    """Return whether it reads the metric, or one member of such a family."""
    specs = map(metrics.spec_of, detector.metrics)
    return metric in detector.metrics or any(s is not None and s.id == metric for s in specs)


class _Pack(NamedTuple):
    name: str
    written_keys: dict[str, dict[str, Any]]  # detectors without what they read
    detectors: dict[str, Detector]
    rules: dict[str, tuple[str, ...]]  # id -> detectors in `when`


@cache
def _packs() -> list[_Pack]:
    lines = []
    for name in shipped.shipped_names(PACKS):
        path = shipped.shipped_folder(PACKS) / f"{name}.yaml"
        root = yaml_document.read_mapping(path, shipped.display_path(path), problems := Problems())
        problems.raise_if_any()
        assert root is not None
        section, written_rules = root.get("detectors"), root.get("rules")
        assert isinstance(section, MapNode)
        assert written_rules is not None
        pairs = {key: node for key, (_, node) in section.pairs.items()}
        written_keys = {
            key: {
                k: v for k, v in plain_yaml(node).items() if k not in ("metric", "metrics", "event")
            }
            for key, node in pairs.items()
        }
        detectors = {key: read_detector(node, problems, key) for key, node in pairs.items()}
        rules = {
            rule["id"]: parse_expression(rule["when"]).names for rule in plain_yaml(written_rules)
        }
        lines.append(_Pack(name, written_keys, detectors, rules))
    return lines


def github_annotation(problem: Problem, level: str) -> str:
    """Return a workflow command that marks the place in a pull request."""
    text = problem.message + (f" ({problem.hint})" if problem.hint else "")
    fields = {"file": problem.path, "line": str(problem.line), "col": str(problem.col)}
    marks = ",".join(f"{key}={_property(value)}" for key, value in fields.items())
    return f"::{level} {marks}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


class ProblemFields(Struct, frozen=True):
    """The fields of a problem for JSON; line and column count from 1."""

    file: str
    line: int
    col: int
    message: str
    hint: str | None


def problem_fields(problem: Problem) -> ProblemFields:
    """Return a problem without its source."""
    return ProblemFields(problem.path, problem.line, problem.col, problem.message, problem.hint)
