"""Detectors on recorded runs: healthy ones, and ones with a fault injected at step 800.

The recordings are data only and are not part of the project: `SUPERVISE_DATA` says where they are.
What is asserted is what the shipped policies build on: acting rules that never fire on a healthy
run, and fire within steps of what does damage.
"""

from __future__ import annotations

import csv
import gzip
import os
from functools import cache
from pathlib import Path

import pytest

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.core.model.interfaces import NOTE
from supervise.detectors.cusum import Cusum
from supervise.detectors.level_shift import LevelShift
from supervise.detectors.ratio import Ratio
from supervise.detectors.robust_z import RobustZ
from supervise.detectors.sequence import Sequence
from supervise.detectors.trend import Trend

DATA = Path(os.environ.get("SUPERVISE_DATA", Path(__file__).parents[2] / "../shared/data"))
FAULTS = DATA / "faults"
HEALTHY = ("healthy_s0", "healthy_s1", "healthy_b3_s0")
FAULT_AT = 800

pytestmark = pytest.mark.skipif(
    not FAULTS.is_dir(), reason=f"no recordings at {FAULTS}: set SUPERVISE_DATA"
)


def _z(metric, gt, **fields):
    return RobustZ(metric, gt=gt, transform="log", **fields)


UPDATE = _z("update_norm", 8.0, clear=4.0, m_of_n=(2, 3))
LOSS = _z("loss", 6.0, clear=3.0, m_of_n=(3, 5))
GRAD = _z("grad_norm", 8.0, clear=4.0, m_of_n=(2, 3))
ACTING = [UPDATE, LOSS, GRAD, Ratio("update_norm", fast=4, slow=256, gt=2.0, clear=1.5)]


@cache
def _series(run, column):
    with gzip.open(FAULTS / f"{run}.csv.gz", "rt") as lines:
        rows = list(csv.DictReader(lines))
    return [float(row[column]) if row[column] else None for row in rows]


@cache
def _read(detector, run):
    watch = detector.start()
    return [watch.feed(x, step) & ~NOTE for step, x in enumerate(_series(run, detector.metric))]


def _coupled(coupling, parts, run):
    """Run detectors and what couples them; return the coupling's codes."""
    watches = [part.start() for part in parts]
    watch = coupling.start()
    codes = []
    for step, samples in enumerate(zip(*[_series(run, p.metric) for p in parts], strict=True)):
        for part, sample in zip(watches, samples, strict=True):
            part.feed(sample, step)
        codes.append(watch.feed([part.raw for part in watches], step) & ~NOTE)
    return codes


def _delay(codes, at=FAULT_AT):
    """Return the steps from the fault to the first breach; None if there is none."""
    return next((step - at for step in range(at, len(codes)) if codes[step] == BREACH), None)


@pytest.mark.parametrize("detector", ACTING, ids=lambda d: f"{type(d).__name__}-{d.metric}")
@pytest.mark.parametrize("run", HEALTHY)
def test_what_acts_is_silent_on_healthy_runs(run, detector):
    """Not one breach, warmup of the learning rate included."""
    assert BREACH not in _read(detector, run)


@pytest.mark.parametrize(
    ("run", "update", "loss"), [("lr10_s0", 1, 5), ("lr30_s0", 1, 3), ("adam_v0_s0", 1, 3)]
)
def test_a_jump_of_the_update_is_seen_before_the_loss_tells(run, update, loss):
    """The raw breach is in the very step of the fault; two of three make it a reading."""
    raw = _z("update_norm", 8.0)

    assert _delay(_read(raw, run)) == 0
    assert _delay(_read(UPDATE, run)) == update
    assert _delay(_read(LOSS, run)) == loss
    assert _delay(_read(ACTING[3], run)) == 0


def test_the_chain_of_gradient_update_loss_matches_what_runs_through_the_optimizer():
    """At lower thresholds than any of its stages alone could have; silent on healthy runs."""
    parts = [_z("grad_norm", 4.0), _z("update_norm", 3.0), _z("loss", 4.0)]
    chain = Sequence(("grad", "update", "loss"), within=8)

    for run in HEALTHY:
        assert BREACH not in _coupled(chain, parts, run)
    delays = {
        run: _delay(_coupled(chain, parts, run)) for run in ("lr10_s0", "lr30_s0", "adam_v0_s0")
    }
    assert delays == {"lr10_s0": 2, "lr30_s0": 1, "adam_v0_s0": 1}
    assert _delay(_coupled(chain, parts, "bitflip_s0")) is None


def test_a_slow_climb_is_seen_by_its_trend_alone():
    """Data rot never trips a spike detector."""
    climb = Trend("loss", window=320, slope_per_1k_gt=0.1)

    for run in HEALTHY:
        assert BREACH not in _read(climb, run)
    assert _delay(_read(LOSS, "data_rot_s0")) is None
    assert _delay(_read(climb, "data_rot_s0")) in range(200)


@pytest.mark.parametrize(
    ("run", "within"),
    [("data_rot_s0", 30), ("lr3_s0", 30), ("lr_ramp_s0", 150), ("overflow_s0", 150)],
)
def test_a_sum_sees_what_never_trips_a_spike_detector(run, within):
    """Rotting data, tripled and ramped learning rates, an overflow storm: in the loss alone."""
    drift = Cusum("loss", k=1.0, h=8.0, clear=2.0)

    for healthy in HEALTHY:
        assert BREACH not in _read(drift, healthy)
    assert _delay(_read(drift, run)) in range(within)


def _scar(run, trigger):
    """Return the verdict on the level after a trigger, and whether it was given up."""
    detector = LevelShift("loss", after="chain")
    watch = detector.start()
    for step, value in enumerate(_series(run, "loss")):
        code = watch.feed((value, BREACH if step == trigger else OK), step)
        if step >= trigger and (code & NOTE or code != UNKNOWN):
            return code & ~NOTE
    return None


@pytest.mark.parametrize("run", HEALTHY)
def test_a_healthy_run_has_no_scar_wherever_one_looks(run):
    """Triggers every 20 steps, from step 120 on, where the curve is steepest."""
    verdicts = [_scar(run, trigger) for trigger in range(120, 1200, 20)]

    assert BREACH not in verdicts
    assert OK in verdicts


@pytest.mark.parametrize(
    "run", ["lr10_s0", "lr30_s0", "adam_v0_s0", "adam_v0_b3_s0", "data_rot_s0"]
)
def test_lasting_damage_is_a_scar(run):
    """Above 0.15 nats, 140 steps after the fault."""
    assert _scar(run, FAULT_AT + 2) == BREACH
