"""Threshold: bounds, `for`, `m_of_n`, and `clear`."""

from supervise.detectors.threshold import Threshold


def test_the_numbers_say_value_bound_and_count():
    """Enough to write the sentence: 11 > 10, 2 of 2."""
    watch = Threshold("loss", gt=10.0, clear=8.0, for_=2).start()
    watch.feed(11.0, 0)
    watch.feed(11.0, 1)

    assert watch.numbers() == {
        "step": 1,
        "value": 11.0,
        "gt": 10.0,
        "threshold": 10.0,
        "clear": 8.0,
        "breaching": 2,
        "needed": 2,
        "of": 2,
    }
