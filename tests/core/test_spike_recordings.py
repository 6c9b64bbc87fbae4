"""The classes on recorded runs: what the labels and the faults' own README say of them.

The recordings are no part of the project: `SUPERVISE_DATA` says where they are. The classifier sees
the rows as the engine would, with the first breach where the label or the injection is.
"""

from __future__ import annotations

import csv
import gzip
import os
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from supervise.core import Evidence, band_of, judge_spike
from supervise.core.model import SpikeClass

DATA = Path(os.environ.get("SUPERVISE_DATA", Path(__file__).parents[2] / "../shared/data"))
MIXTRAL = "mixtral_8x7b_alltoall_tp2pp4ep4_release__lts_dgx_a100"
NAMES = {
    "loss": "train_loss_raw",
    "grad_norm": "grad_global_norm",
    "update_norm": "update_norm",
    "lr": "learning_rate",
    "val_loss": "val_loss",
    "tok_entropy": "batch_token_entropy",
    "skipped": "update_skipped",
}
FAULT_AT = 800

pytestmark = pytest.mark.skipif(
    not (DATA / "faults").is_dir(), reason=f"no recordings at {DATA}: set SUPERVISE_DATA"
)


@cache
def fault(run):
    """Return the rows of a faulted run, `{metric: value}`."""
    with gzip.open(DATA / "faults" / f"{run}.csv.gz", "rt") as lines:
        return [
            {name: float(row[column]) for column, name in NAMES.items() if row[column]}
            for row in csv.DictReader(lines)
        ]


@cache
def mixtral():
    """Return `(step, loss)` of the run whose spikes came back, and the labelled steps."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(DATA / "logs/megatron" / f"{MIXTRAL}.parquet").to_pydict()
    with (DATA / "logs/incidents.csv").open() as lines:
        labels = [
            int(row["step_start"])
            for row in csv.DictReader(lines)
            if MIXTRAL in row["run"] and row["kind"] == "loss_spike_recovered"
        ]
    return list(zip(table["step"], table["lm_loss"], strict=True)), labels


def series(rows, metric):
    return [(step, row[metric]) for step, row in enumerate(rows) if metric in row]


def classify(run, onset):
    """Classify as of 400 rows after the onset."""
    rows = fault(run)[: onset + 400]
    norms = {}
    for metric in ("grad_global_norm", "update_norm"):
        points = series(rows, metric)
        before = median([v for step, v in points if onset - 266 <= step < onset - 10])
        norms[metric] = (before, [v for step, v in points if step >= onset])
    losses = series(rows, "train_loss_raw")
    after = [point for point in losses if point[0] >= onset]
    return judge_spike(
        Evidence(
            band_of(losses, onset),
            after,
            norms,
            {"val_loss": series(rows, "val_loss")},
            peak=max(loss for _, loss in after),
        )
    )


def test_every_labelled_spike_of_mixtral_is_recoverable():
    """8 to 109 % up for 1 to 3 logged rows; each came back within rows."""
    rows, labels = mixtral()
    assert len(labels) >= 6
    for label in labels:
        after = [point for point in rows if point[0] >= label][:100]
        case = Evidence(band_of(rows, label), after, peak=max(loss for _, loss in after))
        verdict = judge_spike(case)

        assert verdict.kind == SpikeClass.RECOVERABLE, f"{label}: {verdict.text}"
        assert verdict.questions.rejoined.step <= label + 60


@pytest.mark.parametrize("run", ["healthy_s0", "healthy_s1", "healthy_b3_s0"])
@pytest.mark.parametrize("onset", range(60, 1100, 130))
def test_a_quiet_place_is_in_its_band_whenever_one_looks(run, onset):
    """After 20, 60, 110 and 350 rows; a plateau is never seen where nothing happened."""
    losses = series(fault(run), "train_loss_raw")
    band = band_of(losses, onset)
    for frames in (20, 60, 110, 350):
        after = losses[onset : onset + frames]

        assert judge_spike(Evidence(band, after)).questions.rejoined.answer == "yes", frames
    assert all(loss <= band.limit_at(step) for step, loss in losses[onset : onset + 110])


@pytest.mark.parametrize(
    ("run", "onset", "kind"),
    [
        # Bad data for thirty steps: back 100 to 345 steps later.
        ("label_shuffle_s0", FAULT_AT, SpikeClass.RECOVERABLE),
        ("bad_random_s0", FAULT_AT, SpikeClass.RECOVERABLE),
        ("bad_repeat_s0", FAULT_AT, SpikeClass.RECOVERABLE),
        # A rate that stays wrong: the evaluation and the update norm stay up with the loss.
        ("lr30_s0", FAULT_AT, SpikeClass.STRUCTURAL),
        ("lr10_b3_s0", FAULT_AT + 1, SpikeClass.STRUCTURAL),
        # One that was too low before: the loss comes back, the update norm stays 5 times its past.
        ("lr10_s0", FAULT_AT, SpikeClass.SUSPECT),
        # Damage for good with calm norms.
        ("adam_v0_s0", FAULT_AT, SpikeClass.PLATEAU),
        ("label_shuffle_inf_s0", FAULT_AT, SpikeClass.PLATEAU),
    ],
)
def test_a_recorded_fault_has_the_class_of_its_label(run, onset, kind):
    verdict = classify(run, onset)

    assert verdict.kind == kind, verdict.text
