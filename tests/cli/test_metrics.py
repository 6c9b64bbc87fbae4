"""`supervise metrics`: every name has a meaning, and says who watches it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from supervise.catalog import ABSENCE_REASONS, measured_metrics
from tests.inputs.conftest import Company


def test_the_list_has_every_metric_once_with_its_unit(supervise):
    code, out, _ = supervise("metrics", "list", "--json")
    rows = json.loads(out)

    assert code == 0
    names = [row["id"] for row in rows]
    assert len(names) == len(set(names)) > 60
    assert all(row["unit"] and row["meaning"] and row["source"] for row in rows)
    by = {row["id"]: row["measured_by"] for row in rows}
    assert {name for name in by if by[name] == "probe"} == set(measured_metrics())
    assert {row["id"] for row in rows if row["measured"]} == {n for n in by if by[n] != "job"}
    assert by["spike_score"] == by["microbench_score"] == "supervisor"
    assert all(row["cost"] for row in rows)


def test_each_id_is_measured_judged_and_tested_or_says_why_not(supervise):
    """A reason that has become wrong is as bad as none. Scenarios of packs are tests too."""
    rows = json.loads(supervise("metrics", "list", "--json")[1])
    covered = {row["id"] for row in rows if row["measured"] and row["rules"]}
    here = Path(__file__).parents[2]
    texts = [*here.glob("tests/**/*.py"), *here.glob("policies/packs/*.yaml")]
    words = {word for path in texts for word in re.findall(r"[a-z0-9_]+", path.read_text("utf-8"))}

    assert {row["id"] for row in rows if row["not_covered"]} == {r["id"] for r in rows} - covered
    assert {row["id"] for row in rows} >= set(ABSENCE_REASONS)
    assert {row["id"].removesuffix(".<i>") for row in rows if row["measured"]} <= words


def test_what_the_supervisor_adds_to_frames_has_a_name_and_a_meaning(supervise):
    """Replicas, one of which skips alone."""
    one = {"train_loss_raw": 2.0, "step_time": 1.0, "other_time": 0.5, "grad_sketch.0": 1.0}
    one |= {"tokens_per_update": 8.0, "grad_norm_share": 1.0, "grad_global_norm": 2.0**0.5}
    one |= {"batch_token_entropy": 3.0, "param_digest.0": 1.0, "update_skipped": 0.0}
    company = Company(one, 2)
    company.step(one, one)
    found = company.step(one, {**one, "param_digest.0": 2.0, "update_skipped": 1.0})
    rows = json.loads(supervise("metrics", "list", "--json")[1])
    ours = {row["id"] for row in rows if row["measured_by"] == "supervisor"}
    assert len(found) == 14 and set(found) < ours


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("train_loss_raw", "loss_spike.loss_z: kind: robust_z"),
        ("train_loss_raw", "loss(t) -> grad(t) -> update(t)"),
        ("learning_rate.head", "no metric 'learning_rate.head'"),
        ("step_time.3", "no metric 'step_time.3'"),
        ("learning_rate.<i>", "rules:     frozen.empty, update_scale.rate_jump"),
        ("epoch", "reason:    Context for reports"),
        ("checkpoint_ok", "by the supervisor, beside the job"),
        ("max_attn_logit.3", "that of max_attn_logit: on a sampled step"),
        ("grad_global_norm.embedding", "by the probe"),
        ("source_mix_share.web", "of training data, by supervise data check"),
        ("rank_probe_dispersion", "no; the job must report it"),
    ],
)
def test_a_metric_is_explained_with_who_measures_it_and_the_detectors_that_read_it(
    supervise, metric, said
):
    code, out, err = supervise("metrics", "show", metric)

    assert (code, said in out + err) == (64 if said.startswith("no metric") else 0, True)
