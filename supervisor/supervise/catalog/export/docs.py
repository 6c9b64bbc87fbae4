"""The generated tables in the READMEs of policies, runbooks and probes.

`make docs` runs cog over the READMEs: a table stands between `[[[cog ... ]]]` and `[[[end]]]`;
everything else in a README is written by hand and left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from supervise_probe import faults

from ..assembly import policy_loader
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


def drills() -> str:
    """Return the faults that `--drill` injects."""
    rows = []
    for name, fault in faults.catalog().items():
        params = (f"`{key}: {value}` {text}" for key, (value, text) in fault.PARAMS.items())
        moves = f"`{fault.MOVES}`" if fault.MOVES else "–"
        rows.append((f"`{name}`", fault.MEANING, moves, "; ".join(params) or "–"))
    return table(("drill", "what it does", "moves", "parameters and defaults"), rows)


def actions() -> str:
    """Return the actions with their keys."""
    rows = []
    for verb, form in discover.actions().items():
        marks = ["destructive"] if form.destructive else []
        marks += ["all ranks at one step"] if form.changes_training else []
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
    drafts = [(name, policy_loader.compose(name)) for name in shipped.names("policies")]
    rows = [
        (f"`{name}`", draft.mode, ", ".join(draft.form.use), draft.form.summary)
        for name, draft in drafts
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
    "drills": drills,
    "actions": actions,
    "notifiers": notifiers,
    "policies": policies,
    "packs": packs,
    "runbooks": runbooks,
}


def part(name: str) -> str:
    """Return one of `PARTS` with an empty line on both sides, as Markdown wants it."""
    return f"\n{PARTS[name]()}\n"
