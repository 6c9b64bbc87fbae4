"""What scenarios are about: a pack by itself, or a policy with a file of tests.

A pack's own scenarios are played under the pack alone, observed: they prove that its detectors and
rules see what they promise. A file of tests plays a whole policy, actions and budgets included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core.rule import Policy
from ..errors import InputError
from . import discover, freeze, load, pack, policy, scenario, shipped
from .forms import PackFile, PolicyFile, ScenarioFile
from .freeze import Draft
from .kinds import BAD
from .lint import ALL
from .nodes import Mapping, Node, Sequence
from .pack import Parts
from .problems import Problem, Problems, Source
from .record import build
from .scenario import Names, ScenarioForm

TESTS = "tests"  # the folder beside a policy, and the key in a file
SORTS = ("pack", "runbook", TESTS, "policy")


@dataclass(frozen=True, slots=True)
class Subject:
    """Scenarios, and the policy under which they are played.

    Attributes:
        names: what they may speak of.
        own: the file whose rules and numbers they must prove.
    """

    label: str
    draft: Draft
    policy: Policy
    scenarios: tuple[tuple[ScenarioForm, Node], ...]
    names: Names
    own: Source


def locate(name: str) -> Path:
    """Return a file: a path, else the name of a shipped policy, else that of a shipped pack.

    Raises:
        InputError: there is none.
    """
    path = Path(name)
    if path.is_file():
        return path
    try:
        return policy.locate(name)
    except InputError:
        found = shipped.find(pack.PACKS, name) if path.parent == Path() else None
        if found is None:
            raise
        return found


def sort_of(root: Mapping) -> str:
    """Return `pack`, `runbook`, `tests` or `policy`: told by the keys of the file."""
    return next((sort for sort in SORTS if sort in root.pairs), "policy")


def read(path: Path, problems: Problems) -> Mapping | None:
    """Read a file of any sort; None when problems were noted.

    Raises:
        InputError: it cannot be read at all.
    """
    return load.read(path, shipped.label(path), problems)


def of_pack(root: Mapping, path: Path, problems: Problems) -> Subject:
    """Compose the policy that observes with one pack and nothing else.

    Raises:
        PolicyErrors: the pack, or one of its scenarios, is wrong.
    """
    policy.check_version(root, problems)
    parts = Parts()
    form: PackFile = pack.add(root, path.stem, parts, problems)
    if form is BAD:
        problems.stop()
    beside = path.parent.parent if path.parent.name == "packs" else path.parent
    alone = PolicyFile(version="supervise/v1", policy=form.pack, mode="observe")
    draft = policy.assemble(root, alone, parts, beside / path.name, None, problems)
    scenarios = _listed(root, "scenarios", form.scenarios)
    names = _names(draft, form.pack)
    _check(scenarios, names, problems)
    return Subject(root.source.label, draft, freeze.policy(draft), scenarios, names, root.source)


def of_tests(
    root: Mapping, path: Path, problems: Problems, warnings: list[Problem] | None = None
) -> Subject:
    """Compose the policy that a file of tests names.

    Raises:
        PolicyErrors: the policy, or one of the scenarios, is wrong.
        InputError: there is no such policy.
    """
    policy.check_version(root, problems)
    form: ScenarioFile = build(ScenarioFile, root, problems, "")
    if form is BAD:
        problems.stop()
    named = path.parent / form.policy
    try:
        found = policy.locate(named if named.is_file() else form.policy)
    except InputError as error:
        problems.add(root.place("policy"), str(error), error.hint)
        problems.stop()
    draft = policy.compose(found, mode=form.mode, warnings=warnings)
    scenarios = _listed(root, TESTS, form.tests)
    names = _names(draft, "")
    _check(scenarios, names, problems)
    own = draft.root.source
    return Subject(root.source.label, draft, freeze.policy(draft), scenarios, names, own)


def files_of(name_or_path: str | Path) -> list[Path]:
    """Return the files whose scenarios prove a policy: its packs, and its tests if it has some.

    Raises:
        PolicyErrors, InputError: as `load_policy`.
    """
    path = policy.locate(name_or_path)
    draft = policy.compose(path)
    packs = [pack.find(name, path.parent) for name in draft.form.use]
    tests = path.parent / TESTS / path.name
    return [file for file in (*packs, tests) if file is not None and file.is_file()]


def _listed(
    root: Mapping, key: str, forms: tuple[ScenarioForm, ...]
) -> tuple[tuple[ScenarioForm, Node], ...]:
    held = root.get(key)
    nodes = held.items if isinstance(held, Sequence) else []
    return tuple(zip(forms, nodes, strict=True))


def _names(draft: Draft, scope: str) -> Names:
    return Names(
        rules=[made.rule.id for made in draft.rules],
        verbs=list(discover.actions()),
        budgets=[*draft.form.budgets, *([] if ALL in draft.form.budgets else [ALL])],
        scope=scope,
    )


def _check(
    scenarios: tuple[tuple[ScenarioForm, Node], ...], names: Names, problems: Problems
) -> None:
    seen: set[str] = set()
    for form, node in scenarios:
        scenario.check(form, node, names, problems)
        if form.name in seen:
            problems.add(node, f"there is a scenario {form.name!r} already")
        seen.add(form.name)
    problems.stop()
