"""The JSON Schemas: current, valid, and of one mind with the loader about form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from supervise.catalog import PolicyErrors, check_file, shipped_folder, shipped_names
from tests.support.recorded_run import shipped_policy

from .conftest import HEAD, WHOLE, plain

SORTS = {
    "policies": "policies/policy.schema.json",
    "policies/packs": "policies/pack.schema.json",
    "runbooks": "runbooks/runbook.schema.json",
    "policies/tests": "policies/test.schema.json",
}
FILES = [(kind, name) for kind in SORTS for name in shipped_names(kind)]


def schema_path(kind: str) -> Path:
    folder, _, name = SORTS[kind].partition("/")
    return shipped_folder(folder) / name


@cache
def validator(kind: str) -> jsonschema.Draft7Validator:
    schema = json.loads(schema_path(kind).read_text("utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)  # what the YAML language server speaks
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_what_is_shipped_is_valid(kind, name):
    """Every shipped file, under the schema that its first line names."""
    path = shipped_folder(kind) / f"{name}.yaml"
    text = path.read_text("utf-8")
    assert list(validator(kind).iter_errors(plain(text))) == []
    if kind == "policies" and name in ("moe", "canary"):  # most packs; a gate
        assert list(validator(kind).iter_errors(plain(shipped_policy(name).resolved))) == []

    named = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == schema_path(kind).resolve()


# ── one corpus, two judges ────────────────────────────────────────────────────────────────────────

WRONG: tuple[Any, ...] = (None, -1, 1.5, "30s", "A b", [1], {"x": 1})

# What the loader says about form, and nowhere else: a schema knows this much.
FORM = re.compile(
    r" should (be|hold) | has no key | needs the key | needs a unit|no kind of detector|no action"
    r"|no notifier|a name in | not available "
)

TESTS = """\
version: supervise/v1
policy: ../p.yaml
mode: enforce
summary: text
tests:
  - name: whole
    seed: 7
    series: {train_loss_raw: "2.4+0x300 5.0-0.13x20 _x3 nan", grad_global_norm: "1.0*1.1x324"}
    noise: {train_loss_raw: 0.03}
    after_rollback: {train_loss_raw: "2.4x9"}
    ranks: 2
    every: 100ms
    delay: 2s
    inject:
      - {at: 120, gap: 3}
      - {at: 130, nan: [train_loss_raw], for: 2}
      - {at: 140, clock_jump: 1h}
      - {at: 150, fail_action: lr_scale, count: 2}
      - {at: 160, crash_after: intent}
      - {at: 170, probe_restart: true}
      - {at: 180, silent_rank: 1, for: 9}
    expect:
      - {at: 298, state: nominal}
      - {between: [300, 306], rule: r, is: firing}
      - {by: 306, actions: [snapshot, lr_scale], count: 1}
      - {never: [rollback, SEV0]}
      - {end: true, budget: {all: 1}}
      - {severity: SEV1, count: 1}
      - {by: 310, message: text}
      - {by: 310, suppressed: "budget:all"}
"""
USES = {
    "policies/packs": HEAD + "use: [hang]\n",
    "runbooks": HEAD
    + (
        "detectors: {a: {kind: nonfinite}}\nrules: [{id: r, when: a, sev: SEV0, run: soften}]\n"
        "budgets: {all: {max: 1}, lr_scale: {max: 1}, rollback: {max: 1}}\nsavepoints: {every: 9}\n"
    ),
}
SUBJECTS = {
    "policies": ("p.yaml", WHOLE),
    "policies/packs": (
        "packs/hang.yaml",
        (shipped_folder("policies/packs") / "hang.yaml").read_text("utf-8"),
    ),
    "runbooks": (
        "runbooks/soften.yaml",
        (shipped_folder("runbooks") / "soften.yaml").read_text("utf-8"),
    ),
    "policies/tests": ("tests/p.yaml", TESTS),
}


def mutants(value: Any) -> Iterator[Any]:
    """Yield the value with one thing in it dropped, renamed, added or replaced, at every depth."""
    yield from WRONG
    if isinstance(value, dict):
        yield {**value, "unheard_of": 1}
        for key, inner in value.items():
            yield {k: v for k, v in value.items() if k != key}
            yield {f"{k}x" if k == key else k: v for k, v in value.items()}
            for changed in mutants(inner):
                yield {**value, key: changed}
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            for changed in mutants(inner):
                yield [*value[:i], changed, *value[i + 1 :]]


def refused(kind: str, document: Any, load: Callable[..., object], folder: Path) -> list[str]:
    """Return what the loader says of a file of this kind."""
    if kind == "policies/tests":
        (folder / "tests").mkdir(exist_ok=True)
        (folder / "p.yaml").write_text(WHOLE, "utf-8")
        (folder / "tests/p.yaml").write_text(json.dumps(document), "utf-8")
        return [problem.message for problem in check_file(str(folder / "tests/p.yaml")).errors]
    files = {SUBJECTS[kind][0]: json.dumps(document)}
    try:
        load(files.get("p.yaml", USES.get(kind)), files)
    except PolicyErrors as error:
        return [problem.message for problem in error.problems]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("kind", SUBJECTS)
def test_schema_and_loader_refuse_the_same_forms(kind, load, tmp_path):
    """Files with one thing wrong, one of 24: where one judge says no, the other does."""
    judge, right = validator(kind), plain(SUBJECTS[kind][1])
    assert refused(kind, right, load, tmp_path) == []
    disagreements = []
    for mutant in islice(mutants(right), 0, None, 24):
        if not isinstance(mutant, dict) or not mutant:
            continue
        said, valid = refused(kind, mutant, load, tmp_path), judge.is_valid(mutant)
        if not valid and not said:
            disagreements.append(f"only the schema refuses {mutant}")
        form = [text for text in said if FORM.search(text)]
        if valid and form:
            disagreements.append(f"only the loader refuses: {form}")

    assert disagreements == []
