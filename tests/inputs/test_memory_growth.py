"""Growth of memory: what is one, what only looks like it, and from when on it is known."""

import math
import random

import pytest

from supervise.runtime import MemoryGrowth

EVERY_S = 2.0
MB, GB, HOUR = 1e6, 1e9, 3600.0
LIMIT = 1e9  # bytes an hour, of the rule of the pack
SLOW = 5 + int(40 * 60 / EVERY_S)  # looks until the job settled and the slow window is full
TIGHT, AMPLE = 24 * GB, 1000 * GB


def bounds(size, looks, available=AMPLE, noise=0.0):
    """Return what is told after each look at a job of `size(seconds)` bytes, in bytes an hour."""
    drawn, growth, found = random.Random(0), MemoryGrowth(), []
    for look in range(looks):
        at = look * EVERY_S
        growth.add(at, size(at) + drawn.gauss(0.0, noise), available)
        told = growth.lower_bound()
        found.append(None if told is None else told * HOUR)
    return found


def known(found):
    return [told for told in found if told is not None]


def leak(gb_an_hour, began=0.0):
    return lambda at: 2 * GB + gb_an_hour * GB / HOUR * max(0.0, at - began)


def peaks(every_s, lasting_s, high):
    return lambda at: high if at % every_s > every_s - lasting_s else 0.0


def flattens(tau, to=2 * GB):
    return lambda at: to * (1.0 - math.exp(-at / tau))


def test_nothing_is_told_before_the_job_settled_and_some_windows_were_full():
    found = bounds(lambda at: at * MB, 29)

    assert found[:23] == [None] * 23 and None not in found[23:]


# ── the short window: the machine is full within two hours ───────────────────────────────────────


@pytest.mark.parametrize(("rate", "available"), [(20, TIGHT), (1000, AMPLE)])
def test_a_leak_that_fills_the_machine_within_two_hours_is_told_within_a_minute(rate, available):
    found = bounds(leak(rate), 100, available)

    assert 2.0 * found.index(next(iter(known(found)))) < 60.0
    assert min(known(found)) == pytest.approx(rate * GB, rel=1e-3)
    assert max(known(found)) == pytest.approx(rate * GB, rel=1e-3)


def test_a_fast_leak_in_noise_is_told_within_a_minute_of_its_begin():
    began = 100.0
    found = bounds(leak(72, began), 100, TIGHT, noise=5 * MB)

    first = next(look for look, told in enumerate(found) if told is not None and told > LIMIT)
    assert began < first * EVERY_S < began + 60.0
    after = found[first + 5 :]
    assert sum(told > LIMIT for told in after) > len(after) * 6 / 10
    assert max(after) < 72 * GB * 1.2


def test_as_fast_a_leak_is_left_to_the_slow_window_where_the_machine_has_room():
    just, less = (bounds(leak(100), 200, 200 * GB * part) for part in (0.99, 1.01))

    assert min(known(just)) > LIMIT
    assert max(known(less)) == 0.0


@pytest.mark.parametrize(
    ("what", "size"),
    [
        ("8 workers that start within 40 s", lambda at: 500 * MB * min(8, at // 5)),
        ("a save that needs 1 GB for 20 s", lambda at: 2 * GB + peaks(300, 20, 1 * GB)(at)),
    ],
)
def test_what_fills_at_the_start_and_stops_is_none_even_where_room_is_tight(what, size):
    assert max(known(bounds(size, SLOW + 600, TIGHT))) == 0.0, what


def test_a_leak_past_a_peak_of_one_look_is_told_soon():
    found = bounds(lambda at: 6 * GB if at == 40.0 else leak(18, 60.0)(at), 80, TIGHT)

    assert found[-1] == pytest.approx(18 * GB, rel=1e-3)


# ── the slow window ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rate", "over"),
    [
        (1.5, lambda at: 0.0),
        (5, lambda at: peaks(900, 10, 20 * GB)(at) + peaks(600, 60, 3 * GB)(at)),
        (5, lambda at: 1 * GB * (at % 60.0) / 60.0),
        (5, lambda at: 20 * GB if at < 60.0 else 0.0),
        (5, lambda at: 100 * MB * (37 * (at // 60.0) % 101) if at % 60.0 < 10.0 else 0.0),
    ],
)
def test_peaks_over_and_before_a_leak_do_not_hide_it(rate, over):
    found = bounds(lambda at: leak(rate)(at) + over(at), SLOW + 1800)

    assert max(known(found[: SLOW - 60])) == 0.0
    assert min(found[SLOW:]) == pytest.approx(rate * GB, rel=0.1)
    assert max(found[SLOW:]) == pytest.approx(rate * GB, rel=0.1)


@pytest.mark.parametrize(
    ("over", "noise", "share"),
    [(peaks(700, 150, 3 * GB), 0.0, 1 / 5), (lambda at: 0.0, 50 * MB, 6 / 10)],
    ids=["under evaluations of minutes", "in noise"],
)
def test_a_slow_leak_that_is_disturbed_is_told_a_share_of_the_time(over, noise, share):
    """Where a peak begins with a part, the part's lowest size is later, and its rise greater."""
    late = bounds(lambda at: leak(5)(at) + over(at), SLOW + 3600, noise=noise)[SLOW:]

    assert sum(told > LIMIT for told in late) > len(late) * share
    assert max(late) < 5.5 * GB


@pytest.mark.parametrize(
    ("what", "size"),
    [
        ("flat", lambda at: 2 * GB),
        ("one jump", lambda at: 5 * GB if at > 300.0 else 1 * GB),
        ("saves of a minute", lambda at: 2 * GB + peaks(600, 60, 5 * GB)(at)),
        ("filled and freed within 100 s", lambda at: 500 * MB * (at % 100.0) / 100.0),
        ("filled and freed within 25 minutes", lambda at: 1 * GB * (at % 1500.0) / 1500.0),
        (
            "workers anew in each epoch of 25 minutes",
            lambda at: 500 * MB * min(8, at % 1500.0 // 5) if at % 1500.0 < 1480.0 else 0.0,
        ),
        *((f"flattens within {tau} s", flattens(tau)) for tau in (10, 300, 1800)),
    ],
)
def test_what_does_not_go_on_growing_is_none(what, size):
    assert max(known(bounds(size, SLOW + 1800, available=64 * GB))) == 0.0, what


def test_noise_is_none():
    assert max(known(bounds(lambda at: 8 * GB, SLOW + 3600, TIGHT, noise=100 * MB))) < LIMIT / 2
