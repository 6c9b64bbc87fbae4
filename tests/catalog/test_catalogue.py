"""The catalogue of what a training run can show: each id is measured, judged and tested, or listed.

The table has every id of the catalogue by its source. An id of the run, or of the training data,
needs a producer, a rule or one that is judged in its place, and a test that computes it in another
way; one of the data also a planted fault that its rule reports.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from supervise.catalog import JUDGED_AS, rules_judging
from supervise.cli import invoke
from supervise.data import FAULTS
from supervise_probe.faults import fault_classes

TESTS = Path(__file__).parents[1]

# Ids, and the file whose tests compute them independently, below tests/.
RUN = {
    "probe/live/test_estimates.py": "tokens_seen tokens_per_update tokens_per_sec update_norm",
    "probe/live/test_relaunch_counters.py": "steps_seen skipped_updates",
    "probe/live/test_table_a.py": (
        "train_loss_ema train_ppl lr_phase grad_global_norm grad_clip_rate update_to_weight"
        " opt_state_finite grad_spike_score layer_weight_std adam_rms_ratio overflow_rate"
    ),
    "probe/live/test_training_loops.py": "train_loss_raw",
    "probe/live/test_groups.py": "learning_rate",
    "probe/live/test_tools.py": "loss_scale update_clip_rate",
    "probe/live/test_noise.py": "grad_noise_scale gsnr grad_direction_consistency",
    "probe/live/test_attention.py": "max_attn_logit attn_entropy",
    "probe/live/test_activations.py": (
        "residual_rms activation_outlier_rate logz_mean token_entropy"
    ),
    "probe/live/test_probe_batch.py": (
        "logit_entropy_probe topk_mass_probe output_kl_to_prev fixed_probe_loss rerun_mismatch"
    ),
    "probe/live/test_routing.py": (
        "moe_drop_rate moe_util_entropy moe_load_balance_loss router_weight_similarity"
        " router_token_entropy"
    ),
    "probe/live/test_sampling.py": "router_conditioning",
    "probe/live/test_own_times.py": "step_time",
    "probe/live/test_utilization.py": "mfu dataloader_stall_frac comm_time_frac",
    "probe/live/test_evaluation.py": "val_loss train_val_gap",
    "probe/live/test_faults.py": "nan_inf_events guard_active",
    "probe/live/test_saves.py": "checkpoint_time",
    "probe/live/test_outliers.py": "skipped_bad_steps",
    "probe/live/test_batch_sanity.py": "batch_sanity shuffle_block_skew",
    "inputs/test_run_course.py": (
        "compute_time_frac train_time_linearity scaling_law_residual collapse_residual"
    ),
    "inputs/test_hardware.py": "gpu_util gpu_mem_used",
    "inputs/test_frame_enrichment.py": (
        "straggler_ratio restart_rate error_event_rate metrics_ingest_lag heartbeat_missing"
        " loss_dispersion param_digest_mismatch spike_score spike_count"
    ),
    "checkpoints/test_verification.py": "checkpoint_ok checkpoint_size",
    "matrix/test_libraries.py": "slice_val_loss",
    "offline/test_evaluation.py": (
        "curvature_trace_est eval_artifact_hash zlib_ratio codec_score memorization_rate"
    ),
    "offline/test_harness.py": "microbench_score rtp_toxicity_prob",
    "offline/test_mechanisms.py": (
        "dw_spectral_entropy qk_d2_spectral_entropy qk_d3_spectral_entropy qk_d2_norm"
        " singular_entropy spectral_radius ht_sr_alpha"
    ),
}
# Known by other names, of which each is measured and judged.
ALIASES = {
    "batch_sanity": (
        *("batch_token_entropy", "batch_unique_ratio", "batch_top1_share", "batch_ids_outside"),
    ),
    "moe_capacity_overflow": ("moe_drop_rate",),
    # One batch on all ranks differs where their weights do, or a device that does not repeat.
    "rank_probe_dispersion": ("param_digest_mismatch", "rerun_mismatch"),
    "val_ppl": ("val_loss",),
    "seq_len_p50_p95": ("seq_len_p50", "seq_len_p95"),
}
# What a batch of the run shows of these, too, and the file that tests it.
IN_BATCHES = {
    "probe/live/test_batch_sanity.py": (
        "pad_fraction:batch_pad_fraction seq_len_p50_p95:batch_seq_len_p50"
        " seq_len_p50_p95:batch_seq_len_p95 token_kl_drift:batch_token_shift"
    ),
    "probe/live/test_shards.py": "source_mix_share:batch_source_shift",
    "inputs/test_run_course.py": "shuffle_block_skew:batch_new_share",
}
EXEMPT = {
    "norm_precursor_lag": "a number of an incident: what moved first, and when",
    "planned_event": "an input: the policy says it",
}
# Of the training data; and the fault of `supervise data drill` that its rule reports.
BUILD = {
    "data/test_numbers.py": (
        "source_mix_share:mix language_share:language filter_reject_rate:filter"
        " bytes_per_token:binary seq_len_p50_p95:truncate token_kl_drift near_dup_rate:dup"
        " train_val_overlap:leak doc_repeat_hotspots:repeat data_toxicity_rate:toxic"
        " pii_hit_rate:pii rtp_prompt_stats"
    ),
    "data/test_corpus.py": "pad_fraction",
}
DRILLS = dict(row.partition(":")[::2] for ids in BUILD.values() for row in ids.split())
TESTED = {metric: file for file, ids in RUN.items() for metric in ids.split()} | {
    row.partition(":")[0]: file for file, ids in BUILD.items() for row in ids.split()
}
OF_RUN = {*TESTED, *ALIASES}
# Faults of `supervise run --drill` whose rules the table of benchmarks/checkpoints.py has.
LIVE = (
    *("eval_mismatch", "weight_noise"),
    *(f"bad_checkpoint:how={how}" for how in ("noise", "optimizer", "scheduler", "rng")),
)
PACKS = TESTS.parent / "policies" / "packs"
# Of a checkpoint: the rule that a planted fault makes fire, in the test of the metric.
FIRING = {
    "eval_artifact_hash": "evaluation.artefacts",
    "zlib_ratio": "quality.known_windows",
    "codec_score": "quality.contaminated",
    "memorization_rate": "quality.memorized",
    "microbench_score": "quality.benchmark",
    "rtp_toxicity_prob": "quality.toxicity",
}


@dataclass(frozen=True)
class Coverage:
    """The ids that are measured, and those that a rule judges."""

    measured: frozenset[str]
    judged: frozenset[str]

    def lacks(self, metric: str) -> list[str]:
        """Return what an id lacks."""
        names = ALIASES.get(metric, (metric,))
        replaced = [other for name in names for other in JUDGED_AS.get(name, (name,))]
        lacking = []
        if not self.measured.issuperset(names):
            lacking.append("a producer")
        if not self.judged.intersection(names) and not self.judged.issuperset(replaced):
            lacking.append("a rule")
        if metric in TESTED and not is_tested(metric):
            lacking.append("its test")
        return lacking


def is_tested(metric: str) -> bool:
    """Return whether a test in the file named for it mentions the id, or what stands for it."""
    text = (TESTS / TESTED[metric]).read_text("utf-8")
    return all(re.search(rf"\b{name}\b", text) for name in ALIASES.get(metric, (metric,)))


@pytest.fixture
def covered(capsys: pytest.CaptureFixture[str]) -> Coverage:
    assert invoke(["metrics", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    return Coverage(
        frozenset(row["id"] for row in rows if row["measured"]),
        frozenset(row["id"] for row in rows if row["rules"]),
    )


def test_the_table_has_each_of_the_103_ids_once():
    assert len(OF_RUN) + len(EXEMPT) == 103 and not EXEMPT.keys() & OF_RUN
    assert sum(len(ids.split()) for ids in (RUN | BUILD).values()) == len(TESTED)


def test_each_id_of_the_run_is_measured_judged_and_tested(covered):
    assert {metric: lacks for metric in OF_RUN if (lacks := covered.lacks(metric))} == {}


def test_what_batches_of_a_run_show_of_its_data_is_measured_judged_and_tested(covered):
    for file, rows in IN_BATCHES.items():
        text = (TESTS / file).read_text("utf-8")
        for row in rows.split():
            metric, name = row.split(":")
            assert metric in OF_RUN and not covered.lacks(name), row
            assert re.search(rf"\b{name}\b", text), row


def test_the_rule_of_each_planted_fault_judges_the_metric_that_it_is_for():
    """By the metric itself, or by one that is judged in its place."""
    for metric, fault in DRILLS.items():
        names = ALIASES.get(metric, (metric,))
        readers = {other for name in names for other in (name, *JUDGED_AS.get(name, ()))}
        rule = f"data_build.{FAULTS[fault].rule}" if fault else None
        assert rule is None or any(rule in rules_judging(name) for name in readers), metric


def test_each_fault_of_the_committed_table_fired_the_rule_that_it_is_for():
    """In a live job, and in a corpus; the rule is one that exists, and the fault one of today."""
    text = (TESTS.parent / "benchmarks" / "checkpoints.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    struck = {row[0].split("`")[1]: row[1:] for row in rows if len(row) == 3 and "`" in row[0]}

    assert {*FAULTS, *LIVE} <= struck.keys()
    assert {name.partition(":")[0] for name in struck} <= {*FAULTS, *fault_classes()}
    for name, (rule, fired) in struck.items():
        pack, _, own = rule.partition(".")
        assert rule in fired.split(", "), name
        assert f"id: {own}," in (PACKS / f"{pack}.yaml").read_text("utf-8"), rule


def test_a_planted_fault_makes_the_rule_of_a_metric_of_checkpoints_fire():
    for metric, rule in FIRING.items():
        judged = "microbench_fall_z" if metric == "microbench_score" else metric
        assert rule in rules_judging(judged), metric
        text = (TESTS / TESTED[metric]).read_text("utf-8")
        pack, _, name = rule.partition(".")
        assert f'breaches("{pack}"' in text and f'"{name}"' in text, rule
