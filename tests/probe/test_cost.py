"""What the probe may cost: how often a costly value of a short step is taken; what is too dear is
switched off, unless somebody asked for it or a profiler makes it so."""

from types import SimpleNamespace

import pytest

from supervise_probe.runtime import WINDOW, Guard
from supervise_probe.sampling.sample_sets import RARE, SAMPLES, Budget, Pace, SampleSets, Unrest
from supervise_probe.sampling.schedule import LOOK_NS, SamplingSchedule


@pytest.mark.parametrize(
    ("least", "most", "first", "costs_us", "every"),
    [
        (2, 16, 4, (900, 900, 900, 900), (8, 16, 16, 16)),
        (2, 16, 4, (40, 40, 40, 40), (2, 1, 1, 1)),
        (4, 16, 4, (300, 90, 40, 500, 500), (4, 4, 1, 4, 8)),
        (4, 16, 8, (500, 200, 200), (8, 4, 4)),
        (4, 4, 1, (900, 900, 40), (4, 4, 1)),
    ],
)
def test_the_interval_follows_the_median_cost(least, most, first, costs_us, every):
    pace = Pace(lambda: None, first, lambda step_ns: 0.005 * step_ns, least, most)
    found = []
    for cost_us in costs_us:
        for number in range(SAMPLES):  # one outlier of five decides nothing
            pace.adjust_interval(10**9 if number == 2 else cost_us * 1000, step_ns=20_000_000)
        found.append(pace.every)
    assert tuple(found) == every


def test_what_is_rare_gets_what_is_left_of_the_share_and_a_part_of_it_in_any_case():
    guard = Guard(lambda part, reason: None)
    budget = Budget(guard, share=0.01)
    assert budget.allowed_ns(0.5, 0, step_ns=50_000_000) == 0.5 * 500_000
    guard.fixed_ns = 300_000
    assert budget.allowed_ns(0.5, 0, step_ns=50_000_000) == 0.5 * 200_000
    assert budget.allowed_ns(0.5, 0, step_ns=20_000_000) == 0.5 * RARE * 200_000
    assert budget.allowed_ns(0.5, 10_000, step_ns=1_000_000) == 10_000


def test_what_is_rarer_than_it_should_be_is_listed_with_its_interval():
    sets = SampleSets(Guard(lambda part, reason: None), {"routing": 20}, lambda: None)
    sets.pace("updates", 4, 0.5, 0)
    sets.pace("moments", 1, 0.5, 0)
    sets.by_name["attention"].every = 400
    assert sets.thinned() == {"updates": 4, "attention": 400}


@pytest.mark.parametrize(
    ("attention_us", "every", "gradients_us", "affordable"),
    [
        (3000, 50, 3000, 100),  # 60 us a step each, and 40 us of a step of 10 ms for both
        (1200, 50, 200, 50),  # 24 us of its 20, and the other set needs 4 of its own
        (1200, 100, 200, 50),  # as it was, now that the other set is cheap
        (1500, 100, 1500, 100),  # it would not leave the other set enough
        (200, 100, 3000, 50),  # its own part is enough for it
        (200, 50, 200, 50),  # never more often than its interval
    ],
)
def test_a_set_is_stretched_only_where_all_of_them_cost_more_than_they_may(
    attention_us, every, gradients_us, affordable
):
    sets = SampleSets(Guard(lambda part, reason: None), {"attention": 50}, lambda: None)
    attention, gradients = sets.by_name["attention"], sets.by_name["gradients"]
    attention.cost_ns, attention.every, attention.samples = attention_us * 1000, every, 2
    gradients.cost_ns, gradients.samples = gradients_us * 1000, 2
    sets.by_name["weights"].samples, sets.by_name["weights"].off = 5, "off: too dear"
    assert sets.affordable_interval(attention, step_ns=10_000_000) == affordable


def sampled(cost_ms, tight_from, steps=2000, step_ms=13):
    """Return the steps of such samples; an incident is open from `tight_from` on."""
    guard = Guard(lambda part, reason: None)
    guard.fixed_ns = 100_000
    off = dict.fromkeys(
        ("activations", "routing", "routers", "weights", "gradients", "checksums"), 0
    )
    sets = SampleSets(guard, off, lambda: None)
    writer = SimpleNamespace(dense_sampling_until_ns=lambda: 1 << 62 if step >= tight_from else 0)
    context = SimpleNamespace(
        guard=guard, reporter=SimpleNamespace(writer=writer, status_changed=lambda: None)
    )
    others = SimpleNamespace(arriving=False, next=1 << 62)
    schedule = SamplingSchedule(
        context, sets, lambda due: None, lambda name: (), others, others, others
    )
    taken = []
    for step in range(steps):
        schedule.plan_step(step, LOOK_NS + round(step * step_ms * 1e6))
        if sets.due:
            taken.append(step)
            sets.spent("attention", round(cost_ms * 1e6))
    return taken


def test_an_incident_from_the_first_step_costs_no_more_than_the_share():
    taken = sampled(cost_ms=50, tight_from=0)
    assert len(taken) >= 3 and 50 * len(taken) <= 0.01 * 2000 * 13


def test_thinned_samples_come_as_often_as_the_whole_share_pays_for_in_an_incident():
    """A tenth of it is theirs otherwise."""
    before = [step for step in sampled(cost_ms=8, tight_from=4000, steps=4000) if step >= 2000]
    within = [step for step in sampled(cost_ms=8, tight_from=2000, steps=4000) if step >= 2000]
    assert len(within) >= 4 * len(before) > 0
    assert 8 * len(within) <= 0.01 * 4000 * 13


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
        assert not unrest.add_and_is_unusual(
            {**CALM, "train_loss_raw": 2.0 + 0.02 * (-1) ** number}
        )
    assert unrest.add_and_is_unusual({**CALM, **change}) == unusual


def test_nothing_is_weighed_under_a_profiler():
    """It makes everything dear; afterwards only steps without it count."""
    told = []
    guard = Guard(lambda part, reason: told.append((part.name, reason)))
    part = guard.part("dear", floor_us=0)

    def make_steps():  # of 1 us, in which the part works for some 30
        for _ in range(3 * WINDOW):
            guard.run(part, sum, range(3000))
            guard.judge_costs(1000)
            guard.finish_step_timing()

    guard.blind = True
    make_steps()
    assert part.on and part.costs == [] and told == []
    guard.blind = False
    make_steps()
    assert not part.on and told[0][0] == "dear" and "are allowed" in told[0][1]
    part.on, part.excused = True, True  # raised sampling was asked for
    make_steps()
    assert part.on
