"""Names of our metrics in other programs. Aliases apply to back-test input only.

A column is looked up in lower case with blanks and dashes as underscores; then again without a
leading `train/`, `training/` or `metrics/`. A column that is here under several names is taken by
the first of them that the file has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Our id: what it is called by Megatron-LM, Hugging Face (axolotl too), Lightning, nanoGPT, llm.c,
# torchtitan, Composer and OLMo, and in the recordings of our own fault study.
NAMES: Mapping[str, tuple[str, ...]] = {
    "train_loss_raw": (
        *("loss", "train_loss", "lm_loss", "lm_loss_training/lm_loss", "train_loss_step"),
        *("loss/train/total", "crossentropyloss", "ce_loss", "loss_metrics/global_avg_loss"),
    ),
    "grad_global_norm": (
        *("grad_norm", "gradient_norm", "grad_norm/grad_norm", "l2_norm/grad/global", "norm"),
        *("optim/total_grad_norm", "total_grad_norm", "grad_2.0_norm_total"),
    ),
    "learning_rate": (
        *("lr", "learning_rate/learning_rate", "optim/learning_rate_group0", "lr_adamw"),
        *("lr_decoupledadamw/group0", "learning_rate_group0"),
    ),
    "update_to_weight": ("uw_ratio",),
    "update_skipped": ("skipped", "optim/step_skipped"),
    "skipped_updates": ("number_of_skipped_iterations", "skipped_iterations"),
    "nan_inf_events": ("number_of_nan_iterations", "nan_iterations"),
    "loss_scale": ("scale", "loss_scale/loss_scale"),
    "max_attn_logit": ("attn_logit_max", "max_attention_logit"),
    "attn_entropy": ("attn_ent_mean",),
    "attn_entropy_min": ("attn_ent_min",),
    "residual_rms": ("act_rms_max",),
    "logz_mean": ("lse_abs",),
    "batch_token_entropy": ("tok_entropy",),
    "step_time": (
        *("iteration_time", "elapsed_time_per_iteration_s", "elapsed_time_per_iteration_ms"),
        *("iteration_time/iteration_time", "time_metrics/end_to_end(s)", "step_time_ms"),
    ),
    "tokens_per_sec": (
        *("tokens_per_second", "throughput/tokens_per_sec", "throughput(tps)", "tgs"),
        *("throughput/device/tokens_per_second", "tokens_per_second_per_gpu"),
    ),
    "mfu": ("mfu(%)",),
}
# Milliseconds where we count seconds.
FACTORS: Mapping[str, float] = {"elapsed_time_per_iteration_ms": 1e-3, "step_time_ms": 1e-3}

# Where the optimizer's step is, the best first: a logger's own counter says the least.
STEPS = (
    *("step", "trainer/global_step", "global_step", "train/global_step", "iteration", "iter"),
    *("iteration_number", "_step"),
)
FILE = "file"
RUNS = ("run", FILE)  # several runs in one file; logs that its rows were copied from
RANK, ATTEMPT = "rank", "attempt"
# Where and when a row was logged; no metric.
ASIDE = frozenset(
    (*STEPS, *RUNS, RANK, ATTEMPT, "line", "wall", "_timestamp", "_runtime", "_wandb")
)

ID = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*")  # what a metric's id looks like
_PREFIXES = ("train/", "training/", "metrics/")


def plain(column: str) -> str:
    """Return a column's name as it is looked up."""
    return column.strip().lower().replace(" ", "_").replace("-", "_")


def bind(
    columns: tuple[str, ...], extra: Mapping[str, str]
) -> tuple[dict[str, tuple[int, float]], list[str]]:
    """Return metric id -> (index of its column, factor to its unit), and the columns left out.

    Args:
        extra: column -> metric id given by the user; takes precedence.
    """
    taken: dict[str, tuple[int, float]] = {}
    used: set[int] = set()

    def take(metric: str, index: int, factor: float = 1.0) -> None:
        if metric not in taken and index not in used:
            taken[metric] = (index, factor)
            used.add(index)

    for i, column in enumerate(columns):
        if column in extra:
            take(extra[column], i)
    for i, column in enumerate(columns):
        if column in NAMES:
            take(column, i)
    place = {
        name: i for i, column in reversed([*enumerate(columns)]) for name in _spellings(column)
    }
    for metric, names in NAMES.items():
        for name in (metric, *names):
            if name in place:
                take(metric, place[name], FACTORS.get(name, 1.0))
    known = {place[name] for names in NAMES.values() for name in names if name in place}
    for i, column in enumerate(columns):
        if i not in known and column not in ASIDE and ID.fullmatch(column):
            take(column, i)
    if "skip_reason" not in taken and taken.keys() >= {"update_skipped", "loss_scale"}:
        taken.setdefault("overflow", taken["update_skipped"])  # the log tells no other reason
    left = [c for i, c in enumerate(columns) if i not in used and c not in ASIDE]
    return taken, left


def _spellings(column: str) -> list[str]:
    name = plain(column)
    return [name, *(name.removeprefix(p) for p in _PREFIXES if name.startswith(p))]
