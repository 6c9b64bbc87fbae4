"""`supervise replay`: decide again from the recorded events, and compare with the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..errors import understood
from ..store import audit, journal, policies, record_check, recorder
from ..store.run_directory import RunDir
from .audit import document, printable
from .why import LOOK

INCOMPLETE = 2  # exit status, as `audit verify` has it for a torn log


@click.command(name="replay")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.pass_context
def command(ctx: click.Context, run: Path) -> None:
    """Prove that a run's decisions follow from what was seen, by taking them all again.

    Folds the journal of the run through its own policy, and those it was reloaded with, and
    compares every decision with the audit log. Exit status: 0 all the same, 1 a difference (the
    first one is shown) or a policy that was edited since (its digests are), 2 the same as far as
    the journal goes, which ends before the log does: it could not be written any more, or its end
    was lost.

    \b
    Examples:
      supervise replay runs/20260105-101112-7f3a9c
      supervise replay "$(ls -d runs/* | tail -n 1)"
    """
    found = RunDir.open(run)
    log = list(audit.read(found.audit_path))
    with understood(f"the records in {found.audit_path}", LOOK):
        _compare(ctx, found, log)


def _compare(ctx: click.Context, found: RunDir, log: list[dict[str, Any]]) -> None:
    # Here, not above: policies and detectors are not needed by the other commands.
    from ..catalog import load_policy
    from ..core import replay

    wrong = _edited(found, log)
    for line in wrong:
        click.echo(printable(line))
    count, differences = replay.compare(
        load_policy(found.policy_path),
        journal.read(found.journal_path),
        log,
        policies.finder(found, load_policy),
    )
    told = recorder.incomplete(log)
    cut = next((one.event for one in differences if one.lacking), None)
    if cut is None and told is not None and not differences:
        cut = int(told["data"]["event"])
    if cut is not None:
        ends = f"incomplete: the journal ends before event {cut}"
        click.echo(f"{ends}; {count} decisions follow from what is there")
        if told is not None:
            click.echo(f"  record {told['seq']}: {printable(str(told.get('reason')))}")
        ctx.exit(INCOMPLETE)
    if not differences:
        click.echo(f"same: {count} decisions follow from the journal")
        if wrong:
            ctx.exit(1)
        return
    for difference in differences:
        number = count if difference.seq is None else difference.seq
        click.echo(f"NONDETERMINISM at record {number} (event {difference.event})")
        click.echo(f"  recorded: {_told(difference.recorded)}")
        click.echo(f"  replayed: {_told(difference.replayed)}")
    ctx.exit(1)


def _edited(found: RunDir, log: list[dict[str, Any]]) -> list[str]:
    """Return a line for each policy that is not the one that judged the run."""
    parts = record_check.policy_parts(found, record_check.taken(log))
    return [f"another policy: {part.text}" for part in parts if part.status == record_check.CHANGED]


def _told(decision: Mapping[str, Any] | None) -> str:
    if decision is None:
        return "nothing"
    shown = {key: value for key, value in decision.items() if value is not None}
    return document(shown)
