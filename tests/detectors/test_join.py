"""Join: near each other, in any order."""

import pytest

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.detectors.join import Join

CODES = {"B": BREACH, "?": UNKNOWN, ".": OK}


def _rows(*columns):
    return [tuple(CODES[letter] for letter in row) for row in zip(*columns, strict=True)]


def test_all_needs_each_of_them_in_any_order(read):
    """It lasts as long as all of them are within two steps."""
    both = Join(all=("loss", "grad"), within=2)

    assert read(both.start(), _rows("B.....", ".B....")) == "oBBooo"
    assert read(both.start(), _rows(".B....", "B.....")) == "oBBooo"
    assert read(both.start(), _rows("B......", "...B...")) == "ooooooo"


def test_any_needs_one_of_them(read):
    """A breach is remembered for two steps."""
    assert read(Join(any=("a", "b"), within=2).start(), _rows("B.....", "....B.")) == "BBBoBB"


def test_unknown_counts_where_it_matters(read):
    """With one sure breach the other decides; without one nothing can come of it."""
    both = Join(all=("a", "b"), within=1)

    assert read(both.start(), _rows("B...", ".?..")) == "o?oo"
    assert read(both.start(), _rows("....", ".?..")) == "oooo"
    assert read(Join(any=("a", "b"), within=1).start(), _rows("?...", "....")) == "??oo"


def test_a_breach_is_remembered_before_an_unknown(read):
    """A NaN after the breach does not hide it."""
    assert read(Join(all=("a", "b"), within=2).start(), _rows("B??", "..B")) == "ooB"


def test_within_counts_steps_also_over_a_gap():
    """Lost frames do not stretch it."""
    watch = Join(all=("a", "b"), within=2).start()
    watch.feed((BREACH, OK), 0)

    assert watch.feed((OK, BREACH), 3) == OK
    assert watch.feed((BREACH, OK), 5) == BREACH


def test_rewind_forgets(read):
    """What breached belonged to the undone life."""
    watch = Join(all=("a", "b"), within=5).start()
    read(watch, _rows("B", "."))

    watch.rewind(0)

    assert read(watch, _rows(".", "B"), first=1) == "o"


def test_a_step_that_is_not_newer_is_not_taken():
    """It is read as UNKNOWN and not remembered."""
    watch = Join(any=("a", "b"), within=5).start()
    watch.feed((OK, OK), 5)

    assert watch.feed((BREACH, OK), 5) == UNKNOWN
    assert watch.feed((OK, OK), 6) == OK


def test_the_numbers_say_when_each_breached(read):
    """The last step per name."""
    watch = Join(all=("a", "b"), within=2).start()
    read(watch, _rows("B.", ".B"))

    assert watch.numbers() == {
        "step": 1,
        "value": 2,
        "threshold": 2,
        "within": 2,
        "last_breach": {"a": 0, "b": 1},
    }


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, "all"),
        ({"all": ("a",), "any": ("b",)}, "all"),
        ({"any": ("b",), "within": -1}, "within"),
    ],
)
def test_what_cannot_work_is_refused(fields, key):
    """The complaint names the key."""
    assert [field for field, _ in Join(**fields).check()] == [key]
