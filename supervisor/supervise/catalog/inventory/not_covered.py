"""Reasons for ids that are not covered. Covered is what is measured and judged by a shipped rule.

One reason, many ids. An id that a job may report is judged where it does: then the reason says why
nothing else measures it.
"""

from __future__ import annotations

# The same fact under another id, which a shipped rule reads.
_JUDGED_AS = {
    "adam_rms_ratio": "update_norm and update_to_weight",
    "attn_logit_absmean": "max_attn_logit",
    "comm_time": "comm_time_frac",
    "gpu_mem_allocated": "gpu_mem_used",
    "gpu_mem_reserved": "gpu_mem_used",
    "grad_sketch.<i>": "grad_direction_consistency",
    "grad_norm_share": "grad_global_norm",
    "grad_spike_score": "grad_global_norm",
    "job_grad_norm": "grad_global_norm",
    "job_loss": "train_loss_raw",
    "job_tokens": "tokens_per_update",
    "input_time": "dataloader_stall_frac",
    "nan_inf_events": "the values themselves",
    "overflow_rate": "overflow",
    "param_digest.<i>": "param_digest_mismatch",
    "probe_self_time": "probe_overhead_frac",
    "skipped_updates": "skip_reason and overflow",
    "tokens_applied": "tokens_seen and steps_seen",
    "train_loss": "train_loss_raw",
    "train_loss_ema": "train_loss_raw",
    "train_ppl": "train_loss_raw",
    "update_square_share": "update_norm",
    "weight_square_share": "update_to_weight",
}
_GROUPS = (
    (
        "Context for reports and runbooks; no healthy range of its own.",
        "backward_time batch_copies batch_offset batch_shard clip_bound clip_threshold epoch"
        " forward_time gpu_alloc_retries gradients_zeroed job_ranks layer_weight_std"
        " layer_weight_std.<i> loss_outlier_rank lr_hold lr_rewarm nonfinite_rank open_files"
        " param_digest_rank optimizer_time other_time skip_mismatch_rank straggler_part"
        " straggler_rank",
    ),
    (
        "Healthy changes of the data move it; it is asked before a loss has weights taken back.",
        "batch_token_drift",
    ),
    (
        "Nothing for a person to do: pieces that are too dear go off by themselves; the status and"
        " the end of a run have it.",
        "probe_overhead_frac",
    ),
    (
        "Says where a trouble is, which the whole tells.",
        "attn_entropy_min grad_global_norm.<i> max_attn_logit.<i> max_attn_logit_head"
        " residual_rms.<i> residual_rms_p50.<i> residual_rms_p99.<i> slice_val_loss"
        " update_to_weight.<i>",
    ),
    (
        "Known to the job's own evaluation alone.",
        "eval_artifact_hash microbench_score",
    ),
    (
        "Needs the curves of other runs.",
        "collapse_residual scaling_law_residual",
    ),
    (
        "Context: while the loss is steep it is the lag of the training average, up to 0.9 nat of"
        " our healthy runs and 0.6 from one evaluation to the next.",
        "train_val_gap",
    ),
    ("A figure for whole runs; each spike is told by loss_spike.", "spike_score"),
    ("Needs further passes over a batch, which the probe does not make.", "curvature_trace_est"),
    (
        "Needs a batch or a step that is run again, which takes the job's help.",
        "rank_probe_dispersion rerun_mismatch",
    ),
    (
        "Too dear in a step: decompositions of whole weights, or a softmax of every token.",
        "dw_spectral_entropy qk_d2_spectral_entropy singular_entropy spectral_radius token_entropy",
    ),
    (
        "Known to the data pipeline alone.",
        "bytes_per_token pad_fraction shuffle_block_skew source_mix_share token_kl_drift",
    ),
    ("Needs a profiler of the device; gpu_util is measured.", "compute_time_frac"),
)

REASONS = {metric: f"Judged as {other}." for metric, other in _JUDGED_AS.items()} | {
    metric: reason for reason, ids in _GROUPS for metric in ids.split()
}
