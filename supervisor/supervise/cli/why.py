"""`supervise why`: explain an incident, with its numbers."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from ..errors import StoreError, SuperviseError, UsageError, understood
from ..report import incident_views
from ..report.incident_builder import build_incident_report, summarize
from ..report.incident_files import describe_run, read_tapes
from ..report.incident_report import IncidentReport, RunOrigin
from ..report.receipt import run_path
from ..report.records import (
    Record,
    decode_log,
    detail_of,
    failure_lines,
    incident_ids,
    launch_failures,
    read_records,
)
from ..store import audit, files, journal, policies
from ..store.files import is_locked
from ..store.policies import DIRECTORY
from ..store.recorder import incomplete_record
from ..store.run_directory import RunDir
from ._output import echo, echo_json, echo_source
from ._runs import incident_arguments, run_argument

if TYPE_CHECKING:
    from ..core.model.policy import Policy
    from ..lab import why_not

CUT = "the audit log is truncated"
INSPECT = "supervise audit show RUN prints them; another version may have written them"


@click.command(name="why")
@incident_arguments
@click.option("--full", is_flag=True, help="Print the conditions, actions and timeline, too.")
@click.option("--json", "as_json", is_flag=True, help="Print incident.json.")
@click.option(
    "--write",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write incident.json, summary.md and incident.html there.",
)
def why_command(
    run: Path, incident: str | None, full: bool, as_json: bool, write: Path | None
) -> None:
    """Explain an incident in ten lines.

    What happened, why, what was done, the cost, the proof, and what is next. Without INCIDENT all
    incidents are listed and the newest is explained; without any incident, the errors that ended
    processes of the job are shown. Reads only the run directory: it works during the run, after it,
    and after its supervisor was killed. To find out why something did not happen, use `supervise
    why-not`.

    \b
    Examples:
      supervise why
      supervise why inc-2
      supervise why --full runs/20260105-101112-7f3a9c inc-2
      supervise why --json runs/20260105-101112-7f3a9c | jq .cause.text
      supervise why --write report runs/20260105-101112-7f3a9c inc-1

    Exit codes: 0; 64 no such run or incident.
    """
    directory = RunDir.open(run)
    log = list(audit.read_audit(directory.audit_path))
    records = decode_log(directory, log)
    with understood(f"the records in {directory.audit_path}", INSPECT):
        ids = incident_ids(records)
        if incident is not None and incident not in ids:
            raise _unknown(incident, ids)
        ending = run_phase(directory, records)
        if lacking := incomplete_record(log):
            ending += f"; {lacking['reason']}"
        if not ids:
            _print_none(directory, records, ending, as_json=as_json)
            return
        incident_id, policies = incident or ids[-1], readable_policies(directory)
        origin = RunOrigin.from_description(describe_run(directory), run_path(directory), ending)
        report = build_incident_report(
            records, incident_id, origin, policies, read_tapes(directory, records, incident_id)
        )
    if write is not None:
        _write(write, report)
    if as_json:
        echo_source(report.encode())
        return
    lines: list[str] = []
    if incident is None and len(ids) > 1:
        summaries = [summarize(records, name, policies) for name in ids]
        lines += [f"run {directory.id}: {ending}", *incident_views.rows(summaries), ""]
    lines += incident_views.render_full(report) if full else incident_views.render_card(report)
    if lacking:
        lines.append(f"{'Note':7}{lacking['reason']}")
    if full:
        lines += failure_lines(launch_failures(records))
    echo(*lines)


def _print_none(run: RunDir, records: Sequence[Record], ending: str, *, as_json: bool) -> None:
    """Print what was watched, and the errors that ended processes of the job."""
    watch, errors = rules_by_state(run, records, readable_policies(run)), launch_failures(records)
    if as_json:
        document = {
            "run": run.id,
            "is": ending,
            "incident": None,
            "watched": asdict(watch),
            "failures": [asdict(failure) for failure in errors],
        }
        echo_json(document)
        return
    echo(*_nothing(run, watch, ending), *failure_lines(errors))


def _write(directory: Path, report: IncidentReport) -> None:
    """Write the report and its views. Raises StoreError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in incident_views.files_of_incident(report).items():
            files.replace_file(directory / name, content.encode(), durable=False)
    except OSError as error:
        raise StoreError(f"cannot write {directory}: {error.strerror}") from error


def run_phase(run: RunDir, records: Sequence[Record]) -> str:
    """Return whether the run is in progress, has ended, or lost its supervisor, as a sentence."""
    end = next((record for record in reversed(records) if record.kind == "run_end"), None)
    if end is not None:
        return f"the run ended at step {end.step}, {end.reason}"
    step = records[-1].step if records else -1
    if is_locked(run.audit_path):
        return f"the run is in progress, at step {step} or later"
    report = audit.verify_audit(run.audit_path)
    if report.status == "truncated":  # a killed supervisor, or an incomplete copy
        return f"{CUT}, and the run has no supervisor: {report.message}"
    return f"the audit log ends at step {step}: the supervisor was killed or lost power"


def readable_policies(run: RunDir) -> dict[str, Policy]:
    """Return the policies of the run that can be read, by digest."""
    # Here, not above: help and errors do not need them.
    from ..catalog import load_policy

    policies: dict[str, Policy] = {}
    for path in (run.policy_path, *sorted((run.path / DIRECTORY).glob("*.yaml"))):
        with contextlib.suppress(SuperviseError):
            policy = load_policy(path)
            policies[policy.digest] = policy
    return policies


@dataclass(frozen=True, slots=True)
class RuleStates:
    """The state of each rule at the last step, and the reasons for which some were not evaluated.

    Attributes:
        step: newest one of the records, -1 for none.
    """

    rules: Mapping[str, str]
    notes: Sequence[str]
    step: int


def rules_by_state(
    run: RunDir, records: Sequence[Record], policies: Mapping[str, Policy]
) -> RuleStates:
    """Return the rules by state, and why some of them were not evaluated."""
    rules: dict[str, str] = {}
    with contextlib.suppress(StoreError):  # killed in its first second
        rules = dict(run.read_json("state.json").get("rules") or {})
    if not rules and policies:
        rules = {rule.id: "UNKNOWN" for rule in next(iter(policies.values())).rules}
    notes = [
        record.reason
        for record in records
        if record.kind == "blind"
        or detail_of(record.decision) in ("no-probe", "probe-off", "segment-fault")
    ]
    return RuleStates(rules, notes, max((record.step for record in records), default=-1))


def _nothing(run: RunDir, watch: RuleStates, ending: str) -> Iterator[str]:
    rules = watch.rules
    none = "no incident in the remaining records" if ending.startswith(CUT) else "no incident"
    yield f"run {run.id}: {none}; {ending}"
    if not rules:
        yield "  no rule is known: no status was written and the policy cannot be read"
        return
    by_code: dict[str, list[str]] = {}
    for name, code in rules.items():
        by_code.setdefault(code, []).append(name)
    judged_count = len(rules) - len(by_code.get("inactive", ()))
    yield f"  evaluated: {judged_count} of {len(rules)} rules"
    for code, names in sorted(by_code.items()):
        yield f"    {code}: {', '.join(names)}"
    yield from (f"  {note}" for note in watch.notes)
    yield f"  next: supervise why-not {run.path} --rule RULE --step N"


def _unknown(incident_id: str, ids: Sequence[str]) -> UsageError:
    if not ids:
        return UsageError(f"no incident {incident_id!r}", hint="this run has no incidents")
    near = difflib.get_close_matches(incident_id, ids, n=1)
    suggestion = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(
        f"no incident {incident_id!r} in this run", hint=f"{suggestion}it has {', '.join(ids)}"
    )


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
def why_not_command(
    run: Path, rule: str, step: int, rank: int, attempt: int | None, as_json: bool
) -> None:
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
    from ..lab import why_not

    directory = RunDir.open(run)
    records = [
        why_not.LoggedDecision(record.seq, record.event, record.decision)
        for record in read_records(directory)
        if record.decision is not None
    ]
    with understood(f"the journal and the audit log of {directory.path}", INSPECT):
        answer = why_not.answer_question(
            why_not.Question(rule, step, rank, attempt),
            load_policy(directory.policy_path),
            lambda: journal.read_journal(directory.journal_path),
            records,
            policies.make_policy_finder(directory, load_policy),
        )
    if as_json:
        echo_json(msgspec.to_builtins(answer))
        return
    for line in _lines(answer):
        echo(line)


def _lines(answer: why_not.Answer) -> Iterator[str]:
    location = f"rank {answer.rank}, attempt {answer.attempt}"
    yield f"{answer.rule} at step {answer.step} ({location}): {answer.verdict}"
    if other_attempts := [a for a in answer.attempts if a != answer.attempt]:
        yield f"  other attempts of this step: {', '.join(map(str, other_attempts))} (--attempt)"
    runs = f"runs {answer.runbook}" if answer.runbook else "runs nothing"
    severity = answer.severity
    if phase := answer.phase:
        now = "off" if phase.off else severity
        severity = f"{now} in phase {phase.name}, else {phase.base_severity}"
    yield f"  {severity}, {runs}; policy {answer.policy} ({answer.mode})"
    yield f"  when {answer.expression}   in {answer.location}"
    if answer.missing:
        yield "conditions not met"
        for condition in answer.missing:
            yield from _condition(condition, 1)
    if answer.obstacles:
        yield "blocked by" if answer.fired or answer.firing else "would have been blocked by"
        for obstacle in answer.obstacles:
            yield f"  {obstacle.text} [{obstacle.gate}]"
    if answer.consequences:
        yield "decisions"
        for decision in answer.consequences:
            record = "" if decision.record is None else f" (record {decision.record})"
            yield f"  {decision.kind}: {decision.reason}{record}"


def _condition(condition: why_not.Condition, depth: int) -> Iterator[str]:
    either = "one of: " if condition.alternative is True else ""
    yield f"{'  ' * depth}{either}{condition.detector}: {condition.text}"
    for inner in condition.inputs:
        yield from _condition(inner, depth + 1)
