"""`supervise policy check`: report all errors of all files at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...errors import SuperviseError

if TYPE_CHECKING:
    from ...catalog.diagnostics import Problem
    from ...core.model.policy import Policy

INVALID = 65
NAMED = 3  # rules in a note


@click.command(name="check")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "github"]),
    default="text",
    help="github: workflow commands.",
)
@click.option("--json", "as_json", is_flag=True, help="Short for --format json.")
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
@click.pass_context
def command(
    ctx: click.Context, files: tuple[str, ...], form: str, as_json: bool, strict: bool
) -> None:
    """Report all errors and warnings of policy files.

    FILE is a policy, pack, runbook or test file: a path, the name of a shipped policy or pack, or -
    for standard input. The keys of a file determine its type. Files that it refers to (packs,
    runbooks, its policy) are checked too. A note says if the pattern of the job's checkpoints
    finds none here to resume from.

    \b
    Examples:
      supervise policy check my.yaml packs/*.yaml runbooks/*.yaml
      supervise policy check --format github --strict policies/*.yaml

    Exit codes: 0 good, warnings allowed; 65 errors, or warnings with --strict.
    """
    from ...catalog import docs
    from ...catalog.scenario_subject import STDIN, check_file, merged

    text = ""
    if STDIN in files:
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
    found = [check_file(name, text) for name in dict.fromkeys(files)]
    errors, warnings = merged(found)
    failed = bool(errors or (strict and warnings))
    form = "json" if as_json else form
    if form == "json":
        report = {
            "ok": not failed,
            "files": [{"file": each.file, "sort": each.sort} for each in found],
            "errors": [docs.problem_fields(problem) for problem in errors],
            "warnings": [docs.problem_fields(problem) for problem in warnings],
        }
        click.echo(json.dumps(report, ensure_ascii=False, indent=2))
    elif form == "github":
        for level, problems in (("error", errors), ("warning", warnings)):
            for problem in problems:
                click.echo(docs.github(problem, level))
    else:
        _text(errors, warnings, len(found))
        for each in found if not errors else ():
            for note in _notes(each.file) if each.sort == "policy" else ():
                click.echo(f"{each.file}: note: {note}")
    if failed:
        ctx.exit(INVALID)


def _notes(file: str) -> Iterator[str]:
    """Yield what is to be known of a policy where it is now: its checkpoints, what it cites."""
    from ...catalog import load_policy
    from ...catalog.scenario_subject import STDIN
    from ...checkpoints import discovery

    if file == STDIN:
        return
    policy = load_policy(file)
    patterns = policy.job["checkpoints"]["glob"]
    if why := discovery.unusable(patterns, Path.cwd()) if patterns else "":
        yield f"job.checkpoints.glob finds nothing here to resume from; {why}"
    for path in policy.cites:
        yield from _cited(policy, path)


def _cited(policy: Policy, path: str) -> Iterator[str]:
    """Yield why a trial that a policy cites does not show what it does today."""
    from ...trials.trial_log import citation

    try:
        found = citation(Path(path))
    except (SuperviseError, OSError) as error:
        yield f"cites: {error}"
        return
    shown = found.get("monitors", {})
    changed = [
        rule.id
        for rule in policy.rules
        if rule.id in shown and shown[rule.id]["digest"] != policy.digest_of(rule)
    ]
    new = [rule.id for rule in policy.rules if shown and rule.id not in shown]
    for names, what in ((changed, "changed since"), (new, "are not in it")):
        if names:
            more = f" and {len(names) - NAMED} more" * (len(names) > NAMED)
            yield f"cites {path}: rules that {what}: {', '.join(names[:NAMED])}{more}"


def _text(errors: list[Problem], warnings: list[Problem], files: int) -> None:
    for problem in errors:
        click.echo(problem.render())
    for problem in warnings:
        click.echo(problem.render().replace(": ", ": warning: ", 1))
    counts = [
        f"{len(found)} {noun}{'' if len(found) == 1 else 's'}"
        for found, noun in ((errors, "error"), (warnings, "warning"))
        if found
    ]
    what = f"{files} file{'' if files == 1 else 's'}"
    click.echo(f"{what}: {', '.join(counts) or 'good'}")
