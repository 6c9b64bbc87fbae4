"""Join: near each other, in any order."""

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.detectors.join import Join

CODES = {"B": BREACH, "?": UNKNOWN, ".": OK}


def _rows(*columns):
    return [tuple(CODES[letter] for letter in row) for row in zip(*columns, strict=True)]


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
