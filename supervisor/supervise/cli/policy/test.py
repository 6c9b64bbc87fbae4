"""`supervise policy test`: run scenarios and measure their coverage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import InputError, UsageError
from .._params import Number
from .._progress import counted

if TYPE_CHECKING:
    from ...catalog.diagnostics import Problem
    from ...catalog.scenario_subject import Subject
    from ...policytest.coverage import Coverage
    from ...policytest.suite import Outcome

FAILED = 1


@click.command(name="test")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--coverage", is_flag=True, help="Also report what no scenario covers.")
@click.option(
    "--min",
    "least",
    type=Number(0, 100),
    metavar="PERCENT",
    help="With --coverage: fail below this.",
)
@click.option("--strict", is_flag=True, help="Treat warnings as failures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(
    ctx: click.Context,
    files: tuple[str, ...],
    coverage: bool,
    least: float | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Run scenarios and check the decisions of a policy.

    A scenario feeds series of metrics to the policy. FILE is a test file, a pack (its own
    scenarios), or a policy (the packs that it uses, and tests/<name>.yaml beside it). Shipped
    policies and packs go by name.

    \b
    Examples:
      supervise policy test policies/tests/nano.yaml
      supervise policy test nano --coverage --min 80
      supervise policy test packs/mine.yaml --strict

    Exit codes: 0 good; 1 a scenario failed, coverage below --min, or --strict warnings; 65 invalid
    file or no scenarios.
    """
    from ...policytest import suite
    from ...policytest.coverage import Coverage

    if least is not None and not coverage:
        raise UsageError("--min needs a coverage report", hint="add --coverage")
    shown, warnings = Coverage(), list["Problem"]()
    paths = _paths(files, shown)
    outcomes: dict[str, list[Outcome]] = {}
    for subject in counted(_loaded(paths, warnings), "files of scenarios"):
        outcomes[subject.label] = suite.run(subject)
        shown.add(subject, [outcome.result for outcome in outcomes[subject.label]])
    failed = any(outcome.failures for found in outcomes.values() for outcome in found)
    low = coverage and least is not None and shown.percent() < least
    ok = not (failed or low or (strict and warnings))
    if as_json:
        click.echo(_json(ok, outcomes, shown if coverage else None, warnings))
    else:
        _print_scenarios(outcomes, warnings)
        if coverage:
            _print_coverage(shown, least)
    if not ok:
        ctx.exit(FAILED)


def _paths(files: tuple[str, ...], shown: Coverage) -> list[Path]:
    """Return the packs and test files of the arguments, each once.

    The coverage counts everything that a policy defines, tested or not.

    Raises:
        InputError, PolicyErrors: a file is invalid, or cannot hold scenarios.
    """
    from ...catalog import load_policy, scenario_subject
    from ...catalog.diagnostics import Problems

    found: dict[Path, None] = {}  # in order
    for name in files:
        path = scenario_subject.locate(name)
        problems = Problems()
        root = scenario_subject.read(path, problems)
        problems.stop()
        assert root is not None
        sort = scenario_subject.sort_of(root)
        if sort == "runbook":
            raise InputError(
                f"{path}: a runbook has no scenarios", hint="test a policy that uses it"
            )
        if sort != "policy":
            found[path.resolve()] = None
            continue
        shown.require(load_policy(path))
        several = scenario_subject.files_of(path)
        if not several:
            hint = f"write {path.parent / scenario_subject.TESTS / path.name}"
            raise InputError(f"{path}: no packs and no tests, so there are no scenarios", hint=hint)
        found.update((file.resolve(), None) for file in several)
    return list(found)


def _loaded(paths: list[Path], warnings: list[Problem]) -> list[Subject]:
    """Read all files, so that errors are found before any work.

    Raises:
        InputError, PolicyErrors: a file is invalid, or there is no scenario in any.
    """
    from ...policytest.suite import load

    subjects = [load(path, warnings) for path in paths]
    if not any(subject.scenarios for subject in subjects):
        labels = ", ".join(subject.label for subject in subjects)
        raise InputError(f"{labels}: no scenarios", hint="see policies/README.md")
    return subjects


def _print_scenarios(outcomes: dict[str, list[Outcome]], warnings: list[Problem]) -> None:
    for warning in warnings:
        click.echo(warning.render().replace(": ", ": warning: ", 1))
    total = failures = 0
    for name, found in outcomes.items():
        bad = [outcome for outcome in found if outcome.failures]
        total, failures = total + len(found), failures + len(bad)
        click.echo(f"{name}: {len(found) - len(bad)} of {len(found)} scenarios pass")
        for outcome in bad:
            click.echo(f"  FAILED {outcome.form.name}")
            for where, message in outcome.failures:
                click.echo(f"    {where}: {message}")
    if len(outcomes) > 1:
        click.echo(f"all: {total - failures} of {total} scenarios pass")


def _print_coverage(shown: Coverage, least: float | None) -> None:
    parts = ", ".join(f"{name} {a}/{b}" for name, (a, b) in shown.parts().items())
    required = "" if least is None else f" (required: {least:g} %)"
    click.echo(f"coverage: {shown.percent():.0f} %{required}: {parts}")
    for sentence in shown.missing():
        click.echo(f"  {sentence}")


def _json(
    ok: bool,
    outcomes: dict[str, list[Outcome]],
    shown: Coverage | None,
    warnings: list[Problem],
) -> str:
    from ...catalog import docs

    report: dict[str, Any] = {"ok": ok, "files": _plain(outcomes)}
    report["warnings"] = [docs.problem_fields(problem) for problem in warnings]
    if shown is not None:
        report["coverage"] = _plain_coverage(shown)
    return json.dumps(report, ensure_ascii=False, indent=2)


def _plain(outcomes: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    return [
        {
            "file": name,
            "scenarios": [
                {
                    "name": outcome.form.name,
                    "where": outcome.where,
                    "ok": not outcome.failures,
                    "frames": len(outcome.result.states),
                    "failures": [{"where": w, "message": m} for w, m in outcome.failures],
                }
                for outcome in found
            ],
        }
        for name, found in outcomes.items()
    ]


def _plain_coverage(shown: Coverage) -> dict[str, Any]:
    parts = {name: {"shown": a, "of": b} for name, (a, b) in shown.parts().items()}
    return {"percent": shown.percent(), "parts": parts, "missing": list(shown.missing())}
