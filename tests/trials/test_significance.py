"""Quantiles against published tables, and the rate of false alarms on series that remember."""

from __future__ import annotations

import random

import pytest

from supervise import trials


def autoregressive(source: random.Random, count: int, memory: float, sd: float = 1.0):
    """Return a stationary AR(1) series with the standard deviation `sd`."""
    value, found = source.gauss(0.0, sd), []
    fresh = sd * (1.0 - memory * memory) ** 0.5
    for _ in range(count):
        value = memory * value + source.gauss(0.0, fresh)
        found.append(value)
    return found


def paired(values):
    return trials.Differences(range(len(values)), values, True, 1.0, 1.0, 0.0)


# Abramowitz and Stegun, table 26.10.
@pytest.mark.parametrize(
    ("p", "freedom", "expected"),
    [(0.975, 1, 12.706), (0.95, 2, 2.920), (0.995, 4, 4.604), (0.975, 120, 1.980)],
)
def test_student_quantile_is_that_of_the_tables(p, freedom, expected):
    assert trials.student_quantile(p, freedom) == pytest.approx(expected, abs=6e-4)
    assert trials.student_cdf(trials.student_quantile(p, freedom), freedom) == pytest.approx(
        p, abs=1e-12
    )


def test_looks_spend_alpha_and_no_more():
    levels = trials.look_levels((0.25, 0.5, 1.0), 0.05)

    assert sum(levels) == pytest.approx(0.05)
    assert levels == sorted(levels), "late looks get more"
    assert trials.spent_alpha(0.5, 0.05) == pytest.approx(0.00557, abs=1e-5)


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_autocorrelation_time_is_that_of_the_process(memory):
    found = trials.autocorrelation_time(autoregressive(random.Random(1), 20_000, memory))

    assert found == pytest.approx((1 + memory) / (1 - memory), rel=0.15)
    assert trials.autocorrelation_time([2.0] * 50) == trials.autocorrelation_time([]) == 1.0
    assert trials.autocorrelation_time([0.1 * n for n in range(50)]) == 1.0, "a line is no memory"


def test_blocks_are_whole_and_the_newest():
    assert trials.block_means([9.0, 1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert trials.successive_variance([5.0, 4.0, 3.0]) == pytest.approx(0.5)


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_false_alarms_stay_near_their_nominal_rate(memory):
    """Of 400 null pairs of 600 steps; the test of single steps has 31 % at a memory of 0.9."""
    source = random.Random(7)
    effects = [
        trials.estimate_difference([paired(autoregressive(source, 600, memory))], 0.05)
        for _ in range(400)
    ]
    judged = [effect for effect in effects if effect.basis == "blocks"]

    assert sum(effect.low > 0.0 for effect in judged) / 400 <= 0.09
    assert sum(effect.high < 0.0 for effect in judged) / 400 <= 0.09
    assert len(judged) > (380 if memory < 0.9 else 150), "the others are inconclusive"


def test_seeds_count_where_runs_drift_apart():
    """Offsets of whole runs, which no block of one run shows."""
    source = random.Random(3)

    def run():
        offset = source.gauss(0.0, 0.02)
        return paired([offset + source.gauss(0.0, 0.01) for _ in range(150)])

    alarms = {"seeds": 0, "calibrated": 0, "alone": 0}
    for _ in range(300):
        alarms["seeds"] += trials.estimate_difference([run() for _ in range(3)], 0.05).low > 0.0
        alarms["calibrated"] += (
            trials.estimate_difference([run()], 0.05, [run() for _ in range(4)]).low > 0.0
        )
        alarms["alone"] += trials.estimate_difference([run()], 0.05).low > 0.0

    assert alarms["seeds"] <= 27
    assert alarms["calibrated"] <= 27
    assert alarms["alone"] > 90, "one pair alone cannot know"


def test_too_few_blocks_give_a_rough_interval_or_none():
    assert trials.estimate_difference([paired([0.0] * 149)], 0.05).basis == "steps"
    source = random.Random(2)
    long = [
        trials.estimate_difference([paired(autoregressive(source, 300, 0.95))], 0.05)
        for _ in range(200)
    ]
    rough = [effect for effect in long if effect.basis == "steps"]

    assert len(rough) > 80
    assert sum(effect.low > 0.0 for effect in rough) / len(rough) <= 0.15
    none = trials.estimate_difference([paired([0.0, 1.0, 0.0])], 0.05)
    assert (none.basis, none.high) == ("insufficient", float("inf"))
