"""Whether the probes are to sample more densely. A pure question about the state."""

from __future__ import annotations

from ..model.policy import Policy
from ..model.state_machine import UNEASY
from ..state.run_state import State

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
