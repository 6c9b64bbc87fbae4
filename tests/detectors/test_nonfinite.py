"""Nonfinite: NaN is data here, absence is not."""

import math

import pytest

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.detectors.nonfinite import Nonfinite

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_any_value_that_is_no_number_breaches_at_once(bad):
    """One of the metrics is enough, from the first step on, and only while it lasts."""
    watch = Nonfinite(("loss", "grad")).start()

    codes = [watch.feed(sample, step) for step, sample in enumerate([(1.0, bad), (1.0, 2.0)])]

    assert codes == [BREACH, OK]


def test_absent_metrics_are_left_out():
    """An absent metric says nothing; all of them absent is not healthy but unknown."""
    watch = Nonfinite(("loss", "grad")).start()

    assert watch.feed((None, 2.0), 0) == OK
    assert watch.feed((None, NAN), 1) == BREACH
    assert watch.feed((None, None), 2) == UNKNOWN
    assert watch.raw == UNKNOWN


def test_a_large_number_is_still_a_number():
    """The largest floats, whose sum would overflow, are finite."""
    watch = Nonfinite(("loss", "grad")).start()

    assert watch.feed((1.7e308, 1.7e308), 0) == OK


def test_step_ids_never_make_it_look_away():
    """A NaN counts also when its step comes twice or the run went back unannounced."""
    watch = Nonfinite(("loss",)).start()
    watch.feed((1.0,), 100)

    assert watch.feed((NAN,), 100) == BREACH
    assert watch.feed((NAN,), 3) == BREACH


def test_the_numbers_name_the_culprit():
    """Evidence says which metric it was."""
    watch = Nonfinite(("loss", "grad")).start()
    watch.feed((1.5, INF), 7)

    assert watch.numbers() == {
        "step": 7,
        "values": {"loss": 1.5, "grad": INF},
        "nonfinite": ["grad"],
    }


def test_without_metrics_it_is_refused():
    """A rule that looks at nothing could never fire."""
    assert Nonfinite(()).check() == [("metrics", "names no metric")]
    assert Nonfinite().check() == []
