"""Another policy takes over in the middle of a run: what keeps its memory, and what starts anew.

A detector whose definition is the same, its inputs included, keeps its watch; a rule whose
definition is the same and whose detectors all kept theirs goes on as if nothing had happened.
Everything else starts as at the beginning of a run. Budgets, cooldowns, the open incident, the
state of the machine and the frame count are the run's and not the policy's: they survive.

So a reload of the same policy changes no decision, and no reload refunds a budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TypeVar

from . import notices, operator_commands, reasons, run_notices
from .incident import Incident
from .model.decisions import HoldsIfFailed, PolicyRefused, PolicyReloaded, RuleCleared
from .model.events import NO_CHANGES, PartChanges, PolicyChanges, Reloaded
from .model.policy import HOLD, Ladder, Policy, Rule
from .rank_monitor import RankMonitor
from .run_state import END_REQUESTED, State, StepContext

T = TypeVar("T")

# Of a monitor: what follows from the policy. All else was learnt from the job, and is kept.
DERIVED = frozenset({"policy", "detectors", "index", "watches", "codes", "rules"})
# Of a rule: what says nothing about when it fires and what then happens.
WORDS = frozenset({"when", "location", "see"})
# Of a policy: what is compared part by part, follows from these, or only names it.
PARTS = ("detectors", "rules", "runbooks", "budgets")
NAMES = frozenset({*PARTS, "name", "digest", "mode", "resolved", "sparsest"})
# What the probe and the channels were told when the job was started.
AT_START = ("savepoints", "safeguards", "probe", "sampling", "mechanisms", "notify")


def policy_differences(old: Policy, new: Policy, started: Policy) -> PolicyChanges:
    """Return what is different between two policies, and from what the job was `started` with."""
    setting_names = [f.name for f in fields(Policy) if f.name not in NAMES]
    return PolicyChanges(
        detectors=_moves(old.detectors, new.detectors),
        rules=_moves({r.id: r for r in old.rules}, {r.id: r for r in new.rules}),
        runbooks=_moves(old.runbooks, new.runbooks),
        budgets=_moves(old.budgets, new.budgets),
        mode=[old.mode, new.mode] if old.mode != new.mode else (),
        settings=[n for n in setting_names if getattr(old, n) != getattr(new, n)] or (),
        restart=[n for n in AT_START if getattr(started, n) != getattr(new, n)] or (),
    )


def _moves(old_parts: Mapping[str, T], new_parts: Mapping[str, T]) -> PartChanges:
    changes = PartChanges(
        added=[name for name in new_parts if name not in old_parts] or (),
        removed=[name for name in old_parts if name not in new_parts] or (),
        changed=[
            n for n in new_parts if n in old_parts and not _is_same(old_parts[n], new_parts[n])
        ]
        or (),
    )
    return changes if changes else NO_CHANGES


def on_reloaded(ctx: StepContext, event: Reloaded) -> None:
    """Let `ctx.policy` take over; a refused one is only told."""
    if event.refused is not None:
        text = f"the policy was not reloaded: {event.refused}"
        ctx.record(PolicyRefused(reason=text, operator=event.operator, before=event.before))
        ctx.send(run_notices.PolicyNotReloaded(severity="SEV2", refusal=event.refused))
        return
    state = ctx.state
    ladder = next((monitor.policy.ladder for monitor in state.monitors.values()), ctx.policy.ladder)
    firing = _firing(state.monitors)
    rebound = {
        rank: rebind_monitor(monitor, ctx.policy) for rank, monitor in state.monitors.items()
    }
    state.monitors = {rank: monitor for rank, (monitor, _) in rebound.items()}
    anew = {
        part: sorted({name for _, names in rebound.values() for name in names[part]})
        for part in ("detectors", "rules")
    }
    text = str(notices.PolicyReload(operator=event.operator, difference=event.changes))
    ctx.record(
        PolicyReloaded(
            reason=text,
            operator=event.operator,
            policy=event.name,
            mode=event.mode,
            before=event.before,
            after=event.digest,
            changes=event.changes,
            reset=anew,
            budget=state.ledger.usage(ctx.policy.budgets, state.frame_count, state.at_ns),
        )
    )
    unavailable = state.job.unavailable
    unavailable.pop("relaunch", None)
    unavailable.update(ctx.policy.unavailable)
    if state.job.end_requested:
        unavailable["relaunch"] = END_REQUESTED
    _forget_rules(ctx, firing)
    _translate_rungs(state, ladder, ctx.policy.ladder)
    operator_commands.restart_requested_runbook(ctx, reasons.Settled.RELOADED)
    if state.incident is not None:
        _keep_runnable(ctx, state.incident)
    ctx.send(
        run_notices.PolicyInForce(severity="INFO", name=event.name, mode=event.mode, changes=text)
    )


def rebind_monitor(
    monitor: RankMonitor, policy: Policy
) -> tuple[RankMonitor, dict[str, list[str]]]:
    """Return a monitor that judges by `policy` what `monitor` has seen, and what starts anew in it.

    The latter by name, under `detectors` and `rules`.

    `monitor` itself must not be used any more: the two share watches.
    """
    old, rebound = monitor.policy, RankMonitor(policy)
    for name, value in vars(monitor).items():
        if name not in DERIVED and not name.startswith("_"):
            setattr(rebound, name, value)
    kept_names: set[str] = set()
    anew: dict[str, list[str]] = {"detectors": [], "rules": []}
    for i, (name, detector) in enumerate(policy.detectors.items()):
        is_same = old.detectors.get(name) == detector
        if is_same and all(
            inner in kept_names for inner in detector.detectors
        ):  # inputs come first
            kept_names.add(name)
            j = monitor.index[name]
            rebound.watches[i], rebound.codes[i] = monitor.watches[j], monitor.codes[j]
        else:
            anew["detectors"].append(name)
    places = {rule.id: index for index, rule in enumerate(old.rules)}
    for r, rule in enumerate(policy.rules):
        old_index = places.get(rule.id)
        if old_index is None or not _goes_on(old, old.rules[old_index], policy, rule, kept_names):
            anew["rules"].append(rule.id)
        else:
            rebound.rules[r] = monitor.rules[old_index]
    rebound.announce(monitor.names, monitor.program)
    return rebound, anew


def _forget_rules(ctx: StepContext, rules_before: Mapping[tuple[str, int], str]) -> None:
    """Say which rules do not fire any more, and drop what was remembered about them."""
    state = ctx.state
    firing = _firing(state.monitors)
    for (rule_id, rank), severity in rules_before.items():
        if (rule_id, rank) not in firing:
            text = f"{rule_id} cleared: the policy was reloaded"
            ctx.record(RuleCleared(reason=text, rule=rule_id, severity=severity, rank=rank))
    now = {rule_id for rule_id, _ in firing}
    state.rules.unmute_cleared(now)
    state.rules.forget_unknown({rule.id for rule in ctx.policy.rules})


def _translate_rungs(state: State, old: Ladder, new: Ladder) -> None:
    """Rungs are remembered by number: find the same runbook on the new ladder."""
    if old.levels == new.levels:
        return

    def level(number: int) -> int:
        if 0 <= number < len(old.levels) and old.levels[number] in new.levels:
            return new.levels.index(old.levels[number])
        return min(number, len(new.levels))  # as many were tried: never less force than before

    state.history.renumber(level)
    if state.incident is not None:
        escalation = state.incident.escalation
        escalation.level = level(escalation.level)


def _keep_runnable(ctx: StepContext, incident: Incident) -> None:
    """A runbook in progress goes on as it began; what follows its failure must still exist."""
    run = incident.run
    if run is None or run.runbook.if_it_fails in (HOLD, *ctx.policy.runbooks):
        return
    missing_runbook = run.runbook.if_it_fails
    run.runbook = replace(run.runbook, if_it_fails=HOLD)
    text = f"{run.runbook.name} holds if it fails: runbook {missing_runbook} no longer exists"
    ctx.record(HoldsIfFailed(reason=text, runbook=run.runbook.name))


def _firing(monitors: Mapping[int, RankMonitor]) -> dict[tuple[str, int], str]:
    """Return `(rule id, rank) -> severity` of all rules that fire or are blind."""
    return {
        (rule.id, rank): rule.severity
        for rank, monitor in monitors.items()
        for rule, watch in zip(monitor.policy.rules, monitor.rules, strict=True)
        if watch.firing or watch.blind
    }


def _is_same(old: object, new: object) -> bool:
    """Compare two parts of policies; of rules, what decides (a function equals only itself)."""
    if not isinstance(old, Rule):
        return bool(old == new)
    names = [f.name for f in fields(Rule) if f.name not in WORDS]
    return all(getattr(old, name) == getattr(new, name) for name in names)


def _goes_on(old: Policy, was: Rule, new: Policy, rule: Rule, kept_names: set[str]) -> bool:
    """Return whether a rule keeps its memory; one that may act from now on has to fire again."""
    is_same = _is_same(was, rule) and old.mode_of(was) == new.mode_of(rule)
    return is_same and all(name in kept_names for name in new.detectors_of(rule))
