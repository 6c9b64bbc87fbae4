"""`supervise replay`: recompute all decisions from the journal and compare them with the log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..errors import understood
from ..store import audit, journal, policies, record_check, recorder
from ..store.run_directory import RunDir
from ._output import document, printable
from ._runs import run_argument
from .why import INSPECT

INCOMPLETE = 2  # exit status, as `audit verify` for a truncated log


@click.command(name="replay")
@run_argument
@click.pass_context
def command(ctx: click.Context, run: Path) -> None:
    """Recompute all decisions of a run and compare them.

    The journal is the input, the audit log the reference. Uses the policy of the run, and those
    that it was reloaded with.

    \b
    Examples:
      supervise replay runs/20260105-101112-7f3a9c
      supervise replay "$(ls -d runs/* | tail -n 1)"

    Exit codes: 0 the same; 1 a difference (the first is shown), or a policy file was edited since;
    2 the same as far as the journal goes, which is incomplete: it could not be written, or its
    limit (journal.max_gb) made it shorter.
    """
    found = RunDir.open(run)
    log = list(audit.read(found.audit_path))
    with understood(f"the records in {found.audit_path}", INSPECT):
        _compare(ctx, found, log)


def _compare(ctx: click.Context, found: RunDir, log: list[dict[str, Any]]) -> None:
    # Here, not above: policies and detectors are not needed by the other commands.
    from ..catalog import load_policy
    from ..core import replay

    parts = record_check.policy_parts(found, record_check.taken(log))
    edited = [
        f"edited policy: {part.text}" for part in parts if part.status == record_check.CHANGED
    ]
    for line in edited:
        click.echo(printable(line))
    thinned = journal.thinned(found.journal_path)
    count, differences = replay.compare(
        load_policy(found.policy_path),
        journal.until(found.journal_path, thinned[0][0])
        if thinned
        else journal.read(found.journal_path),
        log,
        policies.finder(found, load_policy),
    )
    gap = recorder.incomplete(log)
    cut = next((one.event for one in differences if one.lacking), None)
    if cut is None and gap is not None and not differences:
        cut = int(gap["data"]["event"])
    if thinned and (cut is not None or not differences):
        removed = ", ".join(f"{first} to {end - 1}" for first, end in thinned)
        click.echo(f"incomplete: the frames of events {removed} were removed (journal.max_gb)")
        click.echo(f"  {count} decisions follow from what is before; all are in the log")
        ctx.exit(INCOMPLETE)
    if cut is not None:
        ends = f"incomplete: the journal ends before event {cut}"
        click.echo(f"{ends}; {count} decisions follow from what is there")
        if gap is not None:
            click.echo(f"  record {gap['seq']}: {printable(str(gap.get('reason')))}")
        ctx.exit(INCOMPLETE)
    if not differences:
        click.echo(f"same: {count} decisions follow from the journal")
        if edited:
            ctx.exit(1)
        return
    for difference in differences:
        number = count if difference.seq is None else difference.seq
        click.echo(f"NONDETERMINISM at record {number} (event {difference.event})")
        click.echo(f"  recorded: {_shown(difference.recorded)}")
        click.echo(f"  replayed: {_shown(difference.replayed)}")
    ctx.exit(1)


def _shown(decision: Mapping[str, Any] | None) -> str:
    if decision is None:
        return "nothing"
    shown = {key: value for key, value in decision.items() if value is not None}
    return document(shown)
