"""`supervise why-not`: which condition a rule did not meet, by how much, or what blocked it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ..errors import understood
from ..store import audit, journal, policies
from ..store.run_directory import RunDir
from ._output import document, printable
from ._runs import run_argument
from .why import INSPECT


@click.command(name="why-not")
@run_argument
@click.option("--rule", required=True, metavar="R", help="Rule id.")
@click.option("--step", required=True, type=int, metavar="N", help="The job's step.")
@click.option("--rank", default=0, show_default=True, type=int, metavar="K")
@click.option(
    "--attempt",
    type=int,
    metavar="A",
    help="Attempt, if a rollback repeated the step. Default: the newest.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, rule: str, step: int, rank: int, attempt: int | None, as_json: bool) -> None:
    """Explain why a rule did not fire or act at a step.

    Replays the journal of the run up to that step with the code that ran live. Reports how far each
    detector was from its limit, which was UNKNOWN and why, whether `for` was not reached, and what
    blocked the rule: inhibition, mode, cooldown, budget, a hold.

    \b
    Examples:
      supervise why-not runs/20260105-101112-7f3a9c --rule loss_spike.coupled --step 150
      supervise why-not --json runs/20260105-101112-7f3a9c --rule hang.stuck --step 80 | jq .verdict

    Exit codes: 0; 64 no such run, rule, step, rank or attempt.
    """
    # Here, not above: policies and detectors are not needed for help and errors.
    from ..catalog import load_policy
    from ..explain import why_not

    found = RunDir.open(run)
    records = list(audit.read(found.audit_path))
    with understood(f"the journal and the audit log of {found.path}", INSPECT):
        answer = why_not.answer(
            why_not.Question(rule, step, rank, attempt),
            load_policy(found.policy_path),
            lambda: journal.read(found.journal_path),
            records,
            policies.finder(found, load_policy),
        )
    if as_json:
        click.echo(document(answer))
        return
    for line in _lines(answer):
        click.echo(printable(line).rstrip())


def _lines(answer: Mapping[str, Any]) -> Iterator[str]:
    where = f"rank {answer['rank']}, attempt {answer['attempt']}"
    yield f"{answer['rule']} at step {answer['step']} ({where}): {answer['verdict']}"
    if others := [a for a in answer["attempts"] if a != answer["attempt"]]:
        yield f"  other attempts of this step: {', '.join(map(str, others))} (--attempt)"
    runs = f"runs {answer['runbook']}" if answer["runbook"] else "runs nothing"
    severity = answer["severity"]
    if phase := answer["phase"]:
        now = "off" if phase["off"] else severity
        severity = f"{now} in phase {phase['name']}, else {phase['else']}"
    yield f"  {severity}, {runs}; policy {answer['policy']} ({answer['mode']})"
    yield f"  when {answer['when']}   in {answer['where']}"
    if answer["missing"]:
        yield "conditions not met"
        for one in answer["missing"]:
            yield from _condition(one, 1)
    if answer["obstacles"]:
        yield "blocked by" if answer["fired"] or answer["firing"] else "would have been blocked by"
        for one in answer["obstacles"]:
            yield f"  {one['text']} [{one['by']}]"
    if answer["then"]:
        yield "decisions"
        for one in answer["then"]:
            record = "" if one["record"] is None else f" (record {one['record']})"
            yield f"  {one['kind']}: {one['reason']}{record}"


def _condition(one: Mapping[str, Any], depth: int) -> Iterator[str]:
    either = "one of: " if one.get("any") else ""
    yield f"{'  ' * depth}{either}{one['detector']}: {one['text']}"
    for inner in one["inputs"]:
        yield from _condition(inner, depth + 1)
