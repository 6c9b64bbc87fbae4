"""`supervise why`: explain an incident, with its numbers."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import StoreError, SuperviseError, UsageError, understood
from ..report import failure_report, incident_report, render
from ..store import audit
from ..store.files import locked
from ..store.policies import DIRECTORY
from ..store.recorder import incomplete
from ..store.run_directory import RunDir
from ._output import document, printable

if TYPE_CHECKING:
    from ..core.model.policy import Policy


CUT = "the audit log is truncated"
INSPECT = "supervise audit show RUN prints them; another version may have written them"


@click.command(name="why")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.argument("incident", required=False, metavar="[INCIDENT]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, incident: str | None, as_json: bool) -> None:
    """Explain an incident, with its numbers.

    Shows what was observed, decided, done and verified, and the errors that ended processes of the
    job. Without INCIDENT all incidents are listed
    and the newest is explained. Reads only the run directory: it works during the run, after it,
    and after its supervisor was killed. To find out why something did not happen, use `supervise
    why-not`.

    \b
    Examples:
      supervise why runs/20260105-101112-7f3a9c
      supervise why runs/20260105-101112-7f3a9c inc-2
      supervise why --json runs/20260105-101112-7f3a9c | jq .report.end

    Exit codes: 0; 64 no such run or incident.
    """
    found = RunDir.open(run)
    records = list(audit.read(found.audit_path))
    with understood(f"the records in {found.audit_path}", INSPECT):
        _print(found, records, incident, as_json=as_json)


def _print(
    found: RunDir, records: Sequence[Mapping[str, Any]], incident: str | None, *, as_json: bool
) -> None:
    known = incident_report.ids(records)
    if incident is not None and incident not in known:
        raise _unknown(incident, known)
    ending = run_phase(found, records)
    if lacking := incomplete(records):
        ending += f"; {lacking['reason']}"
    policies = readable(found)
    ended = failure_report.failures(records)
    chosen = incident or (known[-1] if known else None)
    report = None if chosen is None else incident_report.collect(records, chosen, policies, ending)
    if as_json:
        rows = incident_report.table(records)
        watched = watching(found, records, policies)
        whole = {
            "run": found.id,
            "is": ending,
            "watched": watched,
            "incidents": rows,
            "failures": [asdict(failure) for failure in ended],
            "report": report,
        }
        click.echo(document(whole))
        return
    lines: list[str] = []
    if report is None:
        lines += _nothing(found, records, policies, ending)
    else:
        if incident is None:
            rows = incident_report.table(records)
            lines += [f"run {found.id}: {ending}", *render.table(rows), ""]
        lines += render.lines(report)
    lines += failure_report.lines(ended)
    for line in lines:
        click.echo(printable(line).rstrip())


def run_phase(run: RunDir, records: Sequence[Mapping[str, Any]]) -> str:
    """Return whether the run is in progress, has ended, or lost its supervisor, as a sentence."""
    end = next((r for r in reversed(records) if r["kind"] == "run_end"), None)
    if end is not None:
        return f"the run ended at step {end['step']}, {end['reason']}"
    step = records[-1]["step"] if records else -1
    if locked(run.audit_path):
        return f"the run is in progress, at step {step} or later"
    found = audit.verify(run.audit_path)
    if found.status == "truncated":  # a killed supervisor, or an incomplete copy
        return f"{CUT}, and the run has no supervisor: {found.message}"
    return f"the audit log ends at step {step}: the supervisor was killed or lost power"


def readable(run: RunDir) -> dict[str, Policy]:
    """Return the policies of the run that can be read, by digest."""
    # Here, not above: help and errors do not need them.
    from ..catalog import load_policy

    found: dict[str, Policy] = {}
    for path in (run.policy_path, *sorted((run.path / DIRECTORY).glob("*.yaml"))):
        with contextlib.suppress(SuperviseError):
            policy = load_policy(path)
            found[policy.digest] = policy
    return found


def watching(
    run: RunDir, records: Sequence[Mapping[str, Any]], policies: Mapping[str, Policy]
) -> dict[str, Any]:
    """Return the rules by state, and why some of them were not evaluated."""
    rules: dict[str, str] = {}
    with contextlib.suppress(StoreError):  # killed in its first second
        rules = dict(run.read_json("state.json").get("rules") or {})
    if not rules and policies:
        rules = {rule.id: "UNKNOWN" for rule in next(iter(policies.values())).rules}
    notes = [
        r["reason"]
        for r in records
        if r["kind"] == "blind"
        or (r.get("data") or {}).get("what") in ("no-probe", "probe-off", "segment-fault")
    ]
    return {"rules": rules, "notes": notes, "step": max((r["step"] for r in records), default=-1)}


def _nothing(
    run: RunDir,
    records: Sequence[Mapping[str, Any]],
    policies: Mapping[str, Policy],
    ending: str,
) -> Iterator[str]:
    watched = watching(run, records, policies)
    rules: Mapping[str, str] = watched["rules"]
    none = "no incident in the remaining records" if ending.startswith(CUT) else "no incident"
    yield f"run {run.id}: {none}; {ending}"
    if not rules:
        yield "  no rule is known: no status was written and the policy cannot be read"
        return
    by: dict[str, list[str]] = {}
    for name, how in rules.items():
        by.setdefault(how, []).append(name)
    judged = len(rules) - len(by.get("inactive", ()))
    yield f"  evaluated: {judged} of {len(rules)} rules"
    for how, names in sorted(by.items()):
        yield f"    {how}: {', '.join(names)}"
    yield from (f"  {note}" for note in watched["notes"])
    yield f"  next: supervise why-not {run.path} --rule RULE --step N"


def _unknown(wanted: str, known: Sequence[str]) -> UsageError:
    if not known:
        return UsageError(f"no incident {wanted!r}", hint="this run has no incidents")
    near = difflib.get_close_matches(wanted, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(
        f"no incident {wanted!r} in this run", hint=f"{meant}it has {', '.join(known)}"
    )
