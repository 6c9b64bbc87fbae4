"""Metrics in words, as people read them on a card. A metric without words is named by its id."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.model import format_readings

NAMES: Mapping[str, str] = {
    "train_loss": "loss",
    "grad_global_norm": "grad norm",
    "learning_rate": "lr",
    "dataloader_stall_frac": "share of time waiting for data (%)",
    "host_mem_growth": "host memory growth (bytes/h)",
    "host_mem_used": "host memory in use (%)",
    "param_digest_mismatch": "parameter digests that differ between ranks",
    "rank_probe_dispersion": "spread of the ranks on one batch",
    "opt_state_finite": "optimizer moments finite (1 is yes)",
    "rerun_mismatch": "steps that did not repeat",
    "straggler_ratio": "step time of the slowest rank over the median",
    "loss_dispersion": "spread of the loss over ranks",
    "batch_dispersion": "spread of the token entropy over ranks",
    "gpu_util": "GPU utilization",
    "tokens_per_second": "tokens per second",
    "ckpt_verified": "checkpoint verified (1 is yes)",
    "update_skipped": "update skipped",
}


def named(metric: str) -> str:
    """Return a metric in words."""
    known = NAMES.get(metric) or format_readings.metric(metric)
    return known if known != metric else metric.replace("_", " ")
