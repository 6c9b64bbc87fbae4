"""Check files of any sort, by themselves and with all that they name: every mistake of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from . import scenario_subject
from .assembly import policy_loader
from .assembly.runbook_library import RunbookCatalog
from .document import yaml_reader
from .document.diagnostics import PolicyErrors, Problem, Problems, Source
from .document.nodes import Mapping

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
        path = Path("stdin.yaml") if name == STDIN else scenario_subject.locate(name)
        root = (
            yaml_reader.parse(Source("<stdin>", text), problems)
            if name == STDIN
            else scenario_subject.read(path, problems)
        )
        if root is None:
            problems.stop()
        assert root is not None
        sort = scenario_subject.sort_of(root)
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
    root: Mapping, sort: str, path: Path, problems: Problems, warnings: list[Problem]
) -> None:
    if sort == "pack":
        scenario_subject.of_pack(root, path, problems)
    elif sort == scenario_subject.TESTS:
        scenario_subject.of_tests(root, path, problems, warnings)
    elif sort == "runbook":
        beside = path.parent.parent if path.parent.name == "runbooks" else path.parent
        library = RunbookCatalog({}, beside, problems)
        opened = library.file(path.stem, root)
        if opened is not None:
            at = opened.node.place("if_it_fails")
            library.open(opened.form.if_it_fails, at, f"runbook {path.stem}.if_it_fails")
    else:
        policy_loader.from_root(root, path, None, problems)
    problems.stop()


def merged(found: Iterable[Checked]) -> tuple[list[Problem], list[Problem]]:
    """Return all errors and all warnings, each once, by file, line and column."""
    errors: dict[tuple[str, str], Problem] = {}
    warnings: dict[tuple[str, str], Problem] = {}
    for checked in found:
        errors |= {(p.where, p.message): p for p in checked.errors}
        warnings |= {(p.where, p.message): p for p in checked.warnings}
    return _sorted(errors.values()), _sorted(warnings.values())


def _sorted(problems: Iterable[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda p: (p.path, p.line, p.col, p.message))
