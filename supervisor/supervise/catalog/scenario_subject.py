"""The policy that scenarios test: a pack by itself, or a policy with a file of tests.

A pack's own scenarios run under the pack alone, in mode observe: they test its detectors and rules.
A file of tests runs a whole policy, actions and budgets included. `check_file` checks any file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from ..core.model.interfaces import Detector
from ..core.model.policy import Policy
from ..core.run_phase import LR_PHASE
from ..errors import InputError
from . import discover, loader, pack, shipped, yaml_document
from . import scenarios as scenario_form
from .diagnostics import PolicyErrors, Problem, Problems, Source, did_you_mean
from .lint import ALL, check_rules_can_fire
from .loader import Draft
from .metrics import is_known
from .pack import Parts
from .runbook_library import RunbookCatalog
from .scenarios import Names, Scenario
from .schema import BAD, read_section
from .sections import PolicyFile, ScenarioFile
from .yaml_document import ListNode, MapNode, Node, first_text

TESTS = "tests"  # the folder beside a policy, and the key in a file
SIGNS = {
    "pack": {"status", "false_alarms", "source", "scenarios"},
    "runbook": {"steps", "diagnose", "meaning", "impact"},
}
SORTS = ("pack", "runbook", TESTS, "policy")

Scenarios = tuple[tuple[Scenario, Node], ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """Scenarios, and the policy under which they run.

    Attributes:
        names: names that they may use.
        own: the file whose rules and numbers they test.
    """

    label: str
    draft: Draft
    policy: Policy
    scenarios: Scenarios
    names: Names
    source: Source


def locate_file(name: str) -> Path:
    """Return a file: a path, else the name of a shipped policy, else that of a shipped pack.

    Raises:
        InputError: there is none.
    """
    path = Path(name)
    if shipped.is_file(path):
        return path
    try:
        return shipped.locate_policy(name)
    except InputError:
        pack_path = shipped.find_shipped(pack.PACKS, name) if path.parent == Path() else None
        if pack_path is None:
            raise
        return pack_path


def file_kind(root: MapNode) -> str:
    """Return `pack`, `runbook`, `tests` or `policy`, by the keys of the file."""
    named = next((sort for sort in SORTS if sort in root.pairs), None)
    if named is not None:
        return named
    like = (sort for sort, keys in SIGNS.items() if len(keys & root.pairs.keys()) > 1)
    return next(like, "policy")  # the key that names it may be misspelt


def read_subject(path: Path, problems: Problems) -> MapNode | None:
    """Read a file of any sort; None when problems were noted.

    Raises:
        InputError: it cannot be read at all.
    """
    return yaml_document.read_mapping(path, shipped.display_path(path), problems)


def subject_of_pack(root: MapNode, path: Path, problems: Problems) -> Subject:
    """Compose the policy that observes with one pack and nothing else.

    Raises:
        PolicyErrors: the pack, or one of its scenarios, is wrong.
    """
    loader.check_version_not_newer(root, problems)
    beside = path.parent.parent if path.parent.name == "packs" else path.parent
    parts = Parts(folders=(beside,))
    pack.add_pack(root, path.stem, parts, problems)
    scenarios = _listed(root, "scenarios", problems)
    alone = PolicyFile(version="supervise/v1", policy=path.stem, mode="observe")
    try:
        draft = loader.bind_policy(root, alone, parts, path, None, problems)
    except PolicyErrors:  # the names are known all the same
        if not parts.unreadable:
            rules = [entry.name for entry in parts.rules]
            _check(scenarios, _names(rules, (), None, path.stem), problems)
        raise
    rules = [built.rule.id for built in draft.rules]
    names = _names(rules, (), draft.detectors, path.stem)
    _check(scenarios, names, problems)
    return Subject(
        root.source.label, draft, loader.build_policy(draft), scenarios, names, root.source
    )


def subject_of_tests(
    root: MapNode, path: Path, problems: Problems, warnings: list[Problem] | None = None
) -> Subject:
    """Compose the policy that a file of tests names.

    Raises:
        PolicyErrors: the policy, or one of the scenarios, is wrong.
        InputError: there is no such policy.
    """
    loader.check_version_not_newer(root, problems)
    form: ScenarioFile = read_section(ScenarioFile, root, problems, "", lenient=True)
    scenarios = _listed(root, TESTS, problems)
    scenarios += _used(root, form.use, path, {path.resolve()}, problems)
    if form.tests == () and not scenarios:
        problems.add(root.locate(TESTS), "there are no scenarios", "see policies/README.md")
    if form.policy is None:
        problems.raise_if_any()
    named = path.parent / form.policy
    try:
        policy_path = shipped.locate_policy(named if shipped.is_file(named) else form.policy)
    except InputError as error:
        problems.add(root.locate("policy"), str(error), error.hint)
        problems.raise_if_any()
    try:
        draft = loader.compose_policy(policy_path, mode=form.mode, warnings=warnings)
    except PolicyErrors as errors:  # which names there would be is not known then
        problems.extend(errors.problems)
        problems.raise_if_any()
    rules = [built.rule.id for built in draft.rules]
    names = _names(rules, draft.form.budgets, draft.detectors, "")
    _check(scenarios, names, problems)
    source = draft.root.source
    return Subject(root.source.label, draft, loader.build_policy(draft), scenarios, names, source)


def list_policy_files(name_or_path: str | Path) -> list[Path]:
    """Return the files whose scenarios prove a policy: its packs, and its tests if it has some.

    Raises:
        PolicyErrors, InputError: as `load_policy`.
    """
    path = shipped.locate_policy(name_or_path)
    draft = loader.compose_policy(path)
    packs = [pack.find_pack(name, draft.parts.folders) for name in draft.form.use]
    tests = path.parent / TESTS / path.name
    return [file for file in (*packs, tests) if file is not None and shipped.is_file(file)]


def _listed(root: MapNode, key: str, problems: Problems) -> Scenarios:
    """Return the scenarios that can be read; what is wrong with the others is noted already."""
    section = root.get(key)
    scenarios: list[tuple[Scenario, Node]] = []
    names: set[str] = set()
    for node in section.items if isinstance(section, ListNode) else ():
        form = read_section(Scenario, node, Problems(), "")
        if form is BAD:
            continue
        scenario_form.check_scenario(form, node, problems)
        if form.name in names:
            problems.add(node, f"there is a scenario {form.name!r} already")
        names.add(form.name)
        scenarios.append((form, node))
    return tuple(scenarios)


def _used(
    root: MapNode, names: Iterable[str], path: Path, files: set[Path], problems: Problems
) -> Scenarios:
    """Return the scenarios of the files of tests that one uses, each file once."""
    scenarios: Scenarios = ()
    for name in names:
        file, location = path.parent / name, first_text(root.locate("use"), name)
        if not file.is_file():
            problems.add(
                location, f"there is no file {name!r}", "write its path, from this file on"
            )
        elif file.resolve() not in files:
            files.add(file.resolve())
            included = read_subject(file, problems)
            if included is None:
                continue
            if file_kind(included) != TESTS:
                problems.add(location, f"{name} is no file of tests")
                continue
            form: ScenarioFile = read_section(ScenarioFile, included, problems, "", lenient=True)
            scenarios += _listed(included, TESTS, problems)
            scenarios += _used(included, form.use, file, files, problems)
    return scenarios


def _names(
    rules: list[str], budgets: Iterable[str], detectors: Mapping[str, Detector] | None, scope: str
) -> Names:
    read = (detectors or {}).values()
    metrics = {LR_PHASE, *(metric for detector in read for metric in detector.metrics)}
    return Names(
        rules=rules,
        verbs=list(discover.action_classes()),
        budgets=list(dict.fromkeys((*budgets, ALL))),
        metrics=None if detectors is None else metrics,
        clock=any(detector.reads == "clock" for detector in read),
        scope=scope,
    )


def _check(scenarios: Scenarios, names: Names, problems: Problems) -> None:
    for form, node in scenarios:
        scenario_form.check_names(form, node, names, problems)
        if names.metrics is not None:
            _unread(form, node, names.metrics, names.clock, problems)
    problems.raise_if_any()


def _unread(
    form: Scenario, node: Node, metrics: Collection[str], clock: bool, problems: Problems
) -> None:
    """Warn of series that no detector reads. With a `clock` every frame counts."""
    assert isinstance(node, MapNode)
    for _, series_node, series in scenario_form.iterate_series(form, node):
        for name in series:
            if name not in metrics and not (clock and is_known(name)):
                message = f"no detector reads the series {name!r}"
                location = scenario_form.key_of(series_node, name)
                problems.warn(location, message, did_you_mean(name, metrics))


STDIN = "-"


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found in a file and in those that it names."""

    file: str
    sort: str
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


def check_file(name: str, text: str = "") -> Checked:
    """Check a file, or the shipped policy of this name; `-` checks `text` as a policy or a pack."""
    problems, warnings = Problems(), list[Problem]()
    sort = "policy"
    try:
        path = Path("stdin.yaml") if name == STDIN else locate_file(name)
        root = (
            yaml_document.parse_yaml(Source("<stdin>", text), problems)
            if name == STDIN
            else read_subject(path, problems)
        )
        if root is None:
            problems.raise_if_any()
        assert root is not None
        sort = file_kind(root)
        if name == STDIN and sort in ("pack", "runbook"):
            path = Path(f"{getattr(root.get(sort), 'text', 'stdin')}.yaml")
        _judge(root, sort, path, problems, warnings)
    except PolicyErrors as error:
        return Checked(name, sort, error.problems, (*problems.warnings, *warnings))
    except InputError as error:
        label = name or "''"
        missing = Problem(Source(label, ""), label, 1, 1, str(error), error.hint)
        return Checked(name, sort, (missing,), ())
    return Checked(name, sort, (), (*problems.warnings, *warnings))


def _judge(
    root: MapNode, sort: str, path: Path, problems: Problems, warnings: list[Problem]
) -> None:
    if sort == "pack":
        subject_of_pack(root, path, problems)
    elif sort == TESTS:
        subject_of_tests(root, path, problems, warnings)
    elif sort == "runbook":
        beside = path.parent.parent if path.parent.name == "runbooks" else path.parent
        library = RunbookCatalog({}, (beside,), problems)
        opened = library.parse_file(path.stem, root)
        if opened is not None:
            node = opened.node.locate("if_it_fails")
            library.load_with_fallbacks(
                opened.form.if_it_fails, node, f"runbook {path.stem}.if_it_fails"
            )
    else:
        draft = loader.compose_from_root(root, path, None, problems)
        entries = {built.rule.id: built.entry for built in draft.rules}
        assert isinstance(draft.root, MapNode)
        acting = replace(draft, mode="enforce")  # what is there to be judged once it may act
        check_rules_can_fire(loader.build_policy(acting), entries, draft.root, problems)
    problems.raise_if_any()


def merge_problems(results: Iterable[Checked]) -> tuple[list[Problem], list[Problem]]:
    """Return all errors and all warnings, each once, by file, line and column."""
    errors: dict[tuple[str, str], Problem] = {}
    warnings: dict[tuple[str, str], Problem] = {}
    for checked in results:
        errors |= {(p.location, p.message): p for p in checked.errors}
        warnings |= {(p.location, p.message): p for p in checked.warnings}
    by_location = attrgetter("path", "line", "col", "message")
    return sorted(errors.values(), key=by_location), sorted(warnings.values(), key=by_location)
