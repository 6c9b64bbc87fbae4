"""What is too dear is switched off, unless somebody asked for it or a profiler makes it so."""

from __future__ import annotations

import pytest

from supervise_probe.runtime.guard import WINDOW, Guard

WORK = range(3000)  # some 30 us


@pytest.fixture
def told():
    return []


@pytest.fixture
def steps(told):
    """Makes `number` steps of 1 us in which a part works for much longer."""
    guard = Guard(lambda part, reason: told.append((part.name, reason)))
    part = guard.part("dear", floor_us=0)

    def make(number):
        for _ in range(number):
            guard.run(part, sum, WORK)
            guard.judge(1000)
            guard.turn()
        return guard, part

    return make


def test_what_costs_more_than_its_share_is_switched_off(steps, told):
    """After a window of steps, with the cost and the allowance."""
    _, part = steps(3 * WINDOW)

    assert not part.on and told[0][0] == "dear" and "are allowed" in told[0][1]


def test_an_excused_part_stays(steps, told):
    """Raised sampling was asked for; when that is over it is judged like any other."""
    _, part = steps(0)
    part.excused = True
    steps(3 * WINDOW)
    assert part.on and told == []
    part.excused = False
    steps(3 * WINDOW)
    assert not part.on


def test_nothing_is_weighed_under_a_profiler(steps, told):
    """It makes everything dear; afterwards only steps without it count."""
    guard, part = steps(0)
    guard.blind = True
    steps(3 * WINDOW)
    assert part.on and part.costs == [] and told == []
    guard.blind = False
    steps(3 * WINDOW)
    assert not part.on
