"""`supervise why`: the story of an incident, with its numbers."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import StoreError, SuperviseError, UsageError, understood
from ..report import incident_report, render
from ..store import audit
from ..store.lock import locked
from ..store.policies import DIRECTORY
from ..store.recorder import incomplete
from ..store.run_directory import RunDir
from .audit import document, printable

if TYPE_CHECKING:
    from ..core.model.policy import Policy


CUT = "the record is cut"
LOOK = "supervise audit show RUN prints what they hold; another version may have written them"


@click.command(name="why")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.argument("incident", required=False, metavar="[INCIDENT]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, incident: str | None, as_json: bool) -> None:
    """Tell why something was done: what was seen, decided, done, verified, with all numbers.

    Without INCIDENT all incidents are listed and the newest is told. Reads the run directory only:
    it works while the run goes on, after it, and after its supervisor was killed. Why something did
    not happen is a question for `supervise why-not`.

    \b
    Examples:
      supervise why runs/20260105-101112-7f3a9c
      supervise why runs/20260105-101112-7f3a9c inc-2
      supervise why --json runs/20260105-101112-7f3a9c | jq .story.end
    """
    found = RunDir.open(run)
    records = list(audit.read(found.audit_path))
    with understood(f"the records in {found.audit_path}", LOOK):
        _tell(found, records, incident, as_json=as_json)


def _tell(
    found: RunDir, records: Sequence[Mapping[str, Any]], incident: str | None, *, as_json: bool
) -> None:
    known = incident_report.ids(records)
    if incident is not None and incident not in known:
        raise _unknown(incident, known)
    ending = how_it_goes(found, records)
    if lacking := incomplete(records):
        ending += f"; {lacking['reason']}"
    policies = readable(found)
    chosen = incident or (known[-1] if known else None)
    told = None if chosen is None else incident_report.tell(records, chosen, policies, ending)
    if as_json:
        rows = incident_report.table(records)
        watched = watching(found, records, policies)
        whole = {
            "run": found.id,
            "is": ending,
            "watched": watched,
            "incidents": rows,
            "story": told,
        }
        click.echo(document(whole))
        return
    lines: list[str] = []
    if told is None:
        lines += _nothing(found, records, policies, ending)
    else:
        if incident is None:
            rows = incident_report.table(records)
            lines += [f"run {found.id}: {ending}", *render.table(rows), ""]
        lines += render.lines(told)
    for line in lines:
        click.echo(printable(line).rstrip())


def how_it_goes(run: RunDir, records: Sequence[Mapping[str, Any]]) -> str:
    """Say whether the run goes on, ended, or lost its supervisor."""
    end = next((r for r in reversed(records) if r["kind"] == "run_end"), None)
    if end is not None:
        return f"the run ended at step {end['step']}, {end['reason']}"
    step = records[-1]["step"] if records else -1
    if locked(run.audit_path):
        return f"the run is in progress, step {step} or later"
    found = audit.verify(run.audit_path)
    if found.status == "torn":  # the end of a killed supervisor, or of a copy that is not whole
        return f"{CUT}, and the supervisor is gone: {found.message}"
    return f"the record ends at step {step}: the supervisor is gone, it was killed or lost power"


def readable(run: RunDir) -> dict[str, Policy]:
    """Return the policies of the run by digest, as far as they can be read."""
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
    """Return what was looked at: the rules by state, and what kept others from being judged."""
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
    none = "no incident in what is left" if ending.startswith(CUT) else "no incident"
    yield f"run {run.id}: {none}; {ending}"
    if not rules:
        yield "  nothing was watched: no status was written and the policy cannot be read"
        return
    by: dict[str, list[str]] = {}
    for name, how in rules.items():
        by.setdefault(how, []).append(name)
    judged = len(rules) - len(by.get("inactive", ()))
    yield f"  watched: {judged} of {len(rules)} rules"
    for how, names in sorted(by.items()):
        yield f"    {how}: {', '.join(names)}"
    yield from (f"  {note}" for note in watched["notes"])
    yield f"  why a rule did not fire: supervise why-not {run.path} --rule RULE --step N"


def _unknown(wanted: str, known: Sequence[str]) -> UsageError:
    if not known:
        return UsageError(f"no incident {wanted!r}", hint="this run has none")
    near = difflib.get_close_matches(wanted, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(
        f"no incident {wanted!r} in this run", hint=f"{meant}it has {', '.join(known)}"
    )
