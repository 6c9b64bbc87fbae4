"""`supervise why-not`: which condition was missing, by how much, or what held a rule back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ..errors import understood
from ..store import audit, journal, policies
from ..store.run_directory import RunDir
from .audit import document, printable
from .why import LOOK


@click.command(name="why-not")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--rule", required=True, metavar="R", help="Id of the rule.")
@click.option("--step", required=True, type=int, metavar="N", help="The job's step.")
@click.option("--rank", default=0, show_default=True, type=int, metavar="K")
@click.option(
    "--attempt", type=int, metavar="A", help="Where a rollback repeated the step; else the newest."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, rule: str, step: int, rank: int, attempt: int | None, as_json: bool) -> None:
    """Tell why a rule did not fire at a step, or did not act: with the numbers of that moment.

    Folds the journal of the run through its policy up to that step, by the code that ran live, and
    looks: which detector was how far from its limit, which was UNKNOWN and why, whether `for` was
    not reached, and what stood in the way: inhibition, mode, cooldown, budget, a hold.

    \b
    Examples:
      supervise why-not runs/20260105-101112-7f3a9c --rule loss_spike.coupled --step 150
      supervise why-not --json runs/20260105-101112-7f3a9c --rule hang.stuck --step 80 | jq .verdict
    """
    # Here, not above: policies and detectors are not needed for help and errors.
    from ..catalog import load_policy
    from ..explain import why_not

    found = RunDir.open(run)
    records = list(audit.read(found.audit_path))
    with understood(f"the journal and the audit log of {found.path}", LOOK):
        told = why_not.answer(
            why_not.Question(rule, step, rank, attempt),
            load_policy(found.policy_path),
            lambda: journal.read(found.journal_path),
            records,
            policies.finder(found, load_policy),
        )
    if as_json:
        click.echo(document(told))
        return
    for line in _lines(told):
        click.echo(printable(line).rstrip())


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    where = f"rank {told['rank']}, attempt {told['attempt']}"
    yield f"{told['rule']} at step {told['step']} ({where}): {told['verdict']}"
    if others := [a for a in told["attempts"] if a != told["attempt"]]:
        yield f"  the step was made in attempt {', '.join(map(str, others))} too: --attempt"
    runs = f"runs {told['runbook']}" if told["runbook"] else "runs nothing"
    yield f"  {told['severity']}, {runs}; policy {told['policy']} ({told['mode']})"
    yield f"  when {told['when']}   in {told['where']}"
    if told["missing"]:
        yield "missing"
        for one in told["missing"]:
            yield from _condition(one, 1)
    if told["obstacles"]:
        yield "in the way" if told["fired"] or told["firing"] else "had it fired"
        for one in told["obstacles"]:
            yield f"  {one['text']} [{one['by']}]"
    if told["then"]:
        yield "what was made of it"
        for one in told["then"]:
            record = "" if one["record"] is None else f" (record {one['record']})"
            yield f"  {one['kind']}: {one['reason']}{record}"


def _condition(one: Mapping[str, Any], depth: int) -> Iterator[str]:
    either = "one of: " if one.get("any") else ""
    yield f"{'  ' * depth}{either}{one['detector']}: {one['text']}"
    for inner in one["inputs"]:
        yield from _condition(inner, depth + 1)
