"""Rate: events per window, with lost steps counted as perhaps."""

import pytest

from supervise.core.model.decisions import UNKNOWN
from supervise.detectors.rate import Rate


def test_a_share_is_of_the_whole_window(read):
    """Half of four is two, also in the first steps of a run: one event is not all of one step."""
    watch = Rate("skip", window=4, share_gte=0.5).start()

    assert read(watch, [1, 1, 0, 0, 0]) == "oBBBo"


@pytest.mark.parametrize(
    ("share", "window", "events"), [(0.07, 100, 7), (0.05, 200, 10), (1, 9, 9)]
)
def test_a_share_needs_the_least_count_that_reaches_it(share, window, events):
    """0.07 of 100 is 7, though 0.07 * 100 is a little more in floats."""
    assert Rate("skip", window=window, share_gte=share).events(share) == events


def test_a_gap_of_a_million_steps_costs_no_memory():
    """Only what can still matter is remembered."""
    watch = Rate("skip", window=10, count_gte=1).start()
    watch.feed(0.0, 0)

    assert watch.feed(0.0, 1_000_000) == UNKNOWN
    assert len(watch.missing) <= 20
