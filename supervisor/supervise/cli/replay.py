"""`supervise replay`: recompute all decisions from the journal and compare them with the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ..errors import understood
from ..store import audit, journal, policies, recorder, run_records
from ..store.run_directory import RunDir
from ._output import document, printable
from ._runs import run_argument
from .why import INSPECT

SAME, DIFFERENT, EDITED, INCOMPLETE = "same", "different", "edited", "incomplete"
# Exit codes; that of an incomplete journal is as `audit verify` has it for a truncated log.
EXIT_CODES = {SAME: 0, DIFFERENT: 1, EDITED: 1, INCOMPLETE: 2}


@click.command(name="replay")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(ctx: click.Context, run: Path, as_json: bool) -> None:
    """Recompute all decisions of a run and compare them.

    The journal is the input, the audit log the reference. Uses the policy of the run, and those
    that it was reloaded with.

    \b
    Examples:
      supervise replay runs/20260105-101112-7f3a9c
      supervise replay --json 7f3a9c | jq .status

    Exit codes: 0 the same; 1 a difference (the first is shown), or a policy file was edited since;
    2 the same as far as the journal goes, which is incomplete: it could not be written, or its
    limit (journal.max_gb) made it shorter.
    """
    found = RunDir.open(run)
    log = list(audit.read(found.audit_path))
    with understood(f"the records in {found.audit_path}", INSPECT):
        result = _compare(found, log)
    if as_json:
        click.echo(document(result))
    else:
        for line in _lines(result):
            click.echo(line)
    ctx.exit(EXIT_CODES[result["status"]])


def _compare(found: RunDir, log: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result as plain data; `status` is a key of EXIT_CODES."""
    # Here, not above: policies and detectors are not needed by the other commands.
    from ..catalog import load_policy
    from ..core import replay

    parts = run_records.policy_parts(found, run_records.taken(log))
    edited = [part.text for part in parts if part.status == run_records.CHANGED]
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
    result: dict[str, Any] = {
        "status": SAME,
        "decisions": count,
        "edited_policies": edited,
        "removed_events": thinned,
        "ends_before_event": cut,
        "reason": None if gap is None else {"record": gap["seq"], "text": str(gap.get("reason"))},
        "difference": None,
    }
    if cut is not None or (thinned and not differences):
        return result | {"status": INCOMPLETE}
    for one in differences[:1]:
        seq = count if one.seq is None else one.seq
        shown: dict[str, Any] = {"record": seq, "event": one.event}
        shown |= {"recorded": one.recorded, "replayed": one.replayed}
        return result | {"status": DIFFERENT, "difference": shown}
    return result | ({"status": EDITED} if edited else {})


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result as people read it."""
    for text in result["edited_policies"]:
        yield printable(f"edited policy: {text}")
    count, removed = result["decisions"], result["removed_events"]
    if result["status"] == INCOMPLETE and removed:
        spans = ", ".join(f"{first} to {end - 1}" for first, end in removed)
        yield f"incomplete: the frames of events {spans} were removed (journal.max_gb)"
        yield f"  {count} decisions follow from what is before; all are in the log"
    elif result["status"] == INCOMPLETE:
        ends = f"incomplete: the journal ends before event {result['ends_before_event']}"
        yield f"{ends}; {count} decisions follow from what is there"
        if (why := result["reason"]) is not None:
            yield f"  record {why['record']}: {printable(why['text'])}"
    elif (difference := result["difference"]) is not None:
        yield f"NONDETERMINISM at record {difference['record']} (event {difference['event']})"
        yield f"  recorded: {_shown(difference['recorded'])}"
        yield f"  replayed: {_shown(difference['replayed'])}"
    else:
        yield f"same: {count} decisions follow from the journal"


def _shown(decision: Mapping[str, Any] | None) -> str:
    if decision is None:
        return "nothing"
    shown = {key: value for key, value in decision.items() if value is not None}
    return document(shown)
