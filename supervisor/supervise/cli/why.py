"""Explain an incident with its numbers, a rule that did not act, and a score that got worse."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from ..core.model.decisions import IncidentOpened
from ..core.rule_scope import rule_metrics
from ..core.trends import median, robust_spread
from ..errors import StoreError, SuperviseError, UsageError, reading_recorded_data
from ..report import incident_views
from ..report.incident_builder import build_incident_report, summarize_incident
from ..report.incident_files import describe_run, read_tapes
from ..report.incident_report import IncidentReport, RunOrigin
from ..report.receipt import run_operand, run_path
from ..report.records import (
    IncidentIndex,
    Record,
    decision_detail,
    decode_log,
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
from ..store.run_records import read_rows
from ._output import echo, echo_json, echo_source, format_number
from ._runs import incident_arguments, run_argument

if TYPE_CHECKING:
    from ..core.model.policy import Policy
    from ..lab import why_not

CUT = "the audit log is truncated"
INSPECT = "supervise audit show RUN prints them; another version may have written them"


@click.command(name="why")
@incident_arguments
@click.option("--full", is_flag=True, help="Also print the conditions, actions and timeline.")
@click.option("--json", "as_json", is_flag=True, help="Print incident.json.")
@click.option(
    "--write",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write incident.json, summary.md and incident.html to DIR.",
)
def why_command(
    run: Path, incident: str | None, full: bool, as_json: bool, write: Path | None
) -> None:
    """Explain an incident on one card.

    The card has what happened, why, what was done, its cost, if it helped, what is next. Without
    INCIDENT all incidents are listed and the newest is explained; `inc-2` without RUN is that
    incident of the newest run. If the run has no incident, the errors that made its processes exit
    are shown. Reads only the run directory: it works during the run, after it, and after its
    supervisor was killed. To find out why something did not happen, use `supervise why-not`.

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
    with reading_recorded_data(f"the records in {directory.audit_path}", INSPECT):
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
        index = IncidentIndex(records)
        summaries = [summarize_incident(index, name, policies) for name in ids]
        lines += [f"run {directory.id}: {ending}", *incident_views.incident_rows(summaries), ""]
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
        for name, content in incident_views.render_files(report).items():
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
        or decision_detail(record.decision) in ("no-probe", "probe-off", "segment-fault")
    ]
    return RuleStates(rules, notes, max((record.step for record in records), default=-1))


NAMED = 8  # rules of a state; `status --json` has all


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
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED + 1 else ""
        yield f"    {code}: {', '.join(names[: NAMED if more else None])}{more}"
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
@click.option(
    "--rank", default=0, show_default=True, type=int, metavar="K", help="Rank that the rule judged."
)
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

    Replays the metrics of the run up to that step with the code that ran live. Reports how
    far each detector was from its limit, or why it was UNKNOWN; whether the rule held for too few
    steps; and what blocked it: inhibition, mode, cooldown, budget, a hold.

    \b
    Examples:
      supervise why-not 7f3a9c --rule loss_spike.coupled --step 150
      supervise why-not --json 7f3a9c --rule hang.stuck --step 80 | jq .verdict

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
    with reading_recorded_data(f"the journal and the audit log of {directory.path}", INSPECT):
        policy = load_policy(directory.policy_path)
        answer = why_not.answer_question(
            why_not.Question(rule, step, rank, attempt),
            policy,
            lambda: journal.read_journal(directory.journal_path),
            records,
            policies.make_policy_finder(directory, load_policy),
        )
    if as_json:
        echo_json(msgspec.to_builtins(answer))
        return
    read = {m for r in policy.rules if r.id == answer.rule for m in rule_metrics(policy, r)}
    reasons = [
        f"  {metric}: {text}" for metric, text in _unseen(directory).items() if metric in read
    ]
    verdict, *lines = _lines(answer)
    echo(verdict, *reasons, *lines)


def _unseen(run: RunDir) -> dict[str, str]:
    """Return what the batches of a run do not show, and why, as the probe says."""
    from ..runtime.status import Status

    reasons: dict[str, str] = {}
    with contextlib.suppress(SuperviseError):  # another version's, or damaged
        if (status := Status.read(run)) is not None:
            for rank in status.rank_states().values():
                reasons |= rank.unseen
    return reasons


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


# ── evaluations got worse while the training looks well: where to look, in a strict order ─────────

FOUND, EXCLUDED, UNKNOWN, LATER = "found", "excluded", "not known", "later"
SCORES = {
    "val_loss": False,
    "checkpoint_val_loss": False,
    "fixed_probe_loss": False,
    "microbench_score": True,
}  # higher is better
ARTEFACT, PROOF = "eval_artifact_hash", "checkpoint_proved"
MEASURED_BESIDE = "checkpoint_unknown"  # in each row of a checkpoint that was evaluated
HARNESS, DATA, INTERNALS, ARCHITECTURE = "harness", "data", "internals", "architecture"
# What is compared before and since, by stage and check.
COMPARED: Mapping[str, Mapping[str, Sequence[str]]] = {
    DATA: {
        "tokens": (
            *("batch_token_entropy", "batch_unique_ratio", "batch_top1_share"),
            *("batch_token_drift", "batch_token_shift", "batch_dispersion"),
        ),
        "amount": ("tokens_per_update",),
        "order": ("shuffle_block_skew", "batch_new_share"),
        "lengths": ("batch_seq_len_p50", "batch_seq_len_p95", "batch_pad_fraction"),
        "ids": ("batch_ids_outside",),
        "sources": ("batch_source_shift",),
        "corpus": ("near_dup_rate", "train_val_overlap", "language_share"),
    },
    INTERNALS: {
        "attention": ("max_attn_logit", "attn_entropy", "key_gradient_sum"),
        "routing": ("moe_drop_rate", "moe_util_entropy", "router_token_entropy"),
        "updates": ("grad_global_norm", "adam_rms_ratio"),
        "outputs": ("output_kl_to_prev", "logit_entropy_probe"),
        "checkpoints": ("checkpoint_kl_to_prev", "checkpoint_entropy", "curvature_trace_est"),
        "spectra": ("dw_spectral_entropy", "qk_d2_spectral_entropy", "spectral_radius"),
    },
}
NEWEST, FEWEST = 64, 3  # values that are compared on each side; project defaults
TOO_FEW = "too few values before or since"
NO_SPAN = "nothing to compare: no last good evaluation before the newest"
SCALES, SHARE, TIMES = 6.0, 0.02, 2.0  # an input moved; an internal has doubled or halved; defaults
# What is less is no change, in the metric's unit: three samples may be alike by chance.
LEAST = {
    **dict.fromkeys(("batch_token_shift", "batch_pad_fraction"), 2.0),
    **dict.fromkeys(("batch_source_shift", "batch_new_share"), 10.0),
    "shuffle_block_skew": 1.0,
}
# Less of it is no harm: a rate that decays makes it so.
RISING = (
    *("max_attn_logit", "key_gradient_sum", "moe_drop_rate", "grad_global_norm"),
    *("output_kl_to_prev", "checkpoint_kl_to_prev", "curvature_trace_est", "spectral_radius"),
)
ASK = {
    HARNESS: "compare tokenizer, prompts, decoding, data and code of both evaluations",
    DATA: "compare mix, filters, duplicates, overlap and order",
    INTERNALS: "look at attention, routing and precision",
    ARCHITECTURE: "change one axis at a time, with tokenizer, data and evaluation pinned",
}
FINDINGS = {  # of checks; others are looked at as they are asked
    "evaluation": "pin it; which of both moved: supervise checkpoint cross OLD NEW --harness "
    "OLD_POLICY NEW_POLICY",
    "weights": "the file holds other weights than the job had: evaluate the other checkpoints",
}
CORPUS = "supervise data check DATA --val VAL --baseline data.json"
AXES = (
    "long context: context length and its curriculum, full or sparse attention",
    "code, mathematics, tools: experts, active ones, their width, routing",
    "sharp loss, spikes: heads, QK-norm, learning rate",
    "all of them: depth against width at one budget",
)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of a metric before the last good evaluation and since; step: of another hash."""

    metric: str
    before: float
    since: float
    moved: bool
    step: int | None = None


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to look at.

    Attributes:
        absent: where nothing of it could be compared, why, by metric; "" where it is not on record,
            and nothing says why.
        command: it shows what that takes.
    """

    name: str
    changes: Sequence[Change] = ()
    absent: Mapping[str, str] = {}
    command: str = ""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One place where a silent regression may come from.

    Attributes:
        verdict: `found`, `excluded` (as far as it was looked at), `not known` (nothing on record
            says), or `later`: it was found before, or, of the architecture, not all is excluded.
        command: the next one.
    """

    stage: str
    verdict: str
    checks: Sequence[Check]
    command: str


class Triage(msgspec.Struct, frozen=True, kw_only=True):
    """Where to look, in order.

    Attributes:
        metric: the evaluation that is compared, "" for none. good, bad: steps of the last good one
            and of the newest; None where that is not known. before, since: its values there.
        incidents: that opened between them.
    """

    run: str
    metric: str
    good: int | None
    bad: int | None
    before: float | None
    since: float | None
    incidents: Sequence[str]
    stages: Sequence[Stage]
    next: str


Points = Mapping[str, Sequence[tuple[int, float]]]
Span = tuple[int, int]


@click.command(name="triage")
@run_argument
@click.option(
    "--good",
    type=int,
    metavar="N",
    help="Step of the last good evaluation. Default: of the best one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def triage_command(run: Path, good: int | None, as_json: bool) -> None:
    """Find why an evaluation got worse: harness, data or model.

    For evaluations that got worse while the training curves look good. It checks harness, data and
    model in this order, and stops at the first cause. Records from before and since the last good
    evaluation (--good, else the best one) are compared. For what is not on record it prints a
    command to run. A cause that it could not check is not excluded.

    \b
    Examples:
      supervise triage
      supervise triage --good 3000 7f3a9c
      supervise triage --json 7f3a9c | jq '.stages[].verdict'

    Exit codes: 0; 64 no such run.
    """
    directory = RunDir.open(run)
    compared = (names for checks in COMPARED.values() for names in checks.values())
    wanted = {*SCORES, ARTEFACT, PROOF, *chain.from_iterable(compared)}
    points: dict[str, list[tuple[int, float]]] = {}
    with reading_recorded_data(f"the journal of {directory.path}", INSPECT):
        hashes: list[tuple[int, float]] = []  # of checkpoints: a job's own one is another number
        for row in read_rows(directory, late=True):
            for name in wanted & row.values.keys():
                beside = name == ARTEFACT and MEASURED_BESIDE in row.values
                series = hashes if beside else points.setdefault(name, [])
                series.append((row.step, row.values[name]))
        if hashes:
            points.setdefault(ARTEFACT, hashes)
        opened = [
            (record.step, record.decision.incident or "")
            for record in read_records(directory)
            if isinstance(record.decision, IncidentOpened)
        ]
    reasons = _absence_reasons(directory, wanted - points.keys())
    found = judge_regression(points, opened, good, run_operand(directory), reasons)
    if as_json:
        echo_json(msgspec.to_builtins(found))
        return
    echo(*_triage_lines(found))


def _absence_reasons(run: RunDir, metrics: Collection[str]) -> dict[str, str]:
    """Return why metrics are not on record: as the probe says, or what the policy lacks."""
    from ..catalog.metrics import BUILD, explain_unmeasured

    reasons = dict.fromkeys({*BUILD} & {*metrics}, "of files, which no run reads whole")
    for policy in readable_policies(run).values():
        lacks = {metric: explain_unmeasured(metric, policy) for metric in metrics}
        reasons |= {metric: text for metric, text in lacks.items() if text}
    return reasons | _unseen(run)


def judge_regression(
    points: Points,
    opened: Sequence[tuple[int, str]],
    good: int | None,
    run: str,
    reasons: Mapping[str, str],
) -> Triage:
    """Return where to look, from values by metric and incidents by step.

    Args:
        run: for commands. reasons: why a metric is absent.
    """
    name = next((name for name in SCORES if len(points.get(name, ())) > 1), "")
    scores, bad = points.get(name, ()), None
    before = since = None
    if scores:
        pick = max if SCORES[name] else min
        best = pick(reversed(scores), key=lambda point: point[1])
        good = best[0] if good is None else good
        bad, since = scores[-1]
        before = next((v for step, v in reversed(scores) if step <= good), best[1])
    elif good is not None:
        bad = max((step for values in points.values() for step, _ in values), default=good)
    span = (good, bad) if good is not None and bad is not None and good < bad else None
    stages: list[Stage] = []
    for stage in (
        _harness(points, span, run),
        *(_compared_stage(stage, points, span, run, reasons) for stage in COMPARED),
        Stage(
            stage=ARCHITECTURE, verdict=UNKNOWN, checks=(), command="supervise canary run --help"
        ),
    ):
        ahead = {s.verdict for s in stages}
        is_later = FOUND in ahead or (stage.stage == ARCHITECTURE and ahead != {EXCLUDED})
        stages.append(msgspec.structs.replace(stage, verdict=LATER) if is_later else stage)
    first = next(stage for stage in stages if stage.verdict != EXCLUDED)
    return Triage(
        run=run,
        metric=name,
        good=good,
        bad=bad,
        before=before,
        since=since,
        incidents=[] if span is None else [i for step, i in opened if span[0] <= step <= span[1]],
        stages=stages,
        next=first.command if span else f"supervise triage --good N {run}",
    )


def _harness(points: Points, span: Span | None, run: str) -> Stage:
    """Return whether the evaluation itself changed, or the checkpoints are not of the job."""
    begin, end = span or (0, -1)
    hashes = [point for point in points.get(ARTEFACT, ()) if point[0] <= end]
    proofs = [point for point in points.get(PROOF, ()) if begin < point[0] <= end]
    others = [(a[1], *b) for a, b in pairwise(hashes) if a[1] != b[1] and b[0] > begin]
    wrong = [(1.0, *proof) for proof in proofs if proof[1] < 1.0]
    checks: list[Check] = []
    for name, metric, values, moves, shows in (
        ("evaluation", ARTEFACT, hashes[1:], others, f"supervise metrics show {ARTEFACT}"),
        ("weights", PROOF, proofs, wrong, f"supervise checkpoint eval CKPT --run {run}"),
    ):
        if not values:
            absent = {metric: _reason(metric, points, span, {})}
            checks.append(Check(name=name, absent=absent, command=shows))
            continue
        before, step, since = moves[0] if moves else (values[0][1], None, values[-1][1])
        change = Change(metric=metric, before=before, since=since, moved=bool(moves), step=step)
        checks.append(Check(name=name, changes=[change]))
    same = EXCLUDED if hashes[1:] else UNKNOWN
    verdict = FOUND if others or wrong else same
    return Stage(
        stage=HARNESS, verdict=verdict, checks=checks, command=f"supervise checkpoints {run}"
    )


def _compared_stage(
    stage: str, points: Points, span: Span | None, run: str, reasons: Mapping[str, str]
) -> Stage:
    """Return what moved of the data, or in the model."""
    checks: list[Check] = []
    for name, metrics in COMPARED[stage].items():
        sides = {metric: _sides(points.get(metric, ()), span) for metric in metrics}
        changes = [
            _change(metric, *pair, by_scale=stage == DATA)
            for metric, pair in sides.items()
            if min(map(len, pair)) >= FEWEST
        ]
        check = Check(name=name, changes=changes)
        if not changes:
            absent = {metric: _reason(metric, points, span, reasons) for metric in metrics}
            command = CORPUS if name == "corpus" else f"supervise metrics show {metrics[0]}"
            check = Check(name=name, absent=absent, command=command)
        checks.append(check)
    moved = [change.moved for check in checks for change in check.changes]
    book = "data-event" if stage == DATA else "silent-regression"
    return Stage(
        stage=stage,
        verdict=FOUND if any(moved) else EXCLUDED if moved else UNKNOWN,
        checks=checks,
        command=f"supervise runbook {book} --policy {run}/policy.yaml",
    )


def _reason(metric: str, points: Points, span: Span | None, reasons: Mapping[str, str]) -> str:
    """Return why a metric is not compared."""
    if not points.get(metric):
        return reasons.get(metric, "")
    return NO_SPAN if span is None else TOO_FEW


def _change(
    metric: str, before: Sequence[float], since: Sequence[float], *, by_scale: bool
) -> Change:
    """Compare two sides by their own noise, or by their ratio."""
    a, b = median(before), median(since)
    if by_scale:
        least = max(SHARE * abs(a), LEAST.get(metric, 0.0))
        is_other = abs(b - a) > max(SCALES * robust_spread(before, a), least)
    else:
        low, high = sorted((abs(a), abs(b)))
        is_other = high > TIMES * low and (b > a or metric not in RISING)
    return Change(metric=metric, before=a, since=b, moved=is_other)


def _sides(
    values: Sequence[tuple[int, float]], span: Span | None
) -> tuple[list[float], list[float]]:
    """Return the newest values before and since the last good evaluation."""
    if span is None:
        return [], []
    finite = [point for point in values if math.isfinite(point[1])]
    before = [value for step, value in finite if step <= span[0]][-NEWEST:]
    since = [value for step, value in finite if span[0] < step <= span[1]][-NEWEST:]
    return before, since


def _triage_lines(triage: Triage) -> Iterator[str]:
    good, bad = triage.good, triage.bad
    is_comparable = good is not None and bad is not None and good < bad
    if triage.before is not None and triage.since is not None:
        sides = [format_number(value) for value in (triage.before, triage.since)]
        line = f"{triage.metric} {sides[0]} at step {good}, {sides[1]} at step {bad}"
        yield line if is_comparable else f"{line}: the newest is the best one"
    elif is_comparable:
        yield f"compared before and since step {good}; no evaluation is on record"
    else:
        yield "no evaluation is on record"
    if triage.incidents:
        yield f"meanwhile: {', '.join(triage.incidents)}: supervise why {triage.run}"
    open_stages: list[str] = []  # not excluded
    for n, stage in enumerate(triage.stages, 1):
        absent = ", ".join(check.name for check in stage.checks if check.absent)
        verdict = stage.verdict
        if verdict == LATER:
            yield f"{n} {stage.stage:13}{LATER}, behind {open_stages[-1]}"
            continue
        verdict += f", but for {absent}" if absent and verdict == EXCLUDED else ""
        verdict += f"; {open_stages[-1]} is not excluded" if open_stages else ""
        yield f"{n} {stage.stage:13}{verdict}"
        open_stages += [stage.stage] * (stage.verdict != EXCLUDED)
        for check in stage.checks:
            yield from _check_lines(check)
        if stage.stage == ARCHITECTURE:
            yield from (f"    {line}" for line in AXES)
        if stage.verdict != EXCLUDED:
            moved = (c.name for c in stage.checks if any(change.moved for change in c.changes))
            yield f"    {FINDINGS.get(next(moved, ''), ASK[stage.stage])}:"
            yield f"    {stage.command}"
    if not is_comparable:
        yield f"name the step of the last good evaluation: {triage.next}"


def _check_lines(check: Check) -> Iterator[str]:
    """Yield what moved, and what did not; or why it was not looked at, and the command."""
    for change in check.changes:
        if change.step is not None:
            yield f"    {check.name}: {change.metric} changed at step {change.step}"
        elif change.moved:
            sides = f"{format_number(change.before)} → {format_number(change.since)}"
            yield f"    {check.name}: {change.metric} {sides}"
    if same := [change.metric for change in check.changes if not change.moved]:
        yield f"    {check.name}: as before: {', '.join(same)}"
    if check.absent:
        reasons = dict.fromkeys(reason or "not on record" for reason in check.absent.values())
        yield f"    {check.name}: not looked at ({', '.join(check.absent)}): {'; '.join(reasons)}:"
        yield f"    {check.command}"
