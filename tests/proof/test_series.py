"""The notation of series, and the series that takes them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from supervise.lab import MetricSeries, series_samples


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2.4", [2.4]),
        ("2.4x3", [2.4, 2.4, 2.4]),
        ("2.4+0x2", [2.4, 2.4]),
        ("5.0-0.5x3", [5.0, 4.5, 4.0]),
        ("-1+1x3", [-1.0, 0.0, 1.0]),
        ("1e-3+1e-3x2", [0.001, 0.002]),
        ("5-1e-1x2", [5.0, 4.9]),
        ("1*2x4", [1.0, 2.0, 4.0, 8.0]),
        ("8*.5x3", [8.0, 4.0, 2.0]),
        ("_x2 1", [None, None, 1.0]),
        ("inf -inf", [math.inf, -math.inf]),
        (" 1   2\n3 ", [1.0, 2.0, 3.0]),
        ("1x0 2", [2.0]),
    ],
)
def test_a_series_is_its_samples(text: str, wanted: list[float | None]) -> None:
    """As in promtool, but that `x3` is three samples."""
    assert series_samples(text) == wanted


def test_nan_is_a_sample_and_absent_is_none() -> None:
    nan, absent = series_samples("nan _")

    assert nan is not None
    assert math.isnan(nan)
    assert absent is None


def test_growth_ends_in_infinity_and_not_in_an_error() -> None:
    """10 to the 400th is more than a float holds."""
    assert series_samples("1*10x400")[-1] == math.inf


@pytest.mark.parametrize("text", ["1y3", "x3", "1+x3", "1x", "--1", "1x9999999", "1+1+1", "e5"])
def test_what_is_no_series_is_refused(text: str) -> None:
    """The loader says where; this is the last line."""
    with pytest.raises(ValueError, match="invalid piece"):
        series_samples(text)


def taken(series: MetricSeries, steps: list[int]) -> list[Any]:
    return [series.take(step) for step in steps]


def test_a_track_goes_on_after_a_rollback_unless_it_has_a_sequel() -> None:
    """Without one, time goes on and only the step goes back."""
    series = MetricSeries({"a": "1+1x4"})
    taken(series, [0, 1])
    series.rolled_back(1)

    assert taken(series, [0, 1]) == [[3.0], [4.0]]
    assert series.over


def test_each_rollback_has_its_sequel_and_the_last_one_serves_on() -> None:
    """A metric that a sequel leaves out is what it was at this step."""
    series = MetricSeries({"a": "1+1x4", "b": "5+1x4"}, [{"a": "70x2"}, {"a": "80"}])
    taken(series, [0, 1])
    series.rolled_back(1)

    assert taken(series, [1, 2]) == [[70.0, 6.0], [70.0, 7.0]]
    assert series.over
    for times in (2, 3):
        series.rolled_back(times)
        assert taken(series, [9]) == [[80.0, None]]
        assert series.over
