"""The band of a loss: its own trend, checked against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from supervise.core.analysis.loss_band import band_of, slope


def curve(steps, seed, noise=0.02):
    """A falling loss, 1.5 + 6 / sqrt(step), with Gaussian noise."""
    random = np.random.default_rng(seed)
    return [(int(t), float(1.5 + 6.0 / math.sqrt(t + 1) + noise * random.normal())) for t in steps]


def theil_sen(points):
    """Return the median of all pairs' slopes over ln(step + 1): the definition."""
    x = np.log(np.array([step for step, _ in points]) + 1.0)
    y = np.array([value for _, value in points])
    i, j = np.triu_indices(len(x), 1)
    return float(np.median((y[j] - y[i]) / (x[j] - x[i])))


@pytest.mark.parametrize("seed", range(5))
def test_the_slope_is_theil_and_sens(seed):
    """On single points exactly; on blocks of 4 it is that of their medians, and close to it."""
    points = curve(range(500, 756), seed)
    blocks = [
        (
            math.exp(np.mean([math.log(s + 1.0) for s, _ in points[i : i + 4]])) - 1.0,
            float(np.median([v for _, v in points[i : i + 4]])),
        )
        for i in range(0, 256, 4)
    ]

    assert slope(points, 1) == pytest.approx(theil_sen(points), rel=1e-12)
    assert slope(points) == pytest.approx(theil_sen(blocks), rel=1e-9)
    assert slope(points) == pytest.approx(theil_sen(points), rel=0.15)


def test_level_and_spread_are_of_what_the_trend_leaves():
    """Median and 1.4826 MAD of the 256 residuals, the 10 steps before the onset left out."""
    points = [*curve(range(1000), 1), *((t, 99.0) for t in range(990, 1000))]
    points = [p for p in points if p[1] == 99.0 or p[0] < 990]
    band = band_of(points, 1000)
    pre = np.array(points[990 - 256 : 990])
    left = pre[:, 1] - band.slope * (np.log(pre[:, 0] + 1) - math.log(1001))

    assert band.samples == 256
    assert band.level == pytest.approx(np.median(left), rel=1e-12)
    mad = np.median(np.abs(left - np.median(left)))
    assert band.spread == pytest.approx(1.4826 * mad, rel=1e-9)
    assert band.level == pytest.approx(1.5 + 6.0 / math.sqrt(1000), abs=0.01)
    assert band.limit == pytest.approx(band.level + max(6 * band.spread, 0.05 * band.level))
    wide = max(4 * band.spread / math.sqrt(50 / 4), 0.01 * band.level)
    assert band.width(50) == pytest.approx(wide)


def test_half_of_the_slope_is_trusted_after_the_onset_and_all_of_it_before():
    """A loss falls ever slower: the forecast lies between the trend and the level."""
    band = band_of(curve(range(2000), 2), 1000)
    away = math.log(1301) - math.log(1001)

    assert band.slope < 0
    assert band.forecast(1300) == pytest.approx(band.level + 0.5 * band.slope * away, rel=1e-3)
    back = math.log(901) - math.log(1001)
    assert band.forecast(900) == pytest.approx(band.level + band.slope * back)
    assert band.limit_at(1300) < band.limit < band.limit_at(900)


def test_a_loss_above_zero_is_not_expected_below_it():
    learned = band_of([(step, 0.01 * math.exp(-step / 200)) for step in range(900)], 900)
    away = 0.5 * learned.slope * (math.log(1801) - math.log(901))
    assert learned.level + away < 0.0
    assert (
        0.0
        < learned.forecast(1800)
        == pytest.approx(learned.level * math.exp(away / learned.level))
    )
    density = band_of([(step, -1.0 - step / 900) for step in range(900)], 900)
    away = 0.5 * density.slope * (math.log(1801) - math.log(901))
    assert density.forecast(1800) == pytest.approx(density.level + away)


@pytest.mark.parametrize("count", [8, 64, 200, 265])
def test_a_short_past_gives_a_level_and_no_slope(count):
    """Under 256 losses (10 before the onset left out) a warm-up would be taken for a trend."""
    losses = [(step, 2.0 + 0.01 * (step % 3)) for step in range(count)]
    band = band_of(losses, count)

    assert (band.slope, band.samples) == (0.0, min(count, 256))
    assert band.level == pytest.approx(2.01, abs=0.01)


def test_fewer_than_eight_losses_give_no_band():
    assert band_of([(step, 2.0) for step in range(7)], 7) is None
    assert band_of([(step, 2.0) for step in range(100)], 7) is None
