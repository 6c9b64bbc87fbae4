"""Sequence: order, span, one match per incident, and what is only possible."""

import pytest

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.core.model.interfaces import NOTE
from supervise.detectors.sequence import Sequence

# One column per stage; "B" breach, "?" unknown, "." ok; time runs downwards in `_rows`.
CODES = {"B": BREACH, "?": UNKNOWN, ".": OK}


def _rows(*columns):
    return [tuple(CODES[letter] for letter in row) for row in zip(*columns, strict=True)]


def _chain(**fields):
    return Sequence(**{"steps": ("grad", "update", "loss"), "within": 3, **fields}).start()


def test_it_matches_in_order_and_only_then(read):
    """Gradient, update, loss; the other way round is no match."""
    assert read(_chain(), _rows("B...", ".B..", "..B.")) == "ooBo"
    assert read(_chain(), _rows("..B.", ".B..", "B...")) == "oooo"


def test_one_step_may_hold_all_stages(read):
    """They are published in one frame; `same_step: false` asks for different steps."""
    assert read(_chain(), _rows("B.", "B.", "B.")) == "Bo"
    assert read(_chain(same_step=False), _rows("B..", "BB.", "BBB")) == "ooB"


def test_the_span_counts_from_first_to_last(read):
    """Three steps are within three, four are not."""
    assert read(_chain(), _rows("B...", ".B..", "...B")) == "oooB"
    assert read(_chain(), _rows("B....", ".B...", "....B")) == "ooooo"


def test_the_latest_start_is_the_one_that_counts(read):
    """An early gradient spike does not hide the one that fits."""
    watch = _chain()

    assert read(watch, _rows("B..B..", "....B.", ".....B")) == "oooooB"
    assert watch.numbers()["match"] == {
        "first_step": 3,
        "last_step": 5,
        "steps": {"grad": 3, "update": 4, "loss": 5},
    }


def test_one_incident_is_one_match(read):
    """After a match the partial ones are gone: loss alone does not match again."""
    assert read(_chain(), _rows("BB...", ".BB..", "..BBB")) == "ooBoo"


def test_until_drops_partial_matches_before_the_stages_of_its_step(read):
    """A checkpoint between update and loss ends it; one in the step of the gradient does not."""
    chain = {"until": "saved"}

    assert read(_chain(**chain), _rows("B...", ".B..", "..B.", "..B.")) == "oooo"
    assert read(_chain(**chain), _rows("B...", ".B..", "..B.", "B...")) == "ooBo"


def test_what_is_possible_is_unknown(read):
    """The update of step 1 is not known: had it breached, this were a match."""
    assert read(_chain(), _rows("B...", ".?..", "..B.")) == "oo?o"
    assert read(_chain(), _rows("????", "????", "????")) == "????"


def test_what_is_certain_is_not_made_unknown(read):
    """An UNKNOWN beside a sure match changes nothing, nor does one that cannot complete it."""
    assert read(_chain(), _rows("B?..", ".B?.", "..B.")) == "ooBo"
    assert read(_chain(), _rows("?...", "....", "..B.")) == "oooo"


def test_an_unknown_until_leaves_a_match_possible_only(read):
    """It may have ended the partial match."""
    assert read(_chain(until="saved"), _rows("B...", ".B..", "..B.", "..?.")) == "oo?o"


def test_attempt_change_may_be_written_and_names_no_detector():
    """It is what `rewind` does anyway."""
    chain = Sequence(("a", "b"), within=3, until="attempt_change")

    assert chain.detectors == ("a", "b")
    assert Sequence(("a", "b"), within=3, until="c").detectors == ("a", "b", "c")


def test_rewind_drops_partial_matches(read):
    """A spike of the undone life does not complete one of the new life."""
    watch = _chain()
    read(watch, _rows("B.", ".B", ".."))

    watch.rewind(0)

    assert read(watch, _rows("..", "..", "BB"), first=1) == "oo"


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


def test_a_step_that_is_not_newer_is_not_taken():
    """Neither for a match nor as health."""
    watch = _chain()
    watch.feed((BREACH, BREACH, OK), 5)

    assert watch.feed((OK, OK, BREACH), 5) == UNKNOWN
    assert watch.feed((OK, OK, BREACH), 6) == BREACH


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"steps": ("a",)}, "steps"),
        ({"within": -1}, "within"),
        ({"within": 1, "same_step": False}, "within"),
        ({"until": "loss"}, "until"),
    ],
)
def test_what_cannot_work_is_refused(fields, key):
    """The complaint names the key."""
    chain = Sequence(**{"steps": ("grad", "update", "loss"), "within": 3, **fields})

    assert [field for field, _ in chain.check()] == [key]
