"""The stability record of a run, from its directory.

Built twice from an unchanged run it is the same, so a record that was edited later differs from the
run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..core.model import decisions
from ..core.model.payload import NOTHING, Payload
from ..core.model.policy import Policy
from ..store import audit, run_records
from ..store.recorder import incomplete_record
from ..store.run_directory import RunDescription, RunDir
from .records import (
    LaunchIdentity,
    Record,
    RunEnd,
    RunStart,
    decode_log,
    find_action_outcome,
    is_closing,
    list_troubles,
    notices_of_kind,
)
from .stability_monitors import (
    Follow,
    Frames,
    Interval,
    Knowledge,
    read_frames,
    recorded_monitors,
    recorded_rules,
)
from .stability_record import (
    SCHEMA_ID,
    AuditedPart,
    AuditState,
    BlindRule,
    FaultInjection,
    Gaps,
    IdentityChange,
    InjectedFault,
    Intervention,
    Interventions,
    JobIdentity,
    OperatorCommand,
    RecordedIncident,
    RecordedLoss,
    RecordedPolicy,
    RecordedRun,
    Recovery,
    Reload,
    RunCost,
    StabilityRecord,
    Unknown,
)

NO_FRAME = "no step was seen"
OBSERVED = ("ack_step", "step", "from_step", "attempt", "held_s", "path", "sha256", "pid")


class Effect(Struct, frozen=True):
    """Parts of an observed effect that cost something: steps that were undone, time without any."""

    from_step: int | None = None
    step: int = 0
    held_s: float | None = None


def build_stability_record(
    run: RunDir, policies: Mapping[str, Policy], knowledge: Knowledge, follow: Follow = iter
) -> StabilityRecord:
    """Return the record of a run.

    Args:
        policies: those of the run that can be read, by digest.
        knowledge: what this installation knows about signals, faults and rules.
        follow: passes the events of the journal on, and shows how many were read.

    Raises:
        StoreError: the audit log or run.json cannot be read; TamperError: the log was changed.
    """
    log = list(audit.read_audit(run.audit_path))
    records = decode_log(run, log)
    described = run.describe()
    recorded_start = next((r.data for r in records if r.kind == "run_start"), NOTHING)
    start = recorded_start.parse(RunStart)
    frames = read_frames(run, _open_intervals(records), follow)
    reloads = [
        Reload(record.step, record.seq, record.decision.after, record.reason)
        for record in records
        if isinstance(record.decision, decisions.PolicyReloaded)
    ]
    digest = str(reloads[-1].digest if reloads else start.policy_digest)
    policy = policies.get(digest)
    no_policy = Unknown(f"the policy {digest or 'of the run'} cannot be read")
    drills = injected_faults(records)
    actions = _actions(records)
    return StabilityRecord(
        schema=SCHEMA_ID,
        made_by=knowledge.installation(),
        run=_run(run, described, start, records, frames),
        policy=RecordedPolicy(
            name=described.policy if start.policy is None else start.policy,
            mode=described.mode if start.mode is None else start.mode,
            digest=start.policy_digest,
            reloads=reloads,
        ),
        identity=_identity(records),
        monitors=no_policy
        if policy is None
        else recorded_monitors(policy, frames, knowledge, records),
        rules=no_policy
        if policy is None
        else recorded_rules(policy, frames, knowledge, records, drills, start.cites),
        fault_injection=FaultInjection(in_this_run=drills, design=knowledge.injectable_faults()),
        citations=start.cites,
        incidents=_incidents(records),
        interventions=_interventions(records, actions),
        recovery=no_policy if policy is None else _recovery(policy, records, knowledge),
        gaps=_gaps(log, records, frames, policy),
        cost=_cost(actions, frames),
        loss=_loss(frames),
        limits=_limits(described, frames, policy, knowledge),
        audit=_audit_state(run, log),
    )


def _incidents(records: Sequence[Record]) -> list[RecordedIncident]:
    rows: dict[str, RecordedIncident] = {}
    counted = list_troubles(records)  # what an operator ordered is an intervention
    for record in records:
        decision, name = record.decision, str(record.incident)
        if decision is None or record.kind != "incident" or name not in counted:
            continue
        row = rows.get(name) or RecordedIncident(
            incident=name,
            severity=str(decision.severity),
            rule=str(decision.rule),
            step=record.step,
            headline=record.reason,
            end=Unknown("it is open"),
            end_step=Unknown("it is open"),
        )
        row = replace(row, severity=min(row.severity, decision.severity or row.severity))
        if isinstance(decision, decisions.IncidentRaised):
            row = replace(row, rule=str(decision.rule), headline=record.reason)
        elif isinstance(decision, decisions.IncidentClosed | decisions.IncidentHeld):
            row = replace(row, end=record.reason, end_step=record.step)
        rows[name] = row
    return list(rows.values())


def _audit_state(run: RunDir, log: Sequence[Mapping[str, Any]]) -> AuditState:
    """Return what the log and its digests say of the files that all of this is read from."""
    report = audit.verify_audit(run.audit_path, run.id)
    return AuditState(
        status=report.status,
        records=report.records,
        head=report.head,
        parts=[
            AuditedPart(part.part, part.status, part.text)
            for part in run_records.check_files(run, run_records.read_digests(log))
        ],
        not_checked=list(run_records.NOT_CHECKED),
    )


def _open_intervals(records: Sequence[Record]) -> list[Interval]:
    """Return when incidents were open; one that was never closed reaches to the end."""
    opened: dict[str, int] = {}
    intervals: list[Interval] = []
    for record in records:
        if isinstance(record.decision, decisions.IncidentOpened):
            opened[str(record.incident)] = record.mono_ns
        elif is_closing(record):
            since = opened.pop(str(record.incident), None)
            intervals += [] if since is None else [(since, float(record.mono_ns))]
    return intervals + [(since, float("inf")) for since in opened.values()]


def _run(
    run: RunDir,
    described: RunDescription,
    start: RunStart,
    records: Sequence[Record],
    frames: Frames,
) -> RecordedRun:
    end = records[-1] if records and records[-1].kind == "run_end" else None
    no_frame = Unknown(frames.unreadable or NO_FRAME)
    return RecordedRun(
        id=run.id,
        created=described.created,
        host=described.host,
        command=described.argv,
        previous=start.previous or Unknown("it follows no other run"),
        state="ended" if end is not None else "not ended, or its supervisor was killed",
        exit_code=Unknown("no record of the end")
        if end is None
        else end.data.parse(RunEnd).exit_code,
        first_step=frames.first_step if frames.frames else no_frame,
        last_step=frames.last_step if frames.frames else no_frame,
        steps_made=frames.frames + frames.missing if frames.frames else no_frame,
        tokens=frames.tokens or Unknown("no frame holds tokens_per_update"),
        attempts=len(frames.attempts),
        ranks=len(frames.ranks),
    )


def _identity(records: Sequence[Record]) -> JobIdentity:
    identities = [
        (record.step, record.data.parse(LaunchIdentity))
        for record in records
        if record.kind == "identity"
    ]
    reason = "no record of it: the run ended at once, or an earlier version recorded it"
    return JobIdentity(
        initial=identities[0][1].identity if identities else Payload({"unknown": reason}),
        changes=[
            IdentityChange(identity.attempt, identity.since, step, identity.differs)
            for step, identity in identities
            if identity.differs
        ],
    )


# ── interventions ─────────────────────────────────────────────────────────────────────────────────


def injected_faults(records: Sequence[Record]) -> list[InjectedFault]:
    """Return each fault that was injected, and how many steps later what followed."""
    faults = []
    for record, notice in notices_of_kind(records, "drill"):
        fault, params = notice.details.get("fault"), notice.details.get("params")
        if not isinstance(fault, str) or "refused" in notice.details:
            continue
        step = record.step if notice.at_step is None else notice.at_step
        later = [r.decision for r in records if r.seq > record.seq]
        alarm = next((d for d in later if isinstance(d, decisions.RuleFired)), None)
        action = next(
            (d for d in later if isinstance(d, decisions.ActionPlanned) and d.action.touches_job),
            None,
        )
        faults.append(
            InjectedFault(
                fault=fault,
                step=step,
                record=record.seq,
                params=Payload(params) if isinstance(params, Mapping) else NOTHING,
                rule=Unknown("no rule fired") if alarm is None else str(alarm.rule),
                reported_after=_steps_after(alarm, step, "no rule fired"),
                acted_after=_steps_after(action, step, "no action on the job"),
            )
        )
    return faults


def _steps_after(decision: decisions.Decision | None, step: int, reason: str) -> int | Unknown:
    return Unknown(reason) if decision is None else max(0, decision.step - step)


def _actions(records: Sequence[Record]) -> list[Intervention]:
    """Return each action on the job and its outcome, oldest first."""
    actions: dict[str, Intervention] = {}
    for record in records:
        decision = record.decision
        if isinstance(decision, decisions.ActionPlanned) and decision.action.touches_job:
            order = decision.action
            actions[order.id] = Intervention(
                id=order.id,
                action=order.verb,
                runbook=order.runbook or Unknown("an operator ordered it"),
                incident=record.incident or Unknown("of no incident"),
                step=record.step,
                outcome="in doubt",
                observed=NOTHING,
                record=record.seq,
            )
        elif (ending := find_action_outcome(decision)) is not None and ending[0] in actions:
            name, outcome, result = ending
            actions[name] = replace(
                actions[name],
                outcome=outcome,
                observed=Payload({key: result[key] for key in OBSERVED if key in result}),
            )
    return list(actions.values())


def _interventions(records: Sequence[Record], actions: Sequence[Intervention]) -> Interventions:
    by_name: dict[str, Counter[str]] = {}
    for action in actions:
        by_name.setdefault(action.action, Counter())[action.outcome] += 1
    safeguards = Counter(
        str(notice.details.get("order", "safeguard"))
        for _, notice in notices_of_kind(records, "safeguard")
    )
    return Interventions(
        by_name={name: dict(sorted(count.items())) for name, count in sorted(by_name.items())},
        safeguards=dict(sorted(safeguards.items())),
        operators=[
            OperatorCommand(record.step, record.seq, record.reason)
            for record in records
            if isinstance(record.decision, decisions.CommandAnswered | decisions.ReloadRequested)
        ],
        actions=actions,
    )


def _recovery(policy: Policy, records: Sequence[Record], knowledge: Knowledge) -> list[Recovery]:
    """Return each runbook that a rule runs: what it does, and how often it was verified."""
    used: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    current: dict[str | None, tuple[str, str]] = {}  # incident -> runbook, number of its execution
    for record in records:
        decision = record.decision
        name, _ = current.get(record.incident, ("", ""))
        if isinstance(decision, decisions.ActionPlanned):
            execution = decision.action.runbook, decision.action.id.rpartition("/")[0]
            used[execution[0]] += current.get(record.incident) != execution
            current[record.incident] = execution
        elif isinstance(decision, decisions.VerificationPassed):
            passed[name] += 1
        elif isinstance(decision, decisions.VerificationFailed):
            failed[name] += 1
    names = {rule.runbook for rule in policy.rules} | {policy.job.on_crash}
    names |= {*used, *policy.ladder.levels}
    return [
        Recovery(
            runbook=name,
            procedure=list(runbook.verbs),
            used=used[name],
            verified=passed[name],
            failed=failed[name],
            recoveries=knowledge.recoveries(runbook.verbs)
            or Unknown("not shown by the benchmarks"),
        )
        for name, runbook in policy.runbooks.items()
        if name in names
    ]


# ── gaps, cost, limits ────────────────────────────────────────────────────────────────────────────


def _gaps(
    log: Sequence[Mapping[str, Any]],
    records: Sequence[Record],
    frames: Frames,
    policy: Policy | None,
) -> Gaps:
    no_frame = Unknown(frames.unreadable or NO_FRAME)
    steps = frames.frames + frames.missing
    journal = "its decisions are on record to the end"
    if frames.unreadable:
        journal = frames.unreadable
    elif (ended_early := incomplete_record(log)) is not None:
        journal = str(ended_early["reason"])
    return Gaps(
        unwatched_s=[round(seconds, 3) for seconds in frames.unwatched_s],
        frames_lost=Unknown(frames.unreadable) if frames.unreadable else frames.lost,
        steps_without_frame=frames.missing if frames.frames else no_frame,
        blind_share=round(frames.missing / steps, 6) if frames.frames else no_frame,
        blind_rules=[
            BlindRule(str(record.decision.rule), record.step, record.seq, record.reason)
            for record in records
            if isinstance(record.decision, decisions.RuleBlind)
        ],
        inactive_rules=[] if policy is None else _inactive(policy, frames),
        journal=journal,
    )


def _inactive(policy: Policy, frames: Frames) -> list[str]:
    return [
        rule.id
        for rule in policy.rules
        if (needed := {m for n in policy.detectors_of(rule) for m in policy.detectors[n].metrics})
        and not needed & frames.announced.keys()
    ]


def _cost(actions: Sequence[Intervention], frames: Frames) -> RunCost:
    """Return what was lost: steps that were undone or dropped, and time without training."""
    observed = [action.observed.read(Effect) for action in actions]
    dropped = sum(max(0, o.from_step - o.step) for o in observed if o.from_step is not None)
    no_frame = Unknown(frames.unreadable or NO_FRAME)
    paused_s = sum(effect.held_s or 0.0 for effect in observed)
    step_s, probe_s = frames.median("step_time"), frames.median("probe_self_time")
    steps = frames.redone + dropped
    devices = len(frames.ranks)
    lost_s = paused_s + frames.down_s + steps * (step_s or 0.0)
    return RunCost(
        steps=steps if frames.frames else no_frame,
        skipped_updates=frames.skipped if frames.frames else no_frame,
        tokens=steps * frames.tokens / frames.frames
        if frames.tokens
        else Unknown("no frame holds tokens_per_update"),
        paused_s=round(paused_s, 3),
        down_s=round(frames.down_s, 3) if frames.frames else no_frame,
        device_hours=Unknown("no healthy step_time")
        if step_s is None
        else round(devices * lost_s / 3600, 6),
        device_hours_of_run=round(devices * frames.span_s / 3600, 6) if frames.frames else no_frame,
        probe_share=Unknown("no healthy probe_self_time and step_time")
        if probe_s is None or not step_s
        else round(probe_s / step_s, 6),
    )


def _loss(frames: Frames) -> RecordedLoss | None:
    curve = frames.loss
    highest = [loss if math.isfinite(loss) else None for loss in curve.losses]
    return RecordedLoss(frames.loss_name, curve.steps, highest) if curve.steps else None


def _limits(
    described: RunDescription, frames: Frames, policy: Policy | None, knowledge: Knowledge
) -> list[str]:
    limits = []
    if described.tier_reason:
        limits.append(f"the probe was not active: {described.tier_reason}")
    if frames.unreadable:
        limits.append(f"the journal does not show all steps: {frames.unreadable}")
    limits.append("one device per rank is counted, and the steps of the leading rank")
    if policy is not None:
        packs = dict.fromkeys(rule.id.partition(".")[0] for rule in policy.rules)
        limits += [
            f"{pack} also fires on: {text}" for pack in packs for text in knowledge.alarms(pack)
        ]
    return limits
