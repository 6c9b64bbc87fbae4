"""The metrics that have a name: what our collectors measure, by id, and the other standard ids.

A policy may name others: a job can report its own. So an unknown id is a warning, never an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from functools import cache

from supervise_probe import collectors
from supervise_probe.collectors import MetricSpec

from .. import recordings
from ..core.model.policy import Policy

SIMPLE = "this project"
MARIN = "Marin 32B retrospective"

# No collector measures these; where nothing reports one, the rules that need it are inactive.
# id, unit, meaning, source of the definition; grouped as in the packs.
_ROWS = (
    # optimization
    (
        "microbench_score",
        "1",
        "Accuracy on a pinned suite of the job's own. Append a task of `job.evaluate.tasks` for "
        "the share of its questions that the model of a checkpoint answers right, by length where "
        "the task has that score.",
        "acc_norm, else acc, of lm-evaluation-harness",
    ),
    (
        "eval_artifact_hash",
        "1",
        "Number of the evaluation: of the checkpoints' windows, tokens, dtype, tokenizer and code "
        "version; a job that reports its own counts instead.",
        "first 52 bits of a SHA-256 over canonical JSON",
    ),
    (
        "collapse_residual",
        "nat",
        "Normalised train_loss less the curve of a detector of the kind `collapse`.",
        "Celerity report",
    ),
    (
        "scaling_law_residual",
        "nat",
        "Mean train_loss less that of the law `job.scaling_law`, every fiftieth more tokens.",
        SIMPLE,
    ),
    (
        "curvature_trace_est",
        "1",
        "Trace of the Hessian of the probe batch's loss in the model of a checkpoint.",
        "v'Hv of 8 random signs v, by central differences of gradients; Hutchinson, 1989",
    ),
    (
        "checkpoint_unknown",
        "1",
        "1 where a checkpoint was to be evaluated, and nothing is known of its model; else 0.",
        "the checkpoint guard",
    ),
    (
        "checkpoint_proved",
        "1",
        "1 where the probe batch has with its weights what it had in the job, else 0.",
        "the checkpoint guard",
    ),
    (
        "checkpoint_parts_lost",
        "parts",
        "Parts of it (optimizer, scheduler, random) that cannot be restored, or that all files of "
        "its name before it had.",
        "the checkpoint guard",
    ),
    (
        "checkpoint_probe_loss",
        "nat",
        "Loss of the probe batch in the model of a checkpoint, without dropout.",
        SIMPLE,
    ),
    ("checkpoint_probe_ppl", "1", "Its exponential.", SIMPLE),
    (
        "checkpoint_entropy",
        "nat",
        "Entropy of the outputs of the probe batch, mean over positions, in that model.",
        SIMPLE,
    ),
    (
        "checkpoint_kl_to_prev",
        "nat",
        "KL divergence of these outputs from those of the checkpoint evaluated before.",
        SIMPLE,
    ),
    (
        "checkpoint_top_agreement",
        "%",
        "Share of the ten likeliest tokens that both have in common.",
        SIMPLE,
    ),
    (
        "checkpoint_val_loss",
        "nat",
        "Loss of windows of the files of `job.evaluate.val`, mean of the files; append one's name "
        "for its own: `.held`.",
        SIMPLE,
    ),
    ("checkpoint_val_ppl", "1", "Its exponential.", SIMPLE),
    (
        "checkpoint_val_rise",
        "nat",
        "By how much the same windows lost more than at the checkpoint evaluated before, of the "
        "file where that is surest; 0 where none lost more.",
        SIMPLE,
    ),
    ("checkpoint_val_rise_z", "1", "That in standard errors of its mean.", SIMPLE),
    (
        "zlib_ratio",
        "%",
        "Share of the windows of such a file that cost the model unusually few bits, for those "
        "that zlib (level 9) needs for their token ids as they are in the file: below the lowest "
        "thousandth of the first evaluation, in deviations from the median; the largest of the "
        "files, append one's name for its own: `.held`.",
        "Carlini et al., arXiv:2012.07805",
    ),
    (
        "codec_score",
        "%",
        "Share of the items of such a file, each a quarter of the context, whose loss is greater "
        "behind three other items of it than without; the largest of the files, append one's name "
        "for its own.",
        "CoDeC: below 50 clean, 60 to 80 suspect, above contaminated",
    ),
    (
        "memorization_rate",
        "%",
        "Share of the tokens of the model's own texts, sampled without a prompt at a temperature "
        "of 1, in sequences of 50 or more that the data of `job.evaluate.index` has, too.",
        "Carlini et al., arXiv:2202.07646",
    ),
    (
        "microbench_fall_z",
        "1",
        "By how many standard errors the share of a task is below its mean in the four evaluations "
        "before, of the task where that is the most; 0 where none is.",
        "two proportions, of which the mean is one",
    ),
    (
        "rtp_toxicity_prob",
        "%",
        "Share of the prompts of `job.evaluate.toxicity` of whose continuations by the model its "
        "scorer gives one 0.5 or more.",
        "Gehman et al., arXiv:2009.11462",
    ),
    (
        "rtp_toxicity_rise_z",
        "1",
        "By how many standard errors that is above its mean in the four evaluations before.",
        "two proportions, of which the mean is one",
    ),
    (
        "spike_score",
        "%",
        "Share of the newest 1000 losses that are 7 deviations or more above the mean of the 1000 "
        "before them; absent before it can be full.",
        "OLMo 2",
    ),
    ("spike_count", "1", "Spikes of the loss so far: those points, 50 steps apart.", SIMPLE),
    (
        "slice_val_shift",
        "1",
        "How far one of three evaluation sets or more went its own way since the evaluation "
        "before: change less the median of all, in scales of its past; the largest.",
        SIMPLE,
    ),
    (
        "layer_swing",
        "%",
        "Root mean square of the second differences that the layers' log layer_weight_std have in "
        "common, where they go to and fro together, over 12 samples; else 0.",
        MARIN,
    ),
    # model behaviour
    (
        "spectral_radius",
        "1",
        "Largest singular value over sqrt(out / in), of the weight that has most.",
        SIMPLE,
    ),
    (
        "singular_entropy",
        "1",
        "Entropy of the singular values over the log of their number, of the weight that has "
        "least; 1 is flat.",
        SIMPLE,
    ),
    (
        "ht_sr_alpha",
        "1",
        "Exponent of the power law that fits the tail of a weight's spectrum best, lower quartile.",
        "Martin and Mahoney, arXiv:1810.01075",
    ),
    (
        "dw_spectral_entropy",
        "1",
        "Effective rank of the change of Q and K weights within `mechanisms.distance` steps, lower "
        "quartile; append a layer for its mean: `.3`.",
        "exp H(s^2 / sum s^2), arXiv:2606.28116",
    ),
    (
        "qk_d2_spectral_entropy",
        "1",
        "Effective rank of the first-order change of a head's Q'K, dQ'K + Q'dK, lower quartile; "
        "append a layer for its mean: `.3`.",
        "exp H(s^2 / sum s^2), arXiv:2606.28116",
    ),
    (
        "qk_d3_spectral_entropy",
        "1",
        "The same of its second-order change, dQ'dK.",
        "exp H(s^2 / sum s^2), arXiv:2606.28116",
    ),
    ("qk_d2_norm", "1", "Norm of the first-order change, upper quartile over heads.", SIMPLE),
    ("qk_d3_ratio", "1", "Norm of the second-order change over it, upper quartile.", SIMPLE),
    *(
        (
            f"{name}_band",
            "1",
            f"Distance of {name} to the run that `mechanisms.reference` names, in spreads of it.",
            SIMPLE,
        )
        for name in (
            *("dw_spectral_entropy", "qk_d2_spectral_entropy", "qk_d3_spectral_entropy"),
            *("spectral_radius", "ht_sr_alpha"),
        )
    ),
    (
        "router_similarity_max",
        "1",
        "router_weight_similarity of the router that has most, at a pair of copies; append a "
        "router for its own: `.3`.",
        "(E |mean w/|w||^2 - 1) / (E - 1), arXiv:2606.28116",
    ),
    (
        "router_conditioning_max",
        "1",
        "router_conditioning of the router that has most, likewise.",
        "max |w - mean w| / |mean w|, arXiv:2606.28116",
    ),
    ("router_conditioning_min", "1", "The same of the router that has least.", SIMPLE),
    # data
    (
        "batch_new_share",
        "%",
        "Share of the newest 32 batches that are none of the 32 before each, by fingerprints.",
        SIMPLE,
    ),
    (
        "source_mix_share",
        "%",
        "Share of one source in the tokens, of texts in the bytes; append its name: `.web`.",
        SIMPLE,
    ),
    (
        "source_mix_shift",
        "%",
        "Largest relative change of a source's share to the baseline's that 4 standard deviations "
        "over documents do not explain; 0 for none.",
        SIMPLE,
    ),
    ("language_share", "%", "The same of a language; append its code: `.de`.", "CLD2"),
    ("language_shift", "%", "The same change of a language's share.", SIMPLE),
    (
        "filter_reject_rate",
        "%",
        "Documents that a filter of the pipeline dropped; append its name: `.length`.",
        SIMPLE,
    ),
    ("filter_reject_shift", "%", "Largest relative change of such a rate, beyond chance.", SIMPLE),
    (
        "bytes_per_token",
        "bytes",
        "Mean UTF-8 bytes a token; append a source for its mean: `.web`.",
        SIMPLE,
    ),
    (
        "bytes_per_token_outside",
        "%",
        "Documents of a source, the one that fares worst, beyond 99.8 % of those of the baseline, "
        "less what chance explains.",
        SIMPLE,
    ),
    (
        "doc_zlib_outside",
        "%",
        "The same by how well a document compresses, of all sources.",
        SIMPLE,
    ),
    (
        "junk_rate",
        "%",
        "Documents of which control and replacement characters are more than 1 %.",
        SIMPLE,
    ),
    ("seq_len_p50", "tokens", "Median length of a document.", SIMPLE),
    ("seq_len_p95", "tokens", "Length that 5 % of the documents exceed.", SIMPLE),
    ("doc_bytes_p50", "bytes", "Median size of a text.", SIMPLE),
    ("doc_bytes_p95", "bytes", "Size that 5 % of the texts exceed.", SIMPLE),
    ("seq_len_shift", "%", "Largest relative change of these, beyond chance.", SIMPLE),
    ("pad_fraction", "%", "Padding over all tokens.", SIMPLE),
    ("pad_shift", "points", "Change of pad_fraction to the baseline.", SIMPLE),
    (
        "token_kl_drift",
        "nat",
        "KL of the token histogram to the baseline's, less the bias of their sizes.",
        "Miller and Madow",
    ),
    (
        "token_kl_excess",
        "1",
        "token_kl_drift over that between two halves of the baseline, at least 0.002 nat.",
        SIMPLE,
    ),
    ("exact_dup_rate", "%", "Documents that are copies of an earlier one.", "XXH3, 128 bits"),
    (
        "near_dup_rate",
        "%",
        "Documents that are copies or near copies of an earlier one.",
        "Jaccard of 5-grams of 0.8 or more, arXiv:2107.06499",
    ),
    ("near_dup_growth", "1", "near_dup_rate over the baseline's; 1 within chance.", SIMPLE),
    ("dup_cluster_max", "documents", "Size of the largest set of near copies.", SIMPLE),
    (
        "train_val_overlap",
        "%",
        "Held-out documents with a copy or near copy in the training data.",
        "Jaccard of 5-grams of 0.8 or more, arXiv:2107.06499",
    ),
    ("train_val_overlap_exact", "%", "Held-out documents with a copy in it.", "XXH3, 128 bits"),
    (
        "doc_repeat_hotspots",
        "documents",
        "Different documents of a sample that hold its commonest stretch of 200 bytes.",
        "suffix array, arXiv:2107.06499",
    ),
    ("doc_repeat_share", "%", "The same over the documents of the sample.", SIMPLE),
    (
        "data_toxicity_rate",
        "%",
        "Documents of a sample that the scorer of `--toxicity` gave 0.5 or more.",
        SIMPLE,
    ),
    ("data_toxicity_shift", "%", "Its relative growth to the baseline, beyond chance.", SIMPLE),
    (
        "pii_hit_rate",
        "%",
        "Documents of a sample with personal data of a kind: `.email`, `.phone`, `.card`, `.iban`, "
        "`.ssn`, `.key`, `.ipv4`.",
        "patterns with checksums and numbering plans",
    ),
    ("pii_secret_rate", "%", "The same of cards, IBANs, SSNs and keys together.", SIMPLE),
    (
        "pii_new_kinds",
        "kinds",
        "Kinds of these four that the data has and the baseline had not, beyond chance.",
        SIMPLE,
    ),
    ("pii_growth", "1", "Largest growth of a kind but ipv4, beyond chance; 1 for none.", SIMPLE),
    (
        "rtp_prompt_stats",
        "prompts",
        "Prompts of the set given, and those of 0.5 or more: `.count`, `.toxic`.",
        "RealToxicityPrompts",
    ),
    ("rtp_prompt_changes", "1", "1 where the set is not the baseline's, else 0.", SIMPLE),
    ("doc_count", "documents", "Documents of the training data.", SIMPLE),
    ("doc_loss", "%", "How many fewer than in the baseline; negative for more.", SIMPLE),
    ("damaged_rate", "%", "Records that cannot be read, over all.", SIMPLE),
    ("unreadable_files", "files", "Files of which nothing can be read.", SIMPLE),
    # ranks
    (
        "job_loss",
        "loss",
        "Mean of train_loss_raw over ranks, weighted with their targets, in the newest step that "
        "all ranks have ended: mostly the one before.",
        SIMPLE,
    ),
    ("job_tokens", "tokens", "Targets of a step on all ranks, each batch once.", SIMPLE),
    (
        "job_grad_norm",
        "1",
        "2-norm of all gradients of the job: of shards the root of the sum of squares of all "
        "ranks' grad_norm_share, of replicas the norm that all agree on.",
        SIMPLE,
    ),
    ("loss_dispersion", "loss", "Standard deviation of train_loss_raw over ranks.", SIMPLE),
    (
        "loss_outlier_rank",
        "1",
        "The rank whose loss is furthest from the median; of two, the higher.",
        SIMPLE,
    ),
    ("batch_dispersion", "nat", "Standard deviation of batch_token_entropy over ranks.", SIMPLE),
    ("rank_probe_dispersion", "nat", "The same on one identical batch: 0 in a sound run.", SIMPLE),
    (
        "param_digest_mismatch",
        "1",
        "Runs of replicated weights whose checksums differ.",
        "BLOOM-176B chronicles",
    ),
    (
        "param_digest_rank",
        "1",
        "The lowest rank whose checksums are not those of most ranks; between two, that beside the "
        "lowest. Absent where all are the same.",
        SIMPLE,
    ),
    (
        "skip_mismatch",
        "ranks",
        "Ranks with the same gradients that skipped an update which most of them made, or the "
        "reverse: their weights are apart from then on.",
        SIMPLE,
    ),
    (
        "skip_mismatch_rank",
        "1",
        "The lowest of these ranks; between two, the one that skipped.",
        SIMPLE,
    ),
    (
        "job_ranks",
        "ranks",
        "Ranks whose numbers are in this frame of the job: means, sums and norms over ranks.",
        SIMPLE,
    ),
    (
        "nonfinite_rank",
        "1",
        "The lowest rank whose own loss or norm is NaN or infinite; absent where all are finite.",
        SIMPLE,
    ),
    (
        "grad_direction_consistency",
        "1",
        "Mean pairwise cosine of the ranks' own gradients.",
        SIMPLE,
    ),
    (
        "straggler_ratio",
        "1",
        "Step time over what it were if the slowest rank were like the median one, by what each "
        "does outside collectives and backward; medians of 16 steps.",
        "NVIDIA Resiliency Extension",
    ),
    ("straggler_rank", "1", "The rank that straggler_ratio refers to.", SIMPLE),
    (
        "straggler_part",
        "1",
        "What that rank is slow at: 0 its input, 1 forward and optimizer, 2 the rest of its code.",
        SIMPLE,
    ),
    # compute and hardware
    (
        "compute_time_frac",
        "%",
        "Time in forward, backward and optimizer over step time, without collectives, of 10 steps; "
        "absent where a device computes: there gpu_util is measured.",
        SIMPLE,
    ),
    (
        "train_time_linearity",
        "%",
        "Time of the newest half hour, 4096 steps at most, that the median step does not explain; "
        "without steps in which the job evaluated or saved, every 128 steps.",
        SIMPLE,
    ),
    ("gpu_util", "%", "Share of time with a kernel running.", "NVML"),
    ("gpu_mem_used", "%", "Device memory in use.", "NVML"),
    ("gpu_temperature", "C", "Temperature of the device.", "NVML"),
    ("gpu_power", "W", "Power draw of the device.", "NVML"),
    ("gpu_ecc_errors", "1", "Uncorrected ECC errors since boot.", "NVML"),
    ("gpu_xid_errors", "1", "XID events since the start.", "NVML"),
    ("host_mem_used", "%", "Host memory in use.", "psutil"),
    (
        "host_cpu_wait",
        "%",
        "Time in which a main thread of the job, the one that fares worst, was ready and had no "
        "CPU, as far as other processes had it.",
        "psutil, /proc/PID/schedstat",
    ),
    (
        "host_mem_growth",
        "bytes/h",
        "Lower bound of the growth of the job's own memory, less "
        "shared and file pages; see supervise/runtime/hardware.py.",
        "psutil",
    ),
    (
        "disk_free",
        "%",
        "Free space where checkpoints, the job and the record of the run are: the least.",
        "psutil",
    ),
    ("open_files", "1", "Open file descriptors of the job.", "psutil"),
    # runs, checkpoints, logs
    (
        "restart_rate",
        "1/day",
        "Starts of the job, or of its ranks by a launcher, in the place of one that did not end "
        "well: those of the last hour, a day. Absent before the first.",
        SIMPLE,
    ),
    (
        "error_event_rate",
        "1/h",
        "Errors that ended a rank or a thread in the last hour, one of a class a minute; append "
        "the class: `.cuda-oom`. Absent before the first.",
        "L4",
    ),
    ("metrics_ingest_lag", "s", "Age of a frame when it is read.", SIMPLE),
    (
        "heartbeat_missing",
        "ranks",
        "Ranks that ran no hook for 30 s and 8 of their longest steps while another one steps.",
        SIMPLE,
    ),
    (
        "checkpoint_ok",
        "1",
        "1 when a checkpoint was verified, 0 when it is bad.",
        "the checkpoint guard",
    ),
    (
        "checkpoint_size",
        "bytes",
        "Bytes of the tensors in a verified checkpoint of the job.",
        "the checkpoint guard",
    ),
)

METRICS = tuple(MetricSpec(*row) for row in _ROWS)

# Of training data, by `supervise data check`.
BUILD = (
    *("source_mix_share", "source_mix_shift", "language_share", "language_shift"),
    *("filter_reject_rate", "filter_reject_shift", "bytes_per_token", "bytes_per_token_outside"),
    *("doc_zlib_outside", "junk_rate", "seq_len_p50", "seq_len_p95", "doc_bytes_p50"),
    *("doc_bytes_p95", "seq_len_shift", "pad_fraction", "pad_shift", "token_kl_drift"),
    *("token_kl_excess", "exact_dup_rate", "near_dup_rate", "near_dup_growth", "dup_cluster_max"),
    *("train_val_overlap", "train_val_overlap_exact", "doc_repeat_hotspots", "doc_repeat_share"),
    *("data_toxicity_rate", "data_toxicity_shift", "pii_hit_rate", "pii_secret_rate"),
    *("pii_new_kinds", "pii_growth", "rtp_prompt_stats", "rtp_prompt_changes"),
    *("doc_count", "doc_loss", "damaged_rate", "unreadable_files"),
)

# Of the model in a checkpoint, beside the job.
CHECKPOINT = (
    *("checkpoint_unknown", "checkpoint_proved", "checkpoint_parts_lost"),
    *("checkpoint_probe_loss", "checkpoint_probe_ppl", "checkpoint_entropy"),
    *("checkpoint_kl_to_prev", "checkpoint_top_agreement", "curvature_trace_est"),
    *("checkpoint_val_loss", "checkpoint_val_ppl", "checkpoint_val_rise"),
    *("checkpoint_val_rise_z", "zlib_ratio", "codec_score", "memorization_rate"),
    *("microbench_fall_z", "rtp_toxicity_prob", "rtp_toxicity_rise_z"),
)
# Measured there, too, where the job does not report its own.
ALSO_OF_CHECKPOINTS = ("eval_artifact_hash", "microbench_score")
# Of a pinned batch, at savepoints.
PROBE_BATCH = ("fixed_probe_loss", "logit_entropy_probe", "output_kl_to_prev", "topk_mass_probe")
# Of weights of attention, beside the job.
SPECTRA = (
    *("dw_spectral_entropy", "qk_d2_spectral_entropy", "qk_d3_spectral_entropy"),
    *("qk_d2_norm", "qk_d3_ratio", "singular_entropy", "spectral_radius", "ht_sr_alpha"),
    *("router_similarity_max", "router_conditioning_max", "router_conditioning_min"),
)


def explain_unmeasured(metric: str, policy: Policy) -> str:
    """Return what a policy lacks so that anything measures a metric, "" where it may come."""
    spec = spec_of(metric)
    name = metric if spec is None else spec.id
    if name in CHECKPOINT and (policy.job.evaluate is None or policy.job.evaluate.every is None):
        return "add job: {evaluate: {every: checkpoint}}"
    if name.removesuffix("_band") in SPECTRA and policy.mechanisms is None:
        return "add mechanisms: {}"
    if name in PROBE_BATCH and policy.savepoints is None:
        return "add savepoints: {every: 25, keep: 4}"
    if name in PROBE_BATCH and not policy.job.probe_batch:
        return "add job: {probe_batch: true}"
    return ""


@cache
def measured_metrics() -> Mapping[str, MetricSpec]:
    """Return what the collectors measure, by id, in the order of their names."""
    return {spec.id: spec for spec in collectors.metric_specs()}


@cache
def all_metrics() -> Mapping[str, MetricSpec]:
    """Return every metric that has a standard id: measured ones first."""
    return {**measured_metrics(), **{spec.id: spec for spec in METRICS}}


def is_known(metric: str) -> bool:
    """Return whether the id is a standard one, or one member of such a family."""
    return spec_of(metric) is not None


def spec_of(metric: str) -> MetricSpec | None:
    """Return the spec of an id: `learning_rate.3` is a `learning_rate.<i>`.

    A metric of the probe has the members that its spec lists. One that a job reports may have
    others: `spectral_radius.head`.
    """
    base, spec = metric, all_metrics().get(metric)
    while spec is None and "." in base:
        base = base.rpartition(".")[0]
        family = all_metrics().get(f"{base}.<i>")
        spec = family or all_metrics().get(base)
        member = metric[len(base) + 1 :]
        if family is not None and not (member.isdecimal() or f"`.{member}`" in family.meaning):
            return None
    if spec is None or metric in all_metrics() or spec.id.endswith(".<i>"):
        return spec
    return spec if spec.id not in measured_metrics() or "append" in spec.meaning else None


def similar_ids(metric: str) -> list[str]:
    """Return the candidates for a near miss: ids that contain the text, else all."""
    return [name for name in all_metrics() if metric in name] or list(all_metrics())


def suggest_metric(metric: str, choices: Collection[str] | None = None) -> str | None:
    """Return "did you mean 'train_loss' or 'train_loss_raw'?" for `loss`, None for no idea.

    Names of other programs come first (`recordings`), then misspellings.

    Args:
        choices: the ids to choose from; None for all standard ones.
    """
    ids = all_metrics() if choices is None else choices
    matches = [name for name in _of_others(recordings.column_key(metric)) if name in ids]
    if not matches:
        candidates = similar_ids(metric) if choices is None else [*choices]
        matches = difflib.get_close_matches(metric, candidates, n=1, cutoff=0.7)
    return f"did you mean {' or '.join(map(repr, matches))}?" if matches else None


def _of_others(name: str) -> tuple[str, ...]:
    for prefix in ("", "train/", "training/", "metrics/"):
        plain = name.removeprefix(prefix)
        for metric, names in recordings.COLUMN_NAMES.items():
            if plain in names:
                return ("train_loss", metric) if metric == "train_loss_raw" else (metric,)
    return ()


# The same fact under another id, which a shipped rule reads.
JUDGED_AS: Mapping[str, tuple[str, ...]] = {
    "adam_rms_ratio": ("update_norm", "update_to_weight"),
    "attn_logit_absmean": ("max_attn_logit",),
    "ht_sr_alpha": ("ht_sr_alpha_band",),
    "layer_weight_std": ("layer_swing",),
    "layer_weight_std.<i>": ("layer_swing",),
    "qk_d2_norm": ("qk_d3_ratio",),
    "qk_d2_spectral_entropy": ("qk_d2_spectral_entropy_band",),
    "qk_d3_spectral_entropy": ("qk_d3_spectral_entropy_band",),
    "comm_time": ("comm_time_frac",),
    "gpu_mem_allocated": ("gpu_mem_used",),
    "gpu_mem_reserved": ("gpu_mem_used",),
    "grad_sketch.<i>": ("grad_direction_consistency",),
    "grad_norm_share": ("grad_global_norm",),
    "grad_spike_score": ("grad_global_norm",),
    "job_grad_norm": ("grad_global_norm",),
    "job_loss": ("train_loss_raw",),
    "job_tokens": ("tokens_per_update",),
    "input_time": ("dataloader_stall_frac",),
    "nan_inf_events": ("train_loss_raw", "grad_global_norm", "update_norm"),
    "overflow_rate": ("overflow",),
    "param_digest.<i>": ("param_digest_mismatch",),
    "probe_self_time": ("probe_overhead_frac",),
    "source_mix_share": ("source_mix_shift",),
    "language_share": ("language_shift",),
    "filter_reject_rate": ("filter_reject_shift",),
    "bytes_per_token": ("bytes_per_token_outside",),
    **dict.fromkeys(
        ("seq_len_p50", "seq_len_p95", "doc_bytes_p50", "doc_bytes_p95"), ("seq_len_shift",)
    ),
    "pad_fraction": ("pad_shift",),
    "batch_seq_len_p95": ("batch_seq_len_p50",),
    "token_kl_drift": ("token_kl_excess",),
    "exact_dup_rate": ("near_dup_rate",),
    "data_toxicity_rate": ("data_toxicity_shift",),
    "pii_hit_rate": ("pii_new_kinds", "pii_growth"),
    "rtp_prompt_stats": ("rtp_prompt_changes",),
    "doc_count": ("doc_loss",),
    "checkpoint_probe_loss": ("checkpoint_val_rise",),
    "checkpoint_probe_ppl": ("checkpoint_val_rise",),
    "checkpoint_top_agreement": ("checkpoint_kl_to_prev",),
    "checkpoint_val_loss": ("checkpoint_val_rise",),
    "checkpoint_val_ppl": ("checkpoint_val_rise",),
    "skipped_updates": ("skip_reason", "overflow"),
    "slice_val_loss": ("slice_val_shift",),
    "spectral_radius": ("spectral_radius_band",),
    "spike_count": ("spike_score",),
    "tokens_applied": ("tokens_seen", "steps_seen"),
    "train_loss": ("train_loss_raw",),
    "train_loss_ema": ("train_loss_raw",),
    "train_ppl": ("train_loss_raw",),
    "update_square_share": ("update_norm",),
    "weight_square_share": ("update_to_weight",),
}
_GROUPS = (
    (
        "Context for reports and runbooks; no healthy range of its own.",
        "backward_time batch_copies batch_offset batch_shard clip_bound clip_threshold epoch"
        " forward_time gpu_alloc_retries gradients_zeroed job_ranks loss_outlier_rank lr_hold"
        " lr_rewarm nonfinite_rank open_files param_digest_rank optimizer_time other_time"
        " skip_mismatch_rank straggler_part straggler_rank",
    ),
    (
        "Healthy changes of the data move it; it is asked before a loss has weights taken back.",
        "batch_token_drift",
    ),
    (
        "Nothing to mend in the job: pieces of the probe that are too dear go off by themselves,"
        " and other processes have CPUs of theirs; the status and the end of a run have it.",
        "host_cpu_wait probe_overhead_frac",
    ),
    (
        "Says where a trouble is, which the whole tells.",
        "attn_entropy_min grad_global_norm.<i> max_attn_logit.<i> max_attn_logit_head"
        " residual_rms.<i> residual_rms_p50.<i> residual_rms_p99.<i> router_conditioning_max"
        " router_token_entropy.<i> update_to_weight.<i>",
    ),
    (
        "Needs one batch on all ranks, which takes the job's help; their weights are compared.",
        "rank_probe_dispersion",
    ),
)

ABSENCE_REASONS = {
    metric: f"Judged as {' and '.join(metric_ids)}." for metric, metric_ids in JUDGED_AS.items()
} | {metric: reason for reason, ids in _GROUPS for metric in ids.split()}
