"""The phase of a schedule from its rates alone, and averages that a rollback puts back."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervise_probe.collectors.phase import PhaseCollector
from supervise_probe.collectors.progress import DerivedCollector
from supervise_probe.torch_state.learning_rate import Warmup
from supervise_probe.torch_state.records import Average, Optimizers, Window


def collector(kind=PhaseCollector):
    """A collector of a probe whose job tells nothing but its rate."""
    context = SimpleNamespace(
        torch=None,
        scalars=None,
        registry=SimpleNamespace(schedulers=SimpleNamespace(changes=-1)),
    )
    if kind is not PhaseCollector:
        return kind(context)
    library, rate = SimpleNamespace(total_steps=None), SimpleNamespace(warming=Warmup())
    return kind(context, Optimizers(), rate, library)


def phases(rates):
    follower, found = collector(), []
    for rate in rates:
        values = {"learning_rate_scheduled": rate}
        follower.finish(values)
        found.append(values.get("lr_phase"))
    return found


def changes(rates):
    """The phases in their order, each with the step in which it began."""
    found, last = [], None
    for step, now in enumerate(phases(rates)):
        if now is not None and now != last:
            found.append((step, now))
            last = now
    return found


RISE = [1e-3 * (i + 1) / 20 for i in range(20)]
FLAT = [1e-3] * 100
COSINE = [5e-4 * (1 + math.cos(math.pi * i / 5000)) for i in range(5001)]
FALL = [1e-3 * (1 - i / 100) for i in range(1, 100)]
STAIRS = [1e-3 * (i // 8 + 1) / 10 for i in range(80)]

SCHEDULES = {
    "constant": (FLAT, [(16, 1.0)]),
    "warm-up, stable, decay": (RISE + FLAT + FALL, [(1, 0.0), (35, 1.0), (120, 2.0)]),
    "warm-up and a long cosine, flat at its top": (RISE + COSINE[1:], [(1, 0.0), (20, 2.0)]),
    "warm-up by epochs": (STAIRS + FALL, [(8, 0.0), (80, 2.0)]),
    "a first update that was skipped": ([0.0, 0.0, *RISE, *FALL], [(2, 0.0), (22, 2.0)]),
    "a warm-up that begins again": (
        RISE + FLAT + RISE + FLAT,
        [(1, 0.0), (35, 1.0), (120, 2.0), (122, 0.0), (155, 1.0)],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_phase_follows_the_rate(name):
    rates, expected = SCHEDULES[name]
    assert changes(rates) == expected


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 20))
def test_a_window_counts_its_last_steps(happened, size):
    """Against a count of the list, and through a state at any place."""
    window = Window("w", size)
    for step, now in enumerate(happened, 1):
        window.add(now)
        last = happened[:step][-size:]
        assert window.percent == pytest.approx(100 * sum(last) / len(last))
        state, window = {}, saved(window, Window("w", size))
        window.save(state)
        assert all(isinstance(value, int) for value in state.values())


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50), st.floats(0.5, 0.999))
def test_an_average_has_no_bias_at_its_start(values, decay):
    average = Average("a", decay)
    assert average.value is None
    for value in values:
        average.add(value)
        average = saved(average, Average("a", decay))
    n = len(values)
    total = sum((1 - decay) * decay ** (n - 1 - i) * value for i, value in enumerate(values))
    assert average.value == pytest.approx(total / (1 - decay**n), rel=1e-9, abs=1e-9)


def saved(part, fresh):
    """A new one with the state of the old."""
    state = {}
    part.save(state)
    fresh.load(state)
    return fresh


def test_what_is_not_finite_enters_no_average():
    """NaN in one step leaves no trace in the next; an overflow is no spike."""
    follower = collector(DerivedCollector)
    losses = [2.0, math.nan, 2.0, math.inf, 2.0]
    norms = [1.0, math.nan, 3.0, math.inf, 1.0]
    found = []
    for loss, norm in zip(losses, norms, strict=True):
        values = {"train_loss_raw": loss, "train_loss": loss}
        values |= {"grad_global_norm": norm, "update_skipped": 0.0}
        follower.finish(values)
        found.append(values)
    assert [values["train_loss_ema"] for values in found] == pytest.approx([2.0] * 5)
    assert [values["train_ppl"] for values in found] == pytest.approx([math.exp(2)] * 5)
    assert [values.get("grad_spike_score") for values in found[:4]] == [None, None, 3.0, None]
    after = (0.97 * 0.03 * 1.0 + 0.03 * 3.0) / (1 - 0.97**2)
    assert found[4]["grad_spike_score"] == pytest.approx(1.0 / after)
    assert all("overflow_rate" not in values for values in found)
