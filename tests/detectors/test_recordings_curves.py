"""Sums and curves on recorded runs: quiet on healthy ones, and what the loss's own past hides.

The recordings are data only and are not part of the project: `SUPERVISE_DATA` says where they are.
The faulted runs branch at step 800 from the run of seed 0, so the curves here are of seed 1.
"""

from __future__ import annotations

import csv
import gzip
import os
from functools import cache
from pathlib import Path

import pytest

from supervise.cli import _reference as reference
from supervise.core.model.decisions import BREACH
from supervise.core.model.interfaces import NOTE
from supervise.detectors.band import Band
from supervise.detectors.collapse import Collapse
from supervise.detectors.cusum import Cusum

DATA = Path(os.environ.get("SUPERVISE_DATA", Path(__file__).parents[2] / "../shared/data"))
FAULTS = DATA / "faults"
HEALTHY = ("healthy_s0", "healthy_s1", "healthy_b3_s0")
FAULT_AT = 800

pytestmark = pytest.mark.skipif(
    not FAULTS.is_dir(), reason=f"no recordings at {FAULTS}: set SUPERVISE_DATA"
)


@cache
def _series(run, column):
    with gzip.open(FAULTS / f"{run}.csv.gz", "rt") as lines:
        return [float(row[column]) if row[column] else None for row in csv.DictReader(lines)]


def _first(detector, run):
    """Return the steps from the fault to the first breach, None if there is none."""
    watch = detector.start()
    for step, value in enumerate(_series(run, detector.metric)):
        if watch.feed(value, step) & ~NOTE == BREACH:
            return step - FAULT_AT
    return None


def _recorded(runs, column):
    return [
        reference.Series(run, list(range(len(_series(run, column)))), _series(run, column))
        for run in runs
    ]


@cache
def _band(*runs, column="loss", log=False):
    recorded = _recorded(runs, column)
    knots = reference.band(recorded, reference.grid(recorded, None), 20, log)
    return Band(column, tuple(knots), transform="log" if log else "none", smooth=20, for_=3)


SUM = Cusum("loss", k=1.0, h=8.0, clear=2.0)


@pytest.mark.parametrize("run", HEALTHY)
def test_a_sum_over_the_loss_is_quiet_on_healthy_runs(run):
    """At the defaults too."""
    assert _first(SUM, run) is None
    assert _first(Cusum("loss"), run) is None


@pytest.mark.parametrize(
    ("run", "within"),
    [("data_rot_s0", 30), ("lr3_s0", 30), ("lr_ramp_s0", 150), ("overflow_s0", 150)],
)
def test_a_sum_sees_what_never_trips_a_spike_detector(run, within):
    """Rotting data, tripled and ramped learning rates, an overflow storm: in the loss alone."""
    assert _first(SUM, run) in range(within)


@pytest.mark.parametrize(("column", "log"), [("loss", False), ("tok_entropy", False)])
def test_a_band_of_one_seed_holds_another(column, log):
    """Six spreads on three means of twenty in a row, from the first step to the last."""
    assert _first(_band("healthy_s1", column=column, log=log), "healthy_s0") is None
    assert _first(_band("healthy_s0", column=column, log=log), "healthy_s1") is None


@pytest.mark.parametrize(
    ("run", "within"),
    [
        ("data_rot_s0", 30),
        ("lr3_s0", 25),
        ("lr_ramp_s0", 140),
        ("overflow_s0", 130),
        ("label_shuffle_inf_s0", 10),
        ("qk_grow_s0", 600),
    ],
)
def test_a_band_sees_all_that_the_own_past_hides(run, within):
    """Growing Q and K only when the loss departs, after 340 to 370 steps."""
    assert _first(_band("healthy_s1"), run) in range(within)


def test_harmless_faults_stay_inside():
    """A lone clipped gradient, a backward bias of 5 %."""
    for run in ("bitflip_s0", "bias05_attn_s0", "adam_reset_s0"):
        assert _first(_band("healthy_s0", "healthy_s1"), run) is None


def test_a_shared_curve_needs_two_runs_and_then_holds_both():
    """Aligned before the fault; 2 % of the training is 40 steps of the delay."""
    recorded = _recorded(("healthy_s0", "healthy_s1"), "loss")
    align = (0.2, 0.4)
    knots = reference.collapse(recorded, reference.grid(recorded, None), 100, 2000, align)
    shared = Collapse("loss", tuple(knots), 2000, align=align)

    assert shared.check() == []
    assert [_first(shared, run) for run in ("healthy_s0", "healthy_s1")] == [None, None]
    assert _first(shared, "data_rot_s0") in range(80)
    assert _first(shared, "lr_ramp_s0") in range(160)
    assert _first(shared, "overflow_s0") in range(160)
    assert _first(shared, "bitflip_s0") is None
