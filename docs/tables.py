"""The generated tables in the READMEs of policies, runbooks and probes.

`make docs` runs cog over the READMEs: a table stands between `[[[cog ... ]]]` and `[[[end]]]`;
everything else in a README is written by hand and left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

from msgspec import Struct

from supervise.catalog import discover, loader, metrics, shipped, yaml_document
from supervise.catalog.diagnostics import Problems
from supervise.catalog.pack import PACKS
from supervise.catalog.runbook_library import RUNBOOKS
from supervise.catalog.scenarios import Expectation, Injection, Scenario
from supervise.catalog.schema import Key, is_alternative, json_schema, keys_of, written_value
from supervise.catalog.sections import (
    PackFile,
    PolicyFile,
    RunbookFile,
    ScenarioFile,
    WrittenRule,
    first_sentence,
)
from supervise.catalog.validation import describe_schema
from supervise.catalog.yaml_document import inline_yaml, plain_yaml
from supervise.core.model.policy import Budget, Inhibit
from supervise_probe import faults


def markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |\n" for row in lines)


def render_keys(form: type) -> str:
    """Return the keys of a file or a section."""
    rows = [(f"`{key.name}`", _default(key), _about(form, key)) for key in keys_of(form).values()]
    return markdown_table(("key", "default", "meaning"), rows)


def _about(form: type, key: Key) -> str:
    """Describe a key, and the keys of its value."""
    inner = next(_sections(key.hint), None)
    names = "" if inner is None else ": " + ", ".join(f"`{name}`" for name in keys_of(inner))
    return (key.doc or describe_schema(json_schema(form)["properties"][key.name])) + names


def _sections(hint: Any) -> Iterator[type]:
    """Yield the section that a hint names, alone or beside others."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        yield hint
    elif is_alternative(hint):
        for inner in get_args(hint):
            yield from _sections(inner)


def _default(key: Key) -> str:
    if key.required:
        return "required"
    if key.default is None or key.default in ("", (), {}):
        return "–"
    return f"`{inline_yaml(written_value(key.default, key.hint))}`"


def render_detectors() -> str:
    """Return the kinds of detectors with their keys."""
    kinds = discover.detector_classes().items()
    return markdown_table(
        ("kind", "BREACH when", "keys and defaults"),
        [
            (f"`{name}`", first_sentence(form).removeprefix("BREACH "), _keys(form))
            for name, form in kinds
        ],
    )


def render_drills() -> str:
    """Return the faults that `--drill` injects."""
    rows = []
    for name, fault in faults.fault_classes().items():
        params = (f"`{key}: {value}` {text}" for key, (value, text) in fault.PARAMS.items())
        moves = f"`{fault.MOVES}`" if fault.MOVES else "–"
        rows.append((f"`{name}`", fault.MEANING, moves, "; ".join(params) or "–"))
    return markdown_table(("drill", "what it does", "moves", "parameters and defaults"), rows)


def render_actions() -> str:
    """Return the actions with their keys."""
    rows = []
    for verb, form in discover.action_classes().items():
        marks = ["destructive"] if form.destructive else []
        marks += ["all ranks at one step"] if form.changes_training else []
        marks += [f"budget `{form.budget}`"] if form.budget else []
        marks += [] if form.touches_job else ["does not touch the job"]
        rows.append((f"`{verb}`", first_sentence(form), _keys(form), ", ".join(marks)))
    return markdown_table(("verb", "what it does", "keys and defaults", ""), rows)


def render_notifiers() -> str:
    """Return the notifiers with their keys."""
    kinds = discover.notifier_classes().items()
    return markdown_table(
        ("name", "what it is", "keys and defaults"),
        [(f"`{name}`", first_sentence(form), _keys(form)) for name, form in kinds],
    )


def _keys(form: type) -> str:
    listed = []
    for key in keys_of(form).values():
        default = _default(key)
        listed.append(f"`{key.name}`" + ("" if default in ("required", "–") else f" {default}"))
    return ", ".join(listed) or "–"


def _files(kind: str) -> list[dict[str, Any]]:
    documents = []
    for name in shipped.shipped_names(kind):
        problems = Problems()
        path = shipped.shipped_folder(kind) / f"{name}.yaml"
        root = yaml_document.read_mapping(path, shipped.display_path(path), problems)
        problems.raise_if_any()
        assert root is not None
        documents.append({"file": name, **plain_yaml(root)})
    return documents


def render_policies() -> str:
    """Return the shipped policies."""
    drafts = [(name, loader.compose_policy(name)) for name in shipped.shipped_names("policies")]
    rows = [
        (f"`{name}`", draft.mode, ", ".join(draft.form.use), draft.form.summary)
        for name, draft in drafts
    ]
    return markdown_table(("policy", "mode", "packs", "what it is for"), rows)


def render_packs() -> str:
    """Return the shipped packs with their rules."""
    rows = []
    for pack in _files(PACKS):
        rules = [
            f"`{rule['id']}` {rule['sev']}" + (f" → {rule['run']}" if "run" in rule else "")
            for rule in pack["rules"]
        ]
        rows.append((f"`{pack['pack']}`", pack["status"], pack["summary"], ", ".join(rules)))
    return markdown_table(("pack", "status", "what it sees", "rules"), rows)


def render_runbooks() -> str:
    """Return the shipped runbooks."""
    rows = []
    for runbook in _files(RUNBOOKS):
        steps = [step if isinstance(step, str) else next(iter(step)) for step in runbook["steps"]]
        steps += ["verify"] if "verify" in runbook else []
        fails = runbook.get("if_it_fails", "hold")
        rows.append((f"`{runbook['runbook']}`", runbook["meaning"], " → ".join(steps), fails))
    return markdown_table(("runbook", "meaning", "steps", "if it fails"), rows)


def render_measured_metrics() -> str:
    """Return the metrics of the probe."""
    rows = [
        (f"`{spec.id}`", spec.unit, spec.meaning, spec.source, spec.cost or "–")
        for spec in metrics.measured_metrics().values()
    ]
    return markdown_table(("id", "unit", "meaning", "source", "cost"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "policy-keys": lambda: render_keys(PolicyFile),
    "rule-keys": lambda: render_keys(WrittenRule),
    "inhibit-keys": lambda: render_keys(Inhibit),
    "budget-keys": lambda: render_keys(Budget),
    "pack-keys": lambda: render_keys(PackFile),
    "test-keys": lambda: render_keys(ScenarioFile),
    "scenario-keys": lambda: render_keys(Scenario),
    "expect-keys": lambda: render_keys(Expectation),
    "inject-keys": lambda: render_keys(Injection),
    "runbook-keys": lambda: render_keys(RunbookFile),
    "detectors": render_detectors,
    "metrics": render_measured_metrics,
    "drills": render_drills,
    "actions": render_actions,
    "notifiers": render_notifiers,
    "policies": render_policies,
    "packs": render_packs,
    "runbooks": render_runbooks,
}


def render_part(name: str) -> str:
    """Return one of `PARTS` with an empty line on both sides, as Markdown wants it."""
    return f"\n{PARTS[name]()}\n"
