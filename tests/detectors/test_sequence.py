"""Sequence: order, span, one match per incident, and what is only possible."""

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.core.model.interfaces import NOTE
from supervise.detectors.sequence import Sequence

# One column per stage; "B" breach, "?" unknown, "." ok; time runs downwards in `_rows`.
CODES = {"B": BREACH, "?": UNKNOWN, ".": OK}


def _rows(*columns):
    return [tuple(CODES[letter] for letter in row) for row in zip(*columns, strict=True)]


def _chain(**fields):
    return Sequence(**{"steps": ("grad", "update", "loss"), "within": 3, **fields}).start()


def test_the_latest_start_is_the_one_that_counts(read):
    """An early gradient spike does not hide the one that fits."""
    watch = _chain()

    assert read(watch, _rows("B..B..", "....B.", ".....B")) == "oooooB"
    assert watch.numbers()["match"] == {
        "first_step": 3,
        "last_step": 5,
        "steps": {"grad": 3, "update": 4, "loss": 5},
    }


def test_a_near_miss_is_noted_once_when_its_time_is_over():
    """Gradient and update spiked, the loss did not."""
    watch = _chain()
    rows = _rows("BB......", ".B......", "........")

    codes = [watch.feed(row, step) for step, row in enumerate(rows)]

    assert [step for step, code in enumerate(codes) if code & NOTE] == [5]
    note = watch.note()
    assert note["kind"] == "near_miss"
    assert note["steps"] == {"grad": 1, "update": 1}
    assert note["lacking"] == "loss"


def test_one_stage_alone_is_no_near_miss():
    """Else every blip of a two-stage sequence would be one."""
    pair = Sequence(("a", "b"), within=1).start()
    codes = [pair.feed(row, step) for step, row in enumerate(_rows("B.....", "......"))]

    assert not any(code & NOTE for code in codes)
