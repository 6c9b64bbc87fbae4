"""Scope of a rule: the weights and their causes, or only the machine that trains them.

A slow host, a dear probe or a silent process says nothing against a checkpoint. Whatever is not
known to be of the machine may be of the weights. Nor do denser samples explain a slow step.
"""

from __future__ import annotations

from ..model.policy import Policy, Rule
from ..model.state_machine import UNEASY
from .incident import Incident
from .run_state import State

# Times, devices, the host, the watching itself. Errors of memory are none of these, nor are those
# that a log counts: what they hit is not known.
MACHINE = frozenset(
    (
        *("step_time", "forward_time", "backward_time", "optimizer_time", "input_time"),
        *("other_time", "checkpoint_time", "comm_time", "comm_time_frac", "compute_time_frac"),
        *("dataloader_stall_frac", "tokens_per_sec", "mfu", "straggler_ratio", "straggler_rank"),
        *("gpu_util", "gpu_power", "gpu_temperature", "gpu_mem_used", "gpu_mem_allocated"),
        *("gpu_mem_reserved", "gpu_alloc_retries", "host_mem_used", "host_mem_growth"),
        *("disk_free", "open_files", "probe_overhead_frac", "probe_self_time"),
    )
)


# What one spike, or a planned event, moves.
MOVED_BY_SPIKE = frozenset(
    (
        *("train_loss_raw", "train_loss_ema", "grad_global_norm", "update_norm", "grad_clip_rate"),
        *("learning_rate", "update_to_weight", "loss_scale"),
    )
)


def metrics(policy: Policy, rule: Rule) -> set[str]:
    """Return what the detectors behind a rule read; nothing for one that reads the clock."""
    return {m for name in policy.detectors_of(rule) for m in policy.detectors[name].metrics}


def of_machine(policy: Policy, rule: Rule) -> bool:
    """Return whether a rule says nothing about the weights, whatever it finds."""
    return metrics(policy, rule) <= MACHINE


def against_weights(policy: Policy, incident: Incident) -> bool:
    """Return whether anything of the incident may speak against the weights.

    A rule that the policy no longer has is not known to be of the machine.
    """
    harmless = {rule.id for rule in policy.rules if of_machine(policy, rule)}
    return not set(incident.rules) <= harmless


def new_kind(incident: Incident, rule: Rule) -> bool:
    """Return whether no rule of the incident is of the same pack: a trouble of its own."""
    return all(_pack(name) != _pack(rule.id) for name in incident.rules)


def may_be_one_spike(policy: Policy, incident: Incident, rule: Rule) -> bool:
    """Return whether a rule, and one of the incident, read only what one spike moves."""
    others = [other for other in policy.rules if other.id in incident.rules]
    return metrics(policy, rule) <= MOVED_BY_SPIKE and any(
        metrics(policy, other) <= MOVED_BY_SPIKE for other in others
    )


def _pack(rule: str) -> str:
    return rule.partition(".")[0]


SPEED = frozenset(
    {
        "probe_overhead_frac",
        "probe_self_time",
        "step_time",
        "tokens_per_sec",
        "mfu",
        "dataloader_stall_frac",
    }
)


def needs_dense_sampling(policy: Policy, state: State) -> bool:
    """Return whether an incident is open that samples may explain.

    One that is only about speed, or about what the probe costs, is not: denser samples would make
    the steps slower still, and the incident would never end.
    """
    incident = state.incident
    if incident is None or state.machine not in UNEASY:
        return state.machine in UNEASY
    rules = [rule for rule in policy.rules if rule.id in incident.rules]
    read = {
        metric
        for rule in rules
        for name in policy.detectors_of(rule)
        for metric in policy.detectors[name].metrics
    }
    return not read or not read <= SPEED
