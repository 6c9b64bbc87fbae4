"""Rate: events per window, with lost steps counted as perhaps."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.detectors.rate import Rate


def test_it_counts_events_in_the_window(read):
    """Two of the last four steps."""
    watch = Rate("skip", window=4, count_gte=2).start()

    assert read(watch, [1, 0, 0, 1, 0, 0, 1]) == "oooBooB"


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


def test_clear_holds_it_until_fewer_came(read):
    """Three begin it; it lasts while two are in the window."""
    watch = Rate("skip", window=4, count_gte=3, clear=2).start()

    assert read(watch, [1, 1, 1, 0, 0, 0, 1]) == "ooBBBoo"


def test_doubt_does_not_end_it(read):
    """Whether it is over is not known while one step is; a single event then keeps it up."""
    watch = Rate("skip", window=3, count_gte=3, clear=1).start()

    assert read(watch, [1, 1, 1, 0, None, 0, 1, 0, 0, 0]) == "ooBB??BBBo"


def test_lost_steps_may_have_been_events():
    """Two steps were lost: with one event seen, two or three may have come."""
    watch = Rate("skip", window=8, count_gte=3).start()
    watch.feed(1.0, 0)

    assert watch.feed(0.0, 3) == UNKNOWN
    assert watch.feed(1.0, 4) == UNKNOWN
    assert watch.feed(1.0, 5) == BREACH
    assert watch.numbers()["missing"] == 2


def test_absent_samples_are_unknown_and_count_as_perhaps(read):
    """They are carried for a window."""
    watch = Rate("skip", window=4, count_gte=2).start()

    assert read(watch, [0, None, math.nan, 0, 0, 0, 0]) == "o????oo"


def test_a_run_that_begins_late_has_lost_nothing():
    """A resumed run starts at step 5000 with a clean record."""
    watch = Rate("skip", window=200, count_gte=1).start()

    assert watch.feed(0.0, 5000) == OK


def test_a_gap_of_a_million_steps_costs_no_memory():
    """Only what can still matter is remembered."""
    watch = Rate("skip", window=10, count_gte=1).start()
    watch.feed(0.0, 0)

    assert watch.feed(0.0, 1_000_000) == UNKNOWN
    assert len(watch.missing) <= 20


def test_rewind_gives_back_the_window_of_then(read):
    """Events after the step are gone, those that had left the window since are back."""
    watch = Rate("skip", window=4, count_gte=2).start()
    read(watch, [0, 1, 1, 0, 0, 1, 1])

    watch.rewind(3)

    assert read(watch, [0, 0], first=4) == "Bo"


def test_a_step_that_is_not_newer_is_not_taken(read):
    """An event that comes twice is one event."""
    watch = Rate("skip", window=4, count_gte=2).start()
    read(watch, [0, 1])

    assert watch.feed(1.0, 1) == UNKNOWN
    assert watch.feed(0.0, 2) == OK


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, "count_gte"),
        ({"count_gte": 1, "share_gte": 0.1}, "count_gte"),
        ({"count_gte": 201}, "count_gte"),
        ({"share_gte": 1.5}, "share_gte"),
        ({"count_gte": 4, "clear": 4}, "clear"),
        ({"count_gte": 4, "window": 0}, "window"),
    ],
)
def test_what_cannot_work_is_refused(fields, key):
    """The complaint names the key."""
    assert [field for field, _ in Rate("skip", **fields).check()] == [key]


def test_a_good_one_passes():
    """The example of the docs."""
    assert Rate("skip", window=200, count_gte=10, clear=4).check() == []


@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from([1] * 10 + [2, 6, 0, -4]),
            st.sampled_from([0.0] * 6 + [1.0] * 3 + [None, math.nan]),
        ),
        max_size=100,
    ),
    window=st.sampled_from([1, 4, 9]),
    bounds=st.sampled_from([(1, None), (3, None), (3, 1), (4, 2)]),
)
@settings(max_examples=200, deadline=None)
def test_it_agrees_with_a_count_over_the_whole_history(moves, window, bounds):
    """What is not known is tried both ways: all of it events, none of it events."""
    need, clear = min(bounds[0], window), bounds[1]
    clear = None if clear is None or clear >= need else clear
    watch = Rate("skip", window=window, count_gte=need, clear=clear).start()
    seen, step, firing = {}, 10, False
    for jump, value in moves:
        step += jump
        code = watch.feed(value, step)
        if seen and step <= max(seen):
            assert code == UNKNOWN
            step = max(seen)
            continue
        seen[step] = value
        last = [seen.get(s) for s in range(max(min(seen), step - window + 1), step + 1)]
        unknown = sum(v is None or v != v for v in last)
        events = sum(v == 1 for v in last)
        bound = clear if firing and clear is not None else need
        expected = BREACH if events >= bound else UNKNOWN if events + unknown >= bound else OK
        if value is None or value != value:
            expected = UNKNOWN
        elif expected != UNKNOWN:
            firing = expected == BREACH

        assert code == expected
