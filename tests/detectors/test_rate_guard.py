"""Rate guard: rates that leave what their own schedule has shown, and schedules that do not."""

import math
from copy import deepcopy

import pytest

from supervise.core.model import HAS_NOTE
from supervise.detectors import RateGuard

ROWS = 1200


def warmed(schedule, rows=100):
    """Return a schedule of the rows behind a linear warm-up from zero."""
    return lambda i: i / rows if i < rows else schedule((i - rows) / (ROWS - rows))


def cosine(part):
    return 0.5 * (1 + math.cos(math.pi * part))


SCHEDULES = {
    "constant": lambda i: 1.0,
    "linear": warmed(lambda part: 1.0 - part),
    "quadratic": lambda i: min((i / 200) ** 2, 1.0),
    "exponential": lambda i: min(1e-6 * 1.2 ** min(i, 90), 1.0),
    "exponential, doubled each row": lambda i: min(1e-6 * 2.0 ** min(i, 20), 1.0),
    "from almost zero": lambda i: 1e-8 if i == 0 else min(i / 10, 1.0),
    "every fourth row": lambda i: min((i // 4) / 50, 1.0),
    "inverse square root": lambda i: min((i + 1) * 100**-1.5, (i + 1) ** -0.5),
    "cosine": warmed(cosine),
    "cosine to nearly zero and up again": lambda i: 1e-3 + cosine(i / 300),
    "WSD": warmed(lambda part: min(1.0, 5 * (1 - part))),
    "one cycle": lambda i: 1 - cosine(i / 360) * 0.96 if i < 360 else cosine((i - 360) / 840),
    "triangular cycles": lambda i: 0.1 + abs((i / 200) % 2 - 1),
    "warm restarts": lambda i: cosine(i % 150 / 150),
    "warm restarts, longer each time": lambda i: cosine(i / 400 if i < 400 else i / 800 % 1),
    "step decay": lambda i: 0.1 ** (i // 300),
    "by turns": lambda i: 1.0 if i % 2 else 0.1,
    "a warm-up in ten rows": lambda i: min((i + 1) / 10, 1.0),
}


@pytest.fixture
def settled(read):
    """Return a function that makes a watch of 100 rows at 1."""

    def _settled(*metrics, **fields):
        watch = RateGuard(metrics or ("a",), **fields).start()
        width = len(watch.spec.metrics)
        assert read(watch, [[1.0] * width] * 100) == "?" * 16 + "o" * 84
        return watch

    return _settled


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_no_jump(read, name):
    rates = [[SCHEDULES[name](i)] for i in range(ROWS)]

    assert "B" not in read(RateGuard().start(), rates)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("row", [130, 600])
def test_three_times_the_greatest_so_far_is_one(read, name, row):
    rates = [[SCHEDULES[name](i)] for i in range(ROWS)]
    top = max(rate for (rate,) in rates[:row])
    rates[row] = [3 * top]

    assert read(RateGuard().start(), rates)[row - 1 : row + 2] == "oBo"


def test_a_jump_lasts_until_the_rate_is_back(read, settled):
    rates = [1.51, 1.0, 1.6, 30.0, 9.0, 1.6, 1.5, 0.3, 1.4]

    assert read(settled(), [[rate] for rate in rates], 100) == "BoBBBBooo"


def test_growth_is_no_jump_and_a_warm_up_again(read, settled):
    watch = settled()

    assert read(watch, [[1.4], [2.0], [2.9], *[[4.4]] * 65, [6.7]], 100) == "o" * 68 + "B"
    first = RateGuard(("a",)).start()  # a warm-up may grow by more than half
    assert read(first, [[0.01 * i] for i in range(40)]) == "?" * 16 + "o" * 24
    assert read(first, [[0.97], [1.2], [2.5], [6.3]], 40) == "oooB"


def test_a_scheduler_announces_what_it_does(read, settled):
    """Of the first group; the others may rise as far."""
    watch = settled("a", "b", announced=("e",))

    assert read(watch, [[10.0, 10.0, 10.0]], 100) == "o"
    assert read(watch, [[100.0, 10.0, 10.0], [10.0, 100.0, 10.0]], 101) == "BB"
    assert watch.numbers()["metric"] == "b"
    assert read(watch, [[10.0, 10.0, 10.0], [40.0, 100.0, 40.0]], 103) == "oB"
    first = RateGuard(("a",), announced=("e",)).start()  # against the rate before
    read(first, [[1.0, None]] * 100)
    assert read(first, [[2.0, 2.0], [2.0, None], [9.0, None]], 100) == "ooB"
    scaled = settled("a", announced=("e", "s"))  # a scale of ours that is over
    read(scaled, [[1.0, 1.0, 0.1]] * 20, 100)
    assert read(scaled, [[10.0, 1.0, 1.0], [100.0, 1.0, 1.0]], 120) == "oB"


def test_what_the_rate_moves_confirms_a_jump(read, settled):
    watch = settled("a", confirm="u")
    twin, third = deepcopy(watch), deepcopy(watch)

    assert read(watch, [[3.0, 2.8], [3.0, 1.0], [1.0, 1.0]], 100) == "BBo"
    assert read(twin, [[3.0, None], [3.0, None], [3.0, 1.6], [3.0, 9.0]], 100) == "??BB"
    assert read(third, [[3.0, 1.4], [3.0, 2.0], [4.0, 3.0]], 100) == "ooo"
    newest = RateGuard(("a",), confirm="u").start()
    read(newest, [[1.0, 9.0]] * 90 + [[1.0, 2.0]] * 10)
    assert read(newest, [[2.0, 4.0]], 100) == "B"


def test_layers_that_are_thawed_begin_at_any_rate(read, settled):
    watch = settled("a", "b")
    read(watch, [[1.0, 0.0]] * 20, 100)
    late = RateGuard(("a", "b")).start()

    assert read(late, [[1.0, 0.0]] * 100 + [[1.0, 0.5]])[-1] == "o"
    assert read(late, [[1.0, 2.0]], 101) == "B"


def test_what_lasts_is_the_new_level(read, settled):
    watch = settled()

    assert set(read(watch, [[4.0]] * 511, 100)) == {"B"}
    assert watch.feed([4.0], 611) == HAS_NOTE
    assert watch.note().details["reference"] == 4.0
    assert read(watch, [[5.9]], 612) == "o"


def test_what_is_held_is_no_level_however_long_it_lasts(read, settled):
    watch = settled()
    watch.hold_level(held=True)

    assert set(read(watch, [[30.0]] * 700, 100)) == {"B"}
    assert watch.numbers()["breaching"] == 700
    assert watch.numbers()["reference"] == 1.0
    watch.hold_level(held=False)
    assert watch.feed([30.0], 800) == HAS_NOTE
    assert watch.note().details["reference"] == 30.0


def test_going_back_into_a_breach_finds_it_again(read, settled):
    watch = settled()
    read(watch, [[4.0]] * 20, 100)
    watch.rewind(110)

    assert read(watch, [[4.0], [1.0], [1.6]], 111) == "BoB"
    watch.rewind(50)
    assert read(watch, [[1.0], [4.0]], 51) == "oB"
    watch.rewind(-1)
    assert watch.lacks(1)
