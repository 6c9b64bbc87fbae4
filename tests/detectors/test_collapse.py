"""Collapse: the residual to the curve that runs of one recipe share."""

import math

import pytest

from supervise.detectors import Collapse

KNOTS = ((0.0, 3.0, 0.0), (0.5, 1.5, 0.01), (1.0, 1.0, 0.01))
TOTAL = 1000


def _collapse(**fields):
    keys = {"knots": KNOTS, "total_steps": TOTAL, "smooth": 10}
    return Collapse("loss", **{**keys, **fields})


def _shape(step):
    x = (step + 1) / TOTAL
    return 3.0 - 3.0 * x if x <= 0.5 else 2.0 - x


def _run(final=2.0, worse=0.0, since=600, until=TOTAL):
    """A run that ends at `final`, worse than its curve by so much of it from a step on."""
    return [final * (_shape(s) + (worse if since <= s < until else 0.0)) for s in range(TOTAL)]


def test_a_residual_that_lasts_is_a_breach(read):
    """4 % over a bound of 3 %: seen once the mean is past it, and 20 steps later."""
    watch = _collapse().start()
    reading = read(watch, _run(worse=0.04))

    first = reading.index("B")
    assert first == 600 + 7 + 20
    assert set(reading[first:]) == {"B"}
    assert watch.numbers()["since"] == 607
    assert watch.numbers()["threshold"] == pytest.approx(0.03)
    assert watch.numbers()["residual"] == pytest.approx(0.04)


def test_the_margin_holds_where_the_spread_is_nothing(read):
    thin = tuple((x, level, 0.0) for x, level, _ in KNOTS)

    assert "B" not in read(_collapse(knots=thin).start(), _run(worse=0.0049))
    assert "B" in read(_collapse(knots=thin).start(), _run(worse=0.0051))


def test_huge_samples_are_no_numbers(read):
    run = _run()
    run[300:360] = [1e308, -1e308, math.inf] * 20
    watch = _collapse().start()

    assert read(watch, run)[-1] == "o"


def test_a_rollback_into_the_alignment_aligns_again(read):
    """The part that it goes back into begins anew."""
    run = [*_run(final=2.0)[:350], *_run(final=3.0)[350:520]]
    watch = _collapse().start()
    read(watch, run)
    watch.rewind(349)
    read(watch, _run(final=2.0)[350:520], first=350)

    assert watch.numbers()["scale"] == pytest.approx(2.0)
