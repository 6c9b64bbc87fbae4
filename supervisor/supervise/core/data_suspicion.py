"""Data at the start of an incident, and shards that have become suspect.

An incident may stay open, or held, while the same data makes trouble in one epoch after the other.
Each onset is evidence of its own, as that of another incident would be: one that comes behind as
many quiet frames as end an incident that nobody acts on, with a window that holds none of the steps
in breach before them; or the first one of a new attempt. What flaps around an onset, or lasts, is
the same trouble and counts once: its steps say how the run is, not what it was fed.
"""

from __future__ import annotations

from .approvals import ALLOW
from .incident import QUIET_STEPS, Incident, Onset, RunbookExecution
from .model.decisions import BREACH, ShardsSuspected
from .model.policy import Policy, Rule
from .rank_monitor import RankMonitor
from .run_state import ApprovalRequest, State, StepContext
from .shard_attribution import BEFORE

FINGERPRINT = "batch_fingerprint"
BATCHES = 64  # of one trouble; what lasts longer is no matter of its data. Project default


def record_onset(
    ctx: StepContext,
    monitor: RankMonitor,
    incident: Incident,
    rule: Rule,
    breach: int,
    *,
    is_new: bool = False,
) -> None:
    """The trouble of an incident began at step `breach`, for the first time or again.

    Args:
        monitor: of the rank that it was seen on.
        rule: that tells of it.
        is_new: it is an onset of its own; else it takes the place of the last one.
    """
    state, old, advisory = ctx.state, incident.onset, rule.severity == "SEV2"
    if (old.attempt, old.breach) == (monitor.attempt, breach):  # another rule tells of the same
        old.advisory &= advisory
        return
    incident.onset = Onset(
        monitor.attempt, breach, advisory, breach - BEFORE - 1, state.frame_count, monitor.step
    )
    _add_batches(monitor, incident, breach)
    _add_batches(monitor, incident, monitor.step)
    attribution = state.context.attribution
    attribution.incident(incident.id, breach, monitor.attempt, is_new=is_new)
    suspects = attribution.suspects()
    if suspects:
        accounts = {name: attribution.account(name) for name in suspects}
        texts = [
            f"{name} ({account.blamed} of {account.troubles}, p {account.p:.2g})"
            for name, account in accounts.items()
        ]
        text = f"incidents keep starting in {', '.join(texts)}"[:400]
        ctx.record(ShardsSuspected(reason=text, suspects=accounts))


def on_rule_joined(
    ctx: StepContext,
    monitor: RankMonitor,
    incident: Incident,
    rule: Rule,
    breach: int,
    *,
    moved: bool = False,
) -> None:
    """A rule fires that is, by now, of the open incident. `moved`: the incident begins there."""
    track_breach(ctx.policy, ctx.state, monitor, incident)
    onset = incident.onset
    clear = onset.lull is not None and breach - BEFORE > onset.lull
    is_new = clear or monitor.attempt > onset.attempt
    if is_new or moved or (onset.advisory and rule.severity != "SEV2"):
        record_onset(ctx, monitor, incident, rule, breach, is_new=is_new)


def on_relapse(state: State, incident: Incident) -> None:
    """A rule of the incident is in breach on probation: evidence if it was taken back meanwhile."""
    onset = incident.onset
    if state.attempt > onset.attempt:
        onset.attempt, onset.lull = state.attempt, None
        state.context.attribution.incident(incident.id, state.step, state.attempt)


def is_quiet(state: State) -> bool:
    """Return whether the next loss tells of its shard: no trouble is open, or it has been quiet."""
    incident = state.incident
    return incident is None or state.frame_count - incident.onset.frame_count > QUIET_STEPS


def track_breach(policy: Policy, state: State, monitor: RankMonitor, incident: Incident) -> None:
    """Look whether the newest frame of a rank is in breach, and its batch part of the trouble."""
    rules = [
        rule
        for rule, watch in zip(policy.rules, monitor.rules, strict=True)
        if watch.code == BREACH and rule.id in incident.rules
    ]
    if not rules:
        return
    onset, frame_count = incident.onset, state.frame_count
    if frame_count - onset.frame_count > QUIET_STEPS:
        onset.lull = onset.step
    onset.frame_count, onset.step = frame_count, monitor.step
    approved = _batches_are_approved(state.approvals.pending, incident.run)
    if (
        monitor.attempt == onset.attempt
        and not approved
        and any(_is_in_breach_now(monitor, rule) for rule in rules)
    ):
        _add_batches(monitor, incident, monitor.step)


def _add_batches(monitor: RankMonitor, incident: Incident, step: int) -> None:
    """Take the batch of `step` for one of the trouble, and those just before it.

    A step in breach further away stands alone: what lies between was healthy.
    """
    onset = incident.onset
    first_step = onset.last_step + 1 if step - onset.last_step <= BEFORE + 1 else step
    batches = [
        int(v)
        for frame_step, v in monitor.history.series(FINGERPRINT)
        if first_step <= frame_step <= step
    ]
    onset.batches = (*onset.batches, *batches)[:BATCHES]
    onset.last_step = max(onset.last_step, step)


def _is_in_breach_now(monitor: RankMonitor, rule: Rule) -> bool:
    """Return whether a metric is in breach in this very frame; a reading may last longer."""
    policy, watches = monitor.policy, monitor.watches
    leaves = [
        monitor.index[name] for name in policy.detectors_of(rule) if policy.detectors[name].metrics
    ]
    return any(watches[i].raw == BREACH for i in leaves)


def _batches_are_approved(pending: ApprovalRequest | None, run: RunbookExecution | None) -> bool:
    """Return whether people said yes to the batches as they are, or their silence will."""
    if pending is not None and (pending.granted or pending.on_timeout == ALLOW):
        return True
    return run is not None and run.terms.approved is not None
