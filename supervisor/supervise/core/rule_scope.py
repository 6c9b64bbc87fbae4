"""Scope of a rule: the weights and their causes, or only the machine that trains them.

A slow host, a dear probe or a silent process says nothing against a checkpoint. Whatever is not
known to be of the machine may be of the weights. Nor do denser samples explain a slow step.
"""

from __future__ import annotations

from .frames import STATISTICS, THROUGHPUT
from .incident import Incident
from .model.decisions import CODE_NAMES
from .model.policy import Policy, Rule
from .model.state_machine import UNEASY
from .run_state import State

# Families of rules, by what they read.
LIVENESS, SPEED, HARDWARE, DATA, TRAINING = "liveness", "speed", "hardware", "data", "training"
WIRING = "wiring"  # of the job, as it is written; the name of the pack, too
TIMES = THROUGHPUT | frozenset(
    (
        *("forward_time", "backward_time", "optimizer_time", "input_time", "other_time"),
        *("checkpoint_time", "comm_time", "straggler_ratio", "straggler_rank"),
        *("probe_overhead_frac", "probe_self_time"),
    )
)
# Times, devices, the host, the watching itself. Errors of memory are none of these, nor are those
# that a log counts: what they hit is not known.
MACHINE = TIMES | frozenset(
    (
        *("gpu_power", "gpu_temperature", "gpu_mem_used", "gpu_mem_allocated"),
        *("gpu_mem_reserved", "gpu_alloc_retries", "host_mem_used", "host_mem_growth"),
        *("disk_free", "open_files"),
    )
)
# What a model is given, known before it has seen it: that explains what it then does.
INPUTS = frozenset(
    (
        *("batch_fingerprint", "batch_token_entropy", "batch_unique_ratio", "batch_top1_share"),
        *("tokens_per_update", "batch_dispersion", "batch_new_share", "batch_token_shift"),
        *("batch_ids_outside", "batch_pad_fraction", "batch_seq_len_p50", "batch_source_shift"),
        *("batch_samples_differ", "losses_without_targets"),
    )
)


# What one spike, or a planned event, moves.
MOVED_BY_SPIKE = frozenset(
    (
        *("train_loss_raw", "train_loss_ema", "grad_global_norm", "update_norm", "grad_clip_rate"),
        *("learning_rate", "update_to_weight", "loss_scale"),
    )
)


SKIPS = frozenset(("update_skipped", "skip_reason"))
AGE = frozenset(("steps_seen",))  # of the run: a rule that begins or ends with it is about the rest
RETURNED_DATA = "data"  # the cause of a mute: what a rule sees is theirs
# What a return of other data moves, beside what the spike itself does.
OF_TOKENS = frozenset(
    (
        *("batch_token_entropy", "batch_unique_ratio", "batch_top1_share", "batch_token_drift"),
        *("batch_token_shift", "shuffle_block_skew"),
    )
)
MOVED_BY_LOSS = frozenset(("train_loss_raw", "train_loss_ema", "grad_global_norm", "update_norm"))


def is_moved_by_data(policy: Policy, rule: Rule) -> bool:
    """Return whether a rule reads what a return of other data moves, and nothing else."""
    read = rule_metrics(policy, rule)
    known = read <= MOVED_BY_SPIKE | OF_TOKENS | AGE
    return known and bool(read & MOVED_BY_LOSS) and _pack(rule.id) != WIRING


def rule_metrics(policy: Policy, rule: Rule) -> set[str]:
    """Return what a rule is about; nothing for one that reads the clock.

    Amounts only say whether a loss can be compared.
    """
    behind = [policy.detectors[name] for name in policy.detectors_of(rule)]
    return {metric for detector in behind for metric in detector.subjects}


def rule_family(policy: Policy, rule: Rule) -> str:
    """Return what a rule is about; of a rule that reads of several families it is the training."""
    if _pack(rule.id) == WIRING:
        return WIRING
    read = rule_metrics(policy, rule)
    for name, family_metrics in ((LIVENESS, frozenset[str]()), (SPEED, TIMES), (HARDWARE, MACHINE)):
        if read <= family_metrics:
            return name
    return DATA if read <= INPUTS else TRAINING


def is_moved_by_turns(policy: Policy, rule: Rule) -> bool:
    """Return whether a rule reads nothing but what is of another size with each optimizer."""
    read = rule_metrics(policy, rule) - AGE
    return rule.severity != "SEV0" and bool(read & MOVED_BY_LOSS) and read <= MOVED_BY_SPIKE


def is_moved_by_rate_search(policy: Policy, rule: Rule) -> bool:
    """Return whether a rule sees what a search for the highest rate does to a training."""
    if rule.severity == "SEV0":  # ranks that drift apart are none of it
        return rule_metrics(policy, rule) <= MOVED_BY_SPIKE | SKIPS
    return rule_family(policy, rule) == TRAINING


def is_machine_rule(policy: Policy, rule: Rule) -> bool:
    """Return whether a rule says nothing about the weights, whatever it finds."""
    return rule_metrics(policy, rule) <= MACHINE


def may_speak_against_weights(policy: Policy, incident: Incident) -> bool:
    """Return whether anything of the incident may speak against the weights.

    A rule that the policy no longer has is not known to be of the machine.
    """
    harmless = {rule.id for rule in _rules(policy, incident) if is_machine_rule(policy, rule)}
    return not set(incident.rules) <= harmless


def is_unrelated_machine_rule(policy: Policy, incident: Incident, rule: Rule) -> bool:
    """Return whether a rule tells of the machine only, and the open incident of the training.

    What asks for an action is answered within the incident, and silence interrupts whatever it is.
    """
    return (
        rule.runbook is None
        and rule_family(policy, rule) in (SPEED, HARDWARE)
        and may_speak_against_weights(policy, incident)
    )


def incident_alongside(policy: Policy, incident: Incident | None, rule: Rule) -> str:
    """Return the id of an open incident that a rule is apart from, "" for none."""
    return (
        incident.id
        if incident is not None and is_unrelated_machine_rule(policy, incident, rule)
        else ""
    )


def incident_still_fires(policy: Policy, state: State, incident: Incident) -> bool:
    """Return whether a rule fires that is not apart from the incident."""
    firing = set(state.firing(policy))
    return any(
        rule.id in firing
        and state.rules.muted_by(rule.id) not in (RETURNED_DATA, "phase")
        and not is_unrelated_machine_rule(policy, incident, rule)
        and (rule.runbook is not None or rule_family(policy, rule) != WIRING)
        for rule in policy.rules
        if firing
    )


def displaces_machine_incident(policy: Policy, incident: Incident, rule: Rule) -> bool:
    """Return whether a rule tells of the training, and the open incident of the machine only."""
    return (
        bool(incident.rules)
        and rule_family(policy, rule) in (DATA, TRAINING)
        and all(
            rule_family(policy, member) in (SPEED, HARDWARE) for member in _rules(policy, incident)
        )
        and not may_speak_against_weights(policy, incident)
    )


def is_new_kind(incident: Incident, rule: Rule) -> bool:
    """Return whether no rule of the incident is of the same pack: a trouble of its own."""
    return all(_pack(name) != _pack(rule.id) for name in incident.rules)


def has_as_grave(policy: Policy, incident: Incident, rule: Rule) -> bool:
    """Return whether a rule of the same pack, as grave or graver, is in the incident."""
    return any(
        _pack(member.id) == _pack(rule.id) and member.severity <= rule.severity
        for member in _rules(policy, incident)
    )


def explains_bad_input(policy: Policy, incident: Incident, rule: Rule) -> bool:
    """Return whether a rule tells of what the model is given, and none as grave did so before."""
    return rule_family(policy, rule) == DATA and not any(
        member.severity <= rule.severity
        for member in input_rules(policy, incident)
        if member.id != rule.id
    )


def input_rules(policy: Policy, incident: Incident) -> list[Rule]:
    """Return the rules of an incident that tell of what the model is given."""
    return [rule for rule in _rules(policy, incident) if rule_family(policy, rule) == DATA]


def are_running_stats_restored(policy: Policy, state: State, incident: Incident) -> bool:
    """Return whether running statistics were not finite until a rollback, and all else was."""
    excursion = incident.case.excursion
    is_worse = excursion.nonfinite is not None or excursion.came_back or excursion.bad_losses > 1
    are_of_it = any(STATISTICS in rule_metrics(policy, rule) for rule in _rules(policy, incident))
    is_restored = are_of_it and incident.case.rolled_back and not is_worse
    return is_restored and not are_running_stats_broken(policy, state, incident)


def are_running_stats_broken(policy: Policy, state: State, incident: Incident) -> bool:
    """Return whether a rule about running statistics that are not finite fires."""
    firing = set(state.firing(policy)) & {*incident.rules}
    rules = (rule for rule in policy.rules if rule.id in firing)
    return any(STATISTICS in rule_metrics(policy, rule) for rule in rules)


def is_fed_wrongly(policy: Policy, state: State, incident: Incident) -> bool:
    """Return whether a rule about what the model is given fires."""
    firing = set(state.firing(policy))
    return any(rule.id in firing for rule in input_rules(policy, incident))


def may_be_one_spike(policy: Policy, incident: Incident, rule: Rule) -> bool:
    """Return whether a rule, and one of the incident, read only what one spike moves."""
    return rule_metrics(policy, rule) <= MOVED_BY_SPIKE and any(
        rule_metrics(policy, other_rule) <= MOVED_BY_SPIKE
        for other_rule in _rules(policy, incident)
    )


def _pack(rule: str) -> str:
    return rule.partition(".")[0]


def _rules(policy: Policy, incident: Incident) -> list[Rule]:
    return [rule for rule in policy.rules if rule.id in incident.rules]


def needs_dense_sampling(policy: Policy, state: State) -> bool:
    """Return whether an incident is open that samples may explain.

    One that is only about speed, or about what the probe costs, is not: denser samples would make
    the steps slower still, and the incident would never end.
    """
    incident = state.incident
    if incident is None or state.machine not in UNEASY:
        return state.machine in UNEASY
    read = {metric for rule in _rules(policy, incident) for metric in rule_metrics(policy, rule)}
    return not read or not read <= TIMES


def rule_states(policy: Policy, state: State) -> dict[str, str]:
    """Return each rule's state: `firing`, `flapping`, `inactive`, `blind`, else its worst code.

    `inactive`: a required metric does not exist in this job.
    """
    states: dict[str, str] = {}
    for r, rule in enumerate(policy.rules):
        watches = [monitor.rules[r] for monitor in state.monitors.values()]
        if any(watch.firing for watch in watches):
            states[rule.id] = "flapping" if rule.id in state.rules.flapping else "firing"
        elif any(watch.blind for watch in watches):
            states[rule.id] = "blind"
        elif not any(monitor.has_needed_metrics(r) for monitor in state.monitors.values()):
            states[rule.id] = "inactive"
        else:
            states[rule.id] = CODE_NAMES[max((watch.code for watch in watches), default=1)]
    return states
