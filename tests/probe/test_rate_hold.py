"""What a learning rate was before it jumped, and when a job is back there."""

from collections import deque

import pytest

from supervise_probe.torch_state import TRAIL_LENGTH, RateHold, healthy_rate, record_rates

SLOPE = [0.1 * 1.02**n for n in range(20)]


def trail(*rates):
    found = deque(maxlen=TRAIL_LENGTH)
    for step, rate in enumerate(rates):
        record_rates(found, step, [rate])
    return found


@pytest.mark.parametrize(
    ("rates", "before", "healthy"),
    [
        ([0.1] * 20 + [3.0] * 2, 20, 0.1),
        ([*SLOPE, 3.0], 20, SLOPE[-1]),
        ([*SLOPE, 3.0], 5, SLOPE[-1]),  # the incident is older than the jump
        ([1.0] * 5 + [0.1] * 5 + [3.0], 10, 0.1),
        ([0.1] * 5 + [3.0, 0.1], 5, 0.1),
        ([0.1] * 20 + [3.0] * 3, 22, 0.1),  # the update has confirmed the jump two steps later
        ([1.0] * 20 + [0.1] * 9 + [1.0, 30.0], 30, 1.0),  # a warm restart is none
        ([0.1] * 5, 0, None),  # no step before it
        ([0.0] * 5 + [0.1], 5, None),  # a group that is thawed
        ([None] * 5 + [0.1], 5, None),  # a tensor on a device until then
        (
            [0.1] * 3 + [0.1 + n / 1e6 for n in range(TRAIL_LENGTH)],
            1,
            0.1 + (TRAIL_LENGTH - 1) / 1e6,
        ),
    ],
)
def test_the_last_healthy_rate(rates, before, healthy):
    assert healthy_rate(trail(*rates), 0, before) == healthy
    assert healthy_rate(trail(*rates), 1, before) is None


def test_a_run_that_went_back_forgets_what_came_after():
    found = trail(*SLOPE, 3.0)
    record_rates(found, 10, [0.2])

    assert [step for step, _ in found] == [*range(10), 10]


def used(levels, asked, *, first=20, release=64):
    """What a job gets, and after how many steps it is let go (None: never)."""
    hold, got = RateHold(levels, first, release, {0: asked[0]}), []
    for step, rate in enumerate(asked, first + 1):
        limit = hold.limit_if_exceeded(0, rate, step)
        got.append(rate if limit is None else limit)
        if hold.advance_and_check_end():
            return got, len(got)
    return got, None


@pytest.mark.parametrize(
    ("asked", "release", "expected"),
    [
        ([3.0] * 200, 64, ([0.1] * 200, None)),
        ([3.0] * 200, 0, ([0.1] * 200, None)),
        ([3.0] * 10 + [0.1] * 99, 64, ([0.1] * 74, 74)),
        ([3.0] * 10 + [0.1] * 99, 0, ([0.1] * 109, None)),
        ([3.0, 0.1, 3.0, 0.1, 0.1], 2, ([0.1] * 5, 5)),
        ([0.101] * 9, 2, ([0.1] * 9, None)),  # a slow rise is limited as well
        # a warm-up that went on below the jump is the job's own, and so is what it becomes
        ([3.0] * 10 + [0.16, 0.17, 0.18], 3, ([0.1] * 10 + [0.16, 0.17, 0.18], 13)),
        ([3.0] * 10 + [0.16, 3.0, 0.16], 3, ([0.1] * 10 + [0.16] * 3, None)),
        ([3.0] * 10 + [0.5] * 9, 3, ([0.1] * 19, None)),  # a jump to a lower jump
    ],
)
def test_a_rate_is_held_until_the_job_asks_for_no_more(asked, release, expected):
    assert used({0: 0.1}, asked, release=release) == expected


def test_a_group_without_a_level_is_left_alone():
    assert used({1: 0.1}, [3.0] * 3) == ([3.0] * 3, None)
