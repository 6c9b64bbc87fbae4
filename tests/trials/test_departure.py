"""When a loss leaves the band of its healthy control, and what is lost against it."""

from __future__ import annotations

import math
import random

import pytest

from supervise.trials import loss_departure, lost_steps, moved_metrics, spread_of

ONSET, END = 200, 400


def healthy(seed=0, noise=0.05):
    """Return a falling loss with noise of its batches."""
    rng = random.Random(seed)
    return {s: 2.0 + 3.0 / (1.0 + s / 20.0) + rng.gauss(0.0, noise) for s in range(END)}


def with_fault(control, change):
    return {s: v + (change(s - ONSET) if s >= ONSET else 0.0) for s, v in control.items()}


def test_a_spread_is_that_of_the_noise_and_not_of_the_trend():
    assert spread_of(healthy(), ONSET) == pytest.approx(0.05, rel=0.3)
    assert spread_of(healthy(), 30) == pytest.approx(0.05, rel=1.0), "in a steep fall"
    assert math.isnan(spread_of(healthy(), 5)), "too few"


@pytest.mark.parametrize(
    ("change", "step"),
    [
        (lambda after: 0.0, None),
        (lambda after: 0.06, None),  # within 4 spreads of a median of 20
        (lambda after: 1.0 if after == 7 else 0.0, 7),
        (lambda after: -1.0 if after == 7 else 0.0, 7),  # a loss that falls has left it, too
        (lambda after: 0.2, 19),  # a level, once there are 20 of it
        (lambda after: 0.01 * after, 20),
        (lambda after: math.nan if after == 3 else 0.0, 3),
    ],
)
def test_a_loss_leaves_its_band(change, step):
    control = healthy()

    found = loss_departure(with_fault(control, change), control, ONSET)

    if step is None:
        assert found is None
    else:
        assert found is not None and abs(found.step - ONSET - step) <= 3


def test_another_run_of_the_same_program_stays_in_the_band():
    for seed in range(20):
        assert loss_departure(healthy(seed + 1), healthy(0), ONSET) is None


def test_what_is_lost_is_the_sum_over_the_steps_that_both_have():
    control = healthy()
    run = with_fault(control, lambda after: 0.5 if after < 10 else 0.0)

    assert lost_steps(run, control, ONSET) == pytest.approx(5.0)
    assert lost_steps({**run, END: 9.0}, control, ONSET) == pytest.approx(5.0)
    assert lost_steps({**run, 300: math.nan}, control, ONSET) == math.inf
    assert lost_steps(control, control, ONSET) == 0.0


def test_a_metric_that_must_stand_still_is_compared_with_its_twin():
    rate = {s: 1e-3 * min(1.0, (s + 1) / 50) for s in range(END)}
    tokens = dict.fromkeys(range(END), 768.0)
    falling = {s: 1e-3 * (1.0 + math.cos(math.pi * s / END)) for s in range(END)}

    assert moved_metrics(rate, rate, ONSET, END) is None
    assert moved_metrics({**rate, 250: 2e-3}, rate, ONSET, END) == 250
    assert moved_metrics({**tokens, 201: 767.0}, tokens, ONSET, END) == 201
    assert moved_metrics({**tokens, 150: 1.0, 390: 1.0}, tokens, ONSET, 380) is None
    assert moved_metrics(tokens, {ONSET: 1.0}, ONSET, END) is None, "nothing to compare with"
    doubled = {s: v * (2.0 if s == 250 else 1.0) for s, v in falling.items()}
    assert moved_metrics(doubled, falling, ONSET, END) == 250, "a schedule is no noise"


def test_steps_at_which_the_control_is_not_finite_tell_nothing():
    control = {**healthy(), 250: math.nan}
    run = {**healthy(), 250: math.nan, 260: 9.0}

    assert loss_departure(run, control, ONSET).step == 260
    assert lost_steps(run, control, ONSET) == pytest.approx(9.0 - control[260])
