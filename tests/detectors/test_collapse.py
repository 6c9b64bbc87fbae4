"""Collapse: the residual to the curve that runs of one recipe share."""

import math

import pytest

from supervise.detectors.collapse import Collapse

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


def test_it_abstains_until_it_has_found_the_scale(read):
    """Half of the training; then a run on the curve is well, whatever its final loss."""
    for final in (0.5, 2.0, 7.0):
        watch = _collapse().start()

        assert read(watch, _run(final)) == "?" * 500 + "o" * 500
        assert watch.numbers()["scale"] == pytest.approx(final)
        assert watch.numbers()["residual"] == pytest.approx(0.0, abs=1e-9)


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


def test_one_that_does_not_last_or_is_small_is_none(read):
    """Shorter than 2 % of the training; below the bound; better than the curve."""
    for run in (_run(worse=0.04, until=620), _run(worse=0.02), _run(worse=-0.2)):
        assert "B" not in read(_collapse().start(), run)


def test_the_margin_holds_where_the_spread_is_nothing(read):
    """Half a percent of the final loss."""
    thin = tuple((x, level, 0.0) for x, level, _ in KNOTS)

    assert "B" not in read(_collapse(knots=thin).start(), _run(worse=0.0049))
    assert "B" in read(_collapse(knots=thin).start(), _run(worse=0.0051))


def test_a_spike_while_it_aligns_does_not_bend_the_scale(read):
    """The median of 32 parts."""
    run = _run()
    run[300:330] = [50.0] * 30
    watch = _collapse().start()
    read(watch, run)

    assert watch.numbers()["scale"] == pytest.approx(2.0, rel=1e-3)


def test_too_few_samples_are_no_scale(read):
    """A metric that came late: eight of 32 parts at least."""
    late = [None] * 460 + _run()[460:]
    assert set(read(_collapse().start(), late)) == {"?"}

    watch = _collapse().start()
    sparse = [x if s % 25 == 0 else None for s, x in enumerate(_run())]
    reading = read(watch, sparse)
    assert "o" in reading and "B" not in reading


def test_huge_samples_are_no_numbers(read):
    """They would be the scale for ever."""
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
