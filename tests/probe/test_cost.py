"""What the probe may cost: how often a costly value of a short step is taken; what is too dear is
switched off, unless somebody asked for it or a profiler makes it so."""

import pytest

from supervise_probe.runtime.guard import WINDOW, Guard
from supervise_probe.sampling.sample_sets import SAMPLES, Pace, Unrest


class Reporter:
    def status_changed(self):
        pass


@pytest.mark.parametrize(
    ("least", "first", "costs_us", "every"),
    [
        (2, 4, (900, 900, 900, 900), (8, 16, 16, 16)),
        (2, 4, (50, 50, 50, 50), (2, 1, 1, 1)),
        (4, 4, (300, 90, 500, 500), (4, 1, 4, 8)),
        (4, 8, (500, 200, 200), (8, 4, 4)),
    ],
)
def test_the_interval_follows_the_median_cost(least, first, costs_us, every):
    pace = Pace(Reporter(), first, share=0.005, floor_ns=1000, least=least)
    found = []
    for cost_us in costs_us:
        for number in range(SAMPLES):  # one outlier of five decides nothing
            pace.weigh(10**9 if number == 2 else cost_us * 1000, step_ns=20_000_000)
        found.append(pace.every)
    assert tuple(found) == every


CALM = {
    "train_loss_raw": 2.0,
    "learning_rate": 1e-3,
    "update_norm": 0.1,
    "grad_spike_score": 1.0,
    "nan_inf_events": 0.0,
}


@pytest.mark.parametrize(
    ("change", "unusual"),
    [
        ({}, False),
        ({"train_loss_raw": 2.02}, False),
        ({"train_loss_raw": 3.0}, True),
        ({"learning_rate": 2e-3}, True),
        ({"update_norm": 0.25}, True),
        ({"grad_spike_score": 3.5}, True),
        ({"nan_inf_events": 1.0}, True),
    ],
)
def test_a_frame_far_from_those_before_it_is_unusual(change, unusual):
    """So samples are dense again before the supervisor asks for it."""
    unrest = Unrest()
    for number in range(100):
        assert not unrest.look({**CALM, "train_loss_raw": 2.0 + 0.02 * (-1) ** number})
    assert unrest.look({**CALM, **change}) == unusual


def test_nothing_is_weighed_under_a_profiler():
    """It makes everything dear; afterwards only steps without it count."""
    told = []
    guard = Guard(lambda part, reason: told.append((part.name, reason)))
    part = guard.part("dear", floor_us=0)

    def make_steps():  # of 1 us, in which the part works for some 30
        for _ in range(3 * WINDOW):
            guard.run(part, sum, range(3000))
            guard.judge(1000)
            guard.turn()

    guard.blind = True
    make_steps()
    assert part.on and part.costs == [] and told == []
    guard.blind = False
    make_steps()
    assert not part.on and told[0][0] == "dear" and "are allowed" in told[0][1]
    part.on, part.excused = True, True  # raised sampling was asked for
    make_steps()
    assert part.on
