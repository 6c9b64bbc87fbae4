"""Metrics that a fault leaves alone until the loss moves, by kind of drill.

A metric that moves all the same points to another fault than the one meant, in the drill or in the
job; an alarm of a monitor that reads nothing else is misattributed. The table has
the metrics that are measured in a run of one process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

RATE, TOKENS, UNIQUE = "learning_rate", "tokens_per_update", "batch_unique_ratio"
GRADIENT, UPDATE, LOGIT = "grad_global_norm", "update_norm", "max_attn_logit"
DATA = (TOKENS, UNIQUE)

UNAFFECTED: Mapping[str, tuple[str, ...]] = {
    "attention_bias": (RATE, *DATA),
    "bad_batch": (RATE, TOKENS),
    "batch_cut": (RATE,),
    "bit_flip": (RATE, *DATA),
    "data_order": (RATE, TOKENS),
    "eval_mismatch": (RATE, *DATA, GRADIENT, UPDATE),
    "guard_off": (RATE, *DATA),
    "lr_spike": DATA,
    "moments": (RATE, *DATA),
    "nan_grad": (RATE, *DATA),
    "overflow_storm": (RATE, *DATA),
    "repeated_tokens": (RATE, TOKENS),
    "router": (RATE, *DATA),
    "schedule_restart": DATA,
    "shuffled_labels": (RATE, *DATA),
    "slow_compute": (RATE, *DATA, GRADIENT, UPDATE),
    "slow_input": (RATE, *DATA, GRADIENT, UPDATE),
    "weight_noise": (RATE, *DATA),
}
# What a clock measures; only faults that wait change it. A neighbour on the machine does, too, so a
# monitor of these with an alarm for another fault has measured the machine.
TIMED = frozenset(
    ("step_time", "input_time", "forward_time", "backward_time", "optimizer_time", "other_time")
) | frozenset(("tokens_per_sec", "mfu", "dataloader_stall_frac", "comm_time", "comm_time_frac"))
WAITING = frozenset(("slow_compute", "slow_input", "hang"))
METRICS = tuple(sorted({metric for unaffected in UNAFFECTED.values() for metric in unaffected}))


def is_unaffected(metrics: Collection[str], fault: str) -> bool:
    """Return whether a monitor of these metrics measures nothing that a fault changes."""
    left = (
        set(metrics) - set(UNAFFECTED.get(fault, ())) - (frozenset() if fault in WAITING else TIMED)
    )
    return bool(metrics) and not left
