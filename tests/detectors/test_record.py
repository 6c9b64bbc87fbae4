"""Record: a sample further above its past than any other of late."""

import pytest

from supervise.detectors import Record

NOISE = [2.0, 2.1, 1.9, 2.0] * 10


def _watch(**fields):
    return Record("loss", **{"ref": 16, "window": 64, "min_": 8, **fields}).start()


def test_the_first_of_its_size_is_one_and_the_next_is_none(read):
    """10 after 40 samples about 2; the same once more 20 samples later."""
    watch = _watch()

    assert read(watch, [*NOISE, 10.0])[-1] == "B"
    assert read(watch, NOISE[:20], 41) == "o" * 20
    assert read(watch, [10.0, 2.0, 2.0, 2.0, 2.0, 30.0], 61) == "oooooB"


def test_an_excursion_is_no_precedent_of_its_own(read):
    """It lasts until the median has followed, after half of `ref`."""
    assert read(_watch(), [*NOISE, *[10.0] * 12])[40:] == "B" * 9 + "o" * 3


def test_three_usual_samples_do_not_end_it(read):
    """It takes four: `calm`."""
    assert read(_watch(), [*NOISE, 10.0, 2.0, 2.0, 2.0, 10.0])[-1] == "B"
    assert read(_watch(), [*NOISE, 10.0, 2.0, 2.0, 2.0, 2.0, 10.0])[-1] == "o"


def test_what_is_older_than_the_window_is_forgotten(read):
    """64 samples after the first one it still counts, one more and it does not."""
    assert read(_watch(), [*NOISE, 10.0, *[2.0] * 63, 10.0])[-1] == "o"
    assert read(_watch(), [*NOISE, 10.0, *[2.0] * 64, 10.0])[-1] == "B"


def test_two_levels_by_turns_are_both_usual(read):
    """Blocks of five steps: a robust z of either is beyond any bound."""
    assert "B" not in read(_watch(), ([2.0] * 5 + [14.0] * 5) * 8)[10:]


def test_it_needs_no_sign(read):
    """A log-likelihood below zero is judged like any other loss."""
    assert read(_watch(), [*[x - 9.0 for x in NOISE], -3.0])[-1] == "B"


def test_a_falling_loss_has_no_rises(read):
    """Its samples lie below their median, and the first one above it is a record."""
    falling = [5.0 - 0.05 * step for step in range(40)]

    assert read(_watch(), [*falling, 5.5])[8:] == "o" * 32 + "B"


def test_the_numbers_say_what_was_the_limit(read):
    """Of two samples about 2 the greatest rise was 0.1."""
    watch = _watch()
    read(watch, [*NOISE, 10.0])

    numbers = watch.numbers()

    assert numbers["value"] == 10.0
    assert numbers["rise"] == 8.0
    assert numbers["threshold"] == pytest.approx(2.2)
