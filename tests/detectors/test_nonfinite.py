"""Nonfinite: NaN is data here, absence is not."""

import math

from supervise.core.model.decisions import BREACH, OK
from supervise.detectors.nonfinite import Nonfinite

NAN, INF = math.nan, math.inf


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
