"""`supervise policy test`: play scenarios, and find out what they do not prove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import InputError, UsageError
from .._number import Number

if TYPE_CHECKING:
    from ...catalog.document.diagnostics import Problem
    from ...catalog.scenario_subject import Subject
    from ...mutation.mutation_runner import MutationReport
    from ...policytest.coverage import Coverage
    from ...policytest.suite import Outcome

FAILED = 1


@click.command(name="test")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--mutate", is_flag=True, help="Also break the policy, once per thing in it.")
@click.option("--coverage", is_flag=True, help="Also tell what no scenario shows.")
@click.option(
    "--min",
    "least",
    type=Number(0, 100),
    metavar="PERCENT",
    help="With --coverage: fail below this.",
)
@click.option("--strict", is_flag=True, help="Warnings count as failures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--jobs", type=click.IntRange(0), default=0, metavar="N", help="Processes; 0: as many as help."
)
@click.pass_context
def command(
    ctx: click.Context,
    files: tuple[str, ...],
    mutate: bool,
    coverage: bool,
    least: float | None,
    strict: bool,
    as_json: bool,
    jobs: int,
) -> None:
    """Play scenarios: series of metrics in, what the policy makes of them out.

    FILE is a test file, a pack (its own scenarios), or a policy: then the packs that it uses, and
    tests/<name>.yaml beside it. Shipped policies and packs go by name.

    --mutate doubles and halves each number that the file gives, turns each comparator, swaps and/or
    and drops each inhibition, one at a time; a change that no scenario notices is listed.

    Exit status: 0 good; 1 a scenario failed, a change survived, too little is covered, or there are
    warnings under --strict; 65 a file is wrong, or there are no scenarios.

    \b
    Examples:
      supervise policy test policies/tests/nano.yaml
      supervise policy test nano --coverage --min 80
      supervise policy test packs/mine.yaml --mutate
    """
    from ...mutation import mutation_runner
    from ...policytest import suite
    from ...policytest.coverage import Coverage

    if least is not None and not coverage:
        raise UsageError("--min says how much must be covered", hint="add --coverage")
    shown = Coverage()
    warnings: list[Problem] = []
    paths = _paths(files, shown)
    played: dict[str, list[Outcome]] = {}
    hunted: dict[str, MutationReport] = {}
    for subject in _loaded(paths, warnings):
        played[subject.label] = suite.run(subject)
        shown.add(subject, [outcome.result for outcome in played[subject.label]])
    failed = any(outcome.failures for found in played.values() for outcome in found)
    if mutate and not failed:  # what fails already notices nothing
        hunted = dict(zip(played, (mutation_runner.run(p, jobs) for p in paths), strict=True))
    odd = strict and bool(warnings)
    low = coverage and least is not None and shown.percent() < least
    survived = any(found.survivors for found in hunted.values())
    if as_json:
        ok = not (failed or low or survived or odd)
        click.echo(_json(ok, played, shown if coverage else None, hunted, warnings))
    else:
        _tell(played, warnings)
        if coverage:
            _tell_coverage(shown, least)
        if mutate and failed:
            click.echo("mutants: not tried, since scenarios fail")
        for name, found in hunted.items():
            _tell_hunted(name, found)
    if failed or low or survived or odd:
        ctx.exit(FAILED)


def _paths(files: tuple[str, ...], shown: Coverage) -> list[Path]:
    """Return the packs and test files that are meant, each once.

    What a policy has is wanted of the coverage, also where nothing is about it.

    Raises:
        InputError, PolicyErrors: a file is wrong, or holds no scenarios and cannot.
    """
    from ...catalog import load_policy, scenario_subject
    from ...catalog.document.diagnostics import Problems

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
                f"{path}: a runbook has no scenarios", hint="test a policy that runs it"
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
    """Read all files, so that mistakes are found before any work.

    Raises:
        InputError, PolicyErrors: a file is wrong, or all of them together have no scenario.
    """
    from ...policytest.suite import load

    subjects = [load(path, warnings) for path in paths]
    if not any(subject.scenarios for subject in subjects):
        labels = ", ".join(subject.label for subject in subjects)
        raise InputError(f"{labels}: no scenarios", hint="see policies/README.md")
    return subjects


def _tell(played: dict[str, list[Outcome]], warnings: list[Problem]) -> None:
    for warning in warnings:
        click.echo(warning.render().replace(": ", ": warning: ", 1))
    total = failures = 0
    for name, outcomes in played.items():
        bad = [outcome for outcome in outcomes if outcome.failures]
        total, failures = total + len(outcomes), failures + len(bad)
        click.echo(f"{name}: {len(outcomes) - len(bad)} of {len(outcomes)} scenarios pass")
        for outcome in bad:
            click.echo(f"  FAILED {outcome.form.name}")
            for where, message in outcome.failures:
                click.echo(f"    {where}: {message}")
    if len(played) > 1:
        click.echo(f"all: {total - failures} of {total} scenarios pass")


def _tell_coverage(shown: Coverage, least: float | None) -> None:
    parts = ", ".join(f"{name} {a}/{b}" for name, (a, b) in shown.parts().items())
    wanted = "" if least is None else f" (wanted: {least:g} %)"
    click.echo(f"coverage: {shown.percent():.0f} %{wanted}: {parts}")
    for sentence in shown.missing():
        click.echo(f"  {sentence}")


def _tell_hunted(name: str, found: MutationReport) -> None:
    click.echo(f"{name}: {found.total - len(found.survivors)} of {found.total} mutants noticed")
    for where, what in found.survivors:
        click.echo(f"  {where}: no scenario notices {what}")


def _json(
    ok: bool,
    played: dict[str, list[Outcome]],
    shown: Coverage | None,
    hunted: dict[str, MutationReport],
    warnings: list[Problem],
) -> str:
    from ...catalog.export import sarif

    told: dict[str, Any] = {"ok": ok, "files": _plain(played)}
    told["warnings"] = [sarif.plain(problem) for problem in warnings]
    if shown is not None:
        told["coverage"] = _plain_coverage(shown)
    if hunted:
        told["mutants"] = {name: _plain_hunted(found) for name, found in hunted.items()}
    return json.dumps(told, ensure_ascii=False, indent=2)


def _plain(played: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
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
                for outcome in outcomes
            ],
        }
        for name, outcomes in played.items()
    ]


def _plain_coverage(shown: Coverage) -> dict[str, Any]:
    parts = {name: {"shown": a, "of": b} for name, (a, b) in shown.parts().items()}
    return {"percent": shown.percent(), "parts": parts, "missing": list(shown.missing())}


def _plain_hunted(found: MutationReport) -> dict[str, Any]:
    survivors = [{"where": where, "what": what} for where, what in found.survivors]
    return {"total": found.total, "noticed": found.total - len(survivors), "survivors": survivors}
