"""The generated parts of the READMEs of policies, runbooks and probes, and the JSON Schemas.

A table stands between `<!-- generated: name -->` and `<!-- end -->`; the rest of a README is
written by hand.

    python -m supervise.catalog.export.docs            write them     --check     are they current?
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..assembly.pack import PACKS
from ..assembly.runbook_library import RUNBOOKS
from ..document import yaml_reader
from ..document.diagnostics import Problems
from ..document.nodes import plain
from ..document.yaml_writer import inline
from ..forms.file_forms import (
    BudgetForm,
    InhibitForm,
    PackFile,
    PolicyFile,
    RuleForm,
    RunbookFile,
    ScenarioFile,
)
from ..forms.part_types import summary
from ..forms.scenario_form import ExpectForm, InjectForm, ScenarioForm
from ..inventory import discover, metrics, shipped
from ..schema.dataclass_types import Key, Record, keys_of
from ..schema.field_types import OneOf
from ..schema.validation import describe
from . import json_schema

READMES = ("policies/README.md", "runbooks/README.md", "probes/README.md")
_PART = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |\n" for row in lines)


def keys(form: type) -> str:
    """Return the keys of a file or a section."""
    rows = [(f"`{key.name}`", _default(key), _about(key)) for key in keys_of(form).values()]
    return table(("key", "default", "meaning"), rows)


def _about(key: Key) -> str:
    """Describe a key, and the keys of its value."""
    types = key.type.types if isinstance(key.type, OneOf) else (key.type,)
    inner = next((each.form for each in types if isinstance(each, Record)), None)
    names = "" if inner is None else ": " + ", ".join(f"`{name}`" for name in keys_of(inner))
    return (key.doc or describe(key.type.schema())) + names


def _default(key: Key) -> str:
    if key.required:
        return "required"
    if key.default is None or key.default in ("", (), {}):
        return "–"
    return f"`{inline(key.type.write(key.default))}`"


def detectors() -> str:
    """Return the kinds of detectors with their keys."""
    kinds = discover.detectors().items()
    return table(
        ("kind", "BREACH when", "keys and defaults"),
        [(f"`{name}`", summary(form).removeprefix("BREACH "), _keys(form)) for name, form in kinds],
    )


def actions() -> str:
    """Return the actions with their keys."""
    rows = []
    for verb, form in discover.actions().items():
        marks = ["destructive"] if form.destructive else []
        marks += ["one rank only"] if form.changes_training else []
        marks += [f"budget `{form.budget}`"] if form.budget else []
        marks += [] if form.touches_job else ["does not touch the job"]
        rows.append((f"`{verb}`", summary(form), _keys(form), ", ".join(marks)))
    return table(("verb", "what it does", "keys and defaults", ""), rows)


def notifiers() -> str:
    """Return the notifiers with their keys."""
    kinds = discover.notifiers().items()
    return table(
        ("name", "what it is", "keys and defaults"),
        [(f"`{name}`", summary(form), _keys(form)) for name, form in kinds],
    )


def _keys(form: type) -> str:
    listed = []
    for key in keys_of(form).values():
        default = _default(key)
        listed.append(f"`{key.name}`" + ("" if default in ("required", "–") else f" {default}"))
    return ", ".join(listed) or "–"


def _files(kind: str) -> list[dict[str, Any]]:
    found = []
    for name in shipped.names(kind):
        problems = Problems()
        path = shipped.folder(kind) / f"{name}.yaml"
        root = yaml_reader.read(path, shipped.label(path), problems)
        problems.stop()
        assert root is not None
        found.append({"file": name, **plain(root)})
    return found


def policies() -> str:
    """Return the shipped policies."""
    rows = [
        (f"`{p['file']}`", p.get("mode", "shadow"), ", ".join(p.get("use", ())), p["summary"])
        for p in _files("policies")
    ]
    return table(("policy", "mode", "packs", "what it is for"), rows)


def packs() -> str:
    """Return the shipped packs with their rules."""
    rows = []
    for pack in _files(PACKS):
        rules = [
            f"`{rule['id']}` {rule['sev']}" + (f" → {rule['run']}" if "run" in rule else "")
            for rule in pack["rules"]
        ]
        rows.append((f"`{pack['pack']}`", pack["status"], pack["summary"], ", ".join(rules)))
    return table(("pack", "status", "what it sees", "rules"), rows)


def runbooks() -> str:
    """Return the shipped runbooks."""
    rows = []
    for runbook in _files(RUNBOOKS):
        steps = [step if isinstance(step, str) else next(iter(step)) for step in runbook["steps"]]
        steps += ["verify"] if "verify" in runbook else []
        fails = runbook.get("if_it_fails", "hold")
        rows.append((f"`{runbook['runbook']}`", runbook["meaning"], " → ".join(steps), fails))
    return table(("runbook", "meaning", "steps", "if it fails"), rows)


def measured() -> str:
    """Return the metrics of the probe."""
    rows = [
        (f"`{spec.id}`", spec.unit, spec.meaning, spec.source, spec.cost or "–")
        for spec in metrics.known().values()
    ]
    return table(("id", "unit", "meaning", "source", "cost"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "policy-keys": lambda: keys(PolicyFile),
    "rule-keys": lambda: keys(RuleForm),
    "inhibit-keys": lambda: keys(InhibitForm),
    "budget-keys": lambda: keys(BudgetForm),
    "pack-keys": lambda: keys(PackFile),
    "test-keys": lambda: keys(ScenarioFile),
    "scenario-keys": lambda: keys(ScenarioForm),
    "expect-keys": lambda: keys(ExpectForm),
    "inject-keys": lambda: keys(InjectForm),
    "runbook-keys": lambda: keys(RunbookFile),
    "detectors": detectors,
    "metrics": measured,
    "actions": actions,
    "notifiers": notifiers,
    "policies": policies,
    "packs": packs,
    "runbooks": runbooks,
}


def path_of(file: str) -> Path:
    """Return where a generated file is kept."""
    folder, _, name = file.partition("/")
    return shipped.folder(folder) / name


def current(file: str) -> str:
    """Return what a file should hold: a README with its tables filled in, or a schema."""
    if file in json_schema.FILES:
        return json_schema.text(file)
    text = path_of(file).read_text("utf-8")
    return _PART.sub(lambda part: part[1] + "\n" + PARTS[part[2]]() + "\n" + part[3], text)


def stale() -> list[str]:
    """Return the files that are not what they should be."""
    return [
        file
        for file in (*READMES, *json_schema.FILES)
        if not path_of(file).is_file() or path_of(file).read_text("utf-8") != current(file)
    ]


def main(arguments: list[str]) -> int:
    """Write what is out of date, or with `--check` only name it."""
    files = stale()
    for file in files:
        if "--check" in arguments:
            print(f"{file} is out of date; run: python -m supervise.catalog.export.docs")
        else:
            path_of(file).write_text(current(file), "utf-8")
            print(f"wrote {file}")
    return 1 if files and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
