"""Savepoints take their share of the time, but for the first one and a tenth of a second."""

import pytest

from supervise_probe.savepoints import FREE_NS, TimeShare

MS = 1_000_000


@pytest.fixture
def time_share():
    """One that has seen the first savepoint, which is paid once."""
    begun = TimeShare(0.005)
    assert begun.wait_ns(4000 * MS) == 0
    return begun


def test_small_ones_begin_at_once_and_then_keep_to_their_share(time_share):
    assert [time_share.wait_ns(20 * MS) for _ in range(FREE_NS // (20 * MS))] == [0] * 5
    assert [time_share.wait_ns(20 * MS) for _ in range(2)] == [4000 * MS] * 2


def test_a_dear_one_waits_from_the_second_on(time_share):
    assert time_share.wait_ns(800 * MS) == 140_000 * MS


def test_the_cheaper_of_the_newest_two_counts(time_share):
    time_share.wait_ns(FREE_NS)
    assert [time_share.wait_ns(cost * MS) for cost in (20, 90, 20)] == [4000 * MS] * 3


def test_without_a_share_none_waits():
    time_share = TimeShare(0.0)
    assert [time_share.wait_ns(800 * MS) for _ in range(3)] == [0] * 3
