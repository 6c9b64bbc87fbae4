"""`supervise init`: write the policy of a job, and check the job with it.

The policy is a shipped one and what the command and its script say: nothing is copied, so that it
changes with the program.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from ..catalog import shipped
from ..catalog.yaml_document import inline
from ..core.analysis.job_recipes import Recipe
from ..errors import InputError, UsageError
from ._metric_availability import script_of, world_size
from ._params import PROGRAM, JobCommand
from ._script_check import look_at
from .doctor import check_job, print_checks

DEFAULT_FILE = Path("supervise.yaml")
EXAMPLE = {"checkpoints": {"glob": ["out/*.pt"]}, "relaunch": {"args": ["--resume={checkpoint}"]}}
WAYS = "observe | shadow | approve | enforce"


@click.command(name="init", cls=JobCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "-p", "--policy", "base", metavar="NAME", help="Shipped policy that it extends. Default: nano."
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=DEFAULT_FILE,
    metavar="FILE",
    help="File to write, never over another one. Default: supervise.yaml.",
)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(base: str | None, out: Path, argv: tuple[str, ...]) -> int:
    """Write a policy for COMMAND in a few lines, and check both.

    It extends a shipped policy. How the job resumes is recognised in script and command. Then
    the checks of `supervise doctor` are made. The job is not started. With several ranks the
    default is `large`.

    \b
    Examples:
      supervise init -- python train.py
      supervise init --policy medium --out policies/big.yaml -- torchrun train.py

    Exit codes: 0 written, and nothing is broken; 1 something is broken, and written unless that
    is the command; 64 wrong usage, or the file exists.
    """
    from ..catalog import load_policy

    if not argv:
        raise UsageError("no command given", hint=f"{PROGRAM} init -- python train.py")
    name = base or ("nano" if world_size(argv, os.environ) == 1 else "large")
    if shipped.find("policies", name) is None:
        from ..catalog.diagnostics import did_you_mean

        hint = did_you_mean(name, shipped.names("policies"))
        raise UsageError(f"no shipped policy {name!r}", hint=hint)
    if out.exists():
        raise _exists(out)
    checks, _ = check_job(argv)
    if checks[0].status == "fail":  # a slip in the command: another one will be written for
        print_checks(checks)
        click.echo(f"\n{out} is not written: correct the command first")
        return 1
    facts = look_at(script_of(argv), argv)
    _write(out, "".join(f"{line}\n" for line in lines(name, facts.recipe)))
    load_policy(out)
    click.echo(f"{out}:")
    click.echo("".join(f"  {line}\n" for line in out.read_text("utf-8").splitlines()))
    print_checks(checks)
    click.echo(f"\nnext: {PROGRAM} --policy {shlex.quote(str(out))} -- {shlex.join(argv)}")
    return int(any(check.status == "fail" for check in checks))


def lines(base: str, recipe: Recipe | None) -> Iterator[str]:
    """Yield the lines of a policy that extends `base`, the commented ones last."""
    from ..catalog import load_policy

    policy = load_policy(base)
    yield "version: supervise/v1"
    yield f"extends: {base}"
    yield f"mode: {policy.mode} # {WAYS}"
    if recipe is not None and recipe.works:
        yield f"job: # {recipe.name}{f': {recipe.note}' if recipe.note else ''}"
        if recipe.glob:
            yield f"  checkpoints: {inline({'glob': [recipe.glob]})}"
        how = {"args": [*recipe.args]} if recipe.resume == "args" else {"resume": recipe.resume}
        yield f"  relaunch: {inline(how)}"
        if "restart" in policy.budgets:
            yield "  on_crash: restart # a crash, within the budget `restart`"
            yield "override: # a standstill in which nothing moves, where a checkpoint is verified"
            yield "  hang.stuck: {run: restart-if-stuck}"
    else:
        why = f" {recipe.name}: {recipe.note}" if recipe else ""
        yield f"# How this job resumes is not known, so that nothing starts it again.{why}"
        yield f"# job: {inline(EXAMPLE)}"
    yield "# notify: {slack: {url_env: SLACK_URL, min_sev: SEV1}}"
    yield f"# remove: [data] # packs and rules: {PROGRAM} policy show {base}"


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def _exists(path: Path) -> UsageError:
    hint = f"{PROGRAM} policy check {shlex.quote(str(path))}, or --out another file"
    return UsageError(f"{path} exists, and is left as it is", hint=hint)
