"""`supervise policy check`: every mistake of every file, in one go."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ...catalog.document.diagnostics import Problem

INVALID = 65


@click.command(name="check")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "github", "sarif"]),
    default="text",
    help="github: workflow commands; sarif: SARIF 2.1.0.",
)
@click.option("--json", "as_json", is_flag=True, help="Short for --format json.")
@click.option("--strict", is_flag=True, help="Warnings count as errors.")
@click.pass_context
def command(
    ctx: click.Context, files: tuple[str, ...], form: str, as_json: bool, strict: bool
) -> None:
    """Find every mistake in policies, packs, runbooks and test files.

    FILE is a path, the name of a shipped policy or pack, or - for standard input; what sort of file
    it is is told by its keys. What a file names (packs, runbooks, its policy) is checked with it.
    Exit status: 0 good (warnings are allowed), 65 mistakes, or warnings under --strict.

    \b
    Examples:
      supervise policy check my.yaml packs/*.yaml runbooks/*.yaml
      supervise policy check --format github --strict policies/*.yaml
      supervise policy check --format sarif nano > policy.sarif
    """
    from ... import __version__
    from ...catalog.export import sarif
    from ...catalog.file_check import STDIN, check_file, merged

    text = ""
    if STDIN in files:
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
    found = [check_file(name, text) for name in dict.fromkeys(files)]
    errors, warnings = merged(found)
    failed = bool(errors or (strict and warnings))
    form = "json" if as_json else form
    if form == "json":
        told = {
            "ok": not failed,
            "files": [{"file": each.file, "sort": each.sort} for each in found],
            "errors": [sarif.plain(problem) for problem in errors],
            "warnings": [sarif.plain(problem) for problem in warnings],
        }
        click.echo(json.dumps(told, ensure_ascii=False, indent=2))
    elif form == "sarif":
        click.echo(json.dumps(sarif.sarif(errors, warnings, __version__), indent=2))
    elif form == "github":
        for level, problems in (("error", errors), ("warning", warnings)):
            for problem in problems:
                click.echo(sarif.github(problem, level))
    else:
        _text(errors, warnings, len(found))
    if failed:
        ctx.exit(INVALID)


def _text(errors: list[Problem], warnings: list[Problem], files: int) -> None:
    for problem in errors:
        click.echo(problem.render())
    for problem in warnings:
        click.echo(problem.render().replace(": ", ": warning: ", 1))
    counts = [
        f"{len(found)} {word}{'' if len(found) == 1 else 's'}"
        for found, word in ((errors, "error"), (warnings, "warning"))
        if found
    ]
    what = f"{files} file{'' if files == 1 else 's'}"
    click.echo(f"{what}: {', '.join(counts) or 'good'}")
