"""Examples of the simpler kinds: numbers of evidence, and what the slow references do not show."""

import math
import random

import pytest

from supervise.core.model import BREACH, NOTE_MESSAGE, OK, UNKNOWN, Note
from supervise.detectors import (
    TREND_BLOCKS,
    Band,
    Equal,
    Join,
    Nonfinite,
    Paired,
    Rate,
    Ratio,
    Sequence,
    Threshold,
    Trend,
)


def test_threshold_the_numbers_say_value_bound_and_count():
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


NAN, INF = math.nan, math.inf


def test_nonfinite_a_large_number_is_still_a_number():
    """The largest floats, whose sum would overflow, are finite."""
    watch = Nonfinite(("loss", "grad")).start()

    assert watch.feed((1.7e308, 1.7e308), 0) == OK


def test_nonfinite_step_ids_never_make_it_look_away():
    """A NaN counts also when its step comes twice or the run went back unannounced."""
    watch = Nonfinite(("loss",)).start()
    watch.feed((1.0,), 100)

    assert watch.feed((NAN,), 100) == BREACH
    assert watch.feed((NAN,), 3) == BREACH


def test_nonfinite_the_numbers_name_the_culprit():
    watch = Nonfinite(("loss", "grad")).start()
    watch.feed((1.5, INF), 7)

    assert watch.numbers() == {
        "step": 7,
        "values": {"loss": 1.5, "grad": INF},
        "nonfinite": ["grad"],
    }


NOISE = [random.Random(seed).gauss(2.3, 0.03) for seed in range(64)]


@pytest.mark.parametrize(
    ("before", "value", "repeats"),
    [
        (NOISE, 2.3456788, True),
        (NOISE, 2.34, True),  # a log that rounds
        (NOISE, 1.0, False),  # a limit
        (NOISE, 0.9999999403953552, False),  # the same in float32
        (NOISE, 0.25, False),
        (NOISE[:31], 2.34, False),  # 31 changes
        (NOISE[:32], 2.34, True),
        ([each for each in NOISE for _ in range(5)], 2.34, False),  # every fifth is a sample
        ([each for each in NOISE for _ in range(4)], 2.34, True),
        ([4.0 - 0.02 * i for i in range(64)], 2.72, False),  # it may have converged
        ([4.0 - 0.02 * i for i in range(64)] + [2.745], 2.715, True),
    ],
)
def test_equal_a_repetition_unlike_its_past(value, before, repeats, read):
    spec = Equal("a", to="previous", law="changing", unlike_past=True, for_=32)

    letters = read(spec.start(), [(each,) for each in [*before, *[value] * 40]])

    assert ("B" in letters) == repeats
    assert "B" not in letters[: len(before) + 32]


def test_nonfinite_a_gap_is_measured_by_the_metrics_own_spacing(read):
    """64 steps where it comes in each; a longest one of 20 makes it 160; 31 samples are few."""
    watch = Nonfinite(("a",), gap=64).start()
    assert read(watch, [(1.0,)] * 32 + [(None,)] * 63) == "o" * 32 + "?" * 63
    assert read(watch, [(None,), (NAN,), (None,)], 95) == "Bo?"
    assert watch.numbers()["value"] == 1.0

    sparse = Nonfinite(("a",), gap=64).start()
    rows = [(1.0,)] * 40 + [(None,)] * 19 + [(1.0,)] + [(None,)] * 160
    assert read(sparse, rows).index("B") == 59 + 160
    assert "B" not in read(Nonfinite(("a",), gap=64).start(), [(1.0,)] * 31 + [(None,)] * 500)


def test_rate_a_share_is_of_the_whole_window(read):
    """Half of four is two, also in the first steps of a run: one event is not all of one step."""
    watch = Rate("skip", window=4, share_gte=0.5).start()

    assert read(watch, [1, 1, 0, 0, 0]) == "oBBBo"


@pytest.mark.parametrize(
    ("share", "window", "events"), [(0.07, 100, 7), (0.05, 200, 10), (1, 9, 9)]
)
def test_rate_a_share_needs_the_least_count_that_reaches_it(share, window, events):
    """0.07 of 100 is 7, though 0.07 * 100 is a little more in floats."""
    assert Rate("skip", window=window, share_gte=share).events(share) == events


def test_rate_a_run_that_begins_late_has_lost_nothing():
    """A resumed run starts at step 5000 with a clean record."""
    watch = Rate("skip", window=200, count_gte=1).start()

    assert watch.feed(0.0, 5000) == OK


def test_rate_a_gap_of_a_million_steps_costs_no_memory():
    watch = Rate("skip", window=10, count_gte=1).start()
    watch.feed(0.0, 0)

    assert watch.feed(0.0, 1_000_000) == UNKNOWN
    assert len(watch.missing) <= 20


def _slow(**fields):
    return Ratio("norm", **{"fast": 1, "slow": 100, "gt": 2.0, "freeze": 4, **fields})


def test_ratio_the_averages_are_bias_corrected(read):
    """After one sample both are that sample; after 1, 3 a span of 3 gives (0.5 + 3) / 1.5."""
    watch = Ratio("norm", fast=3, slow=9, gt=2.0, min_=1).start()
    read(watch, [1.0, 3.0])

    numbers = watch.numbers()

    assert numbers["fast"] == pytest.approx(3.5 / 1.5)
    assert numbers["reference"] == pytest.approx((0.8 * 1 + 3) / 1.8)
    assert numbers["ratio"] == pytest.approx(numbers["fast"] / numbers["reference"])


@pytest.mark.parametrize("reference", [{"slow": 100}, {"slow": None, "ref": 20}])
def test_ratio_a_lasting_level_becomes_the_reference_and_says_so(read, reference):
    """The fourth flagged sample is noted, the fifth is OK."""
    watch = _slow(**reference).start()
    read(watch, [1.0] * 50)

    codes = [watch.feed(30.0, step) for step in range(50, 55)]
    note = watch.note()

    assert [bool(code & NOTE_MESSAGE) for code in codes] == [False, False, False, True, False]
    assert codes[4] == OK
    assert (note.kind, note.details["reference"]) == ("rebaseline", 30.0)
    assert watch.note() == Note()


@pytest.mark.parametrize("step", [60, 47])
def test_ratio_rewind_goes_back_to_a_mark_not_far_before(read, step):
    """From step 99 to the mark at 47, that of 48 samples: it answers and knows no 1.9."""
    watch = _slow(freeze=64).start()
    read(watch, [1.0] * 80 + [1.9] * 20)

    watch.rewind(step)
    reading = watch.feed(1.0, step + 1)

    assert reading == OK
    assert watch.numbers()["samples"] == 48 + 1
    assert watch.numbers()["reference"] == 1.0


WINDOW = 10 * TREND_BLOCKS


def _trend(**fields):
    return Trend("loss", **{"window": WINDOW, "slope_per_1k_gt": 0.5, **fields})


def _line(slope_per_1k, steps, noise=0.0, seed=0):
    rng = random.Random(seed)
    return [2.0 + slope_per_1k * step / 1000 + noise * rng.gauss(0, 1) for step in range(steps)]


def test_trend_a_clear_climb_breaches_and_a_gentle_one_does_not(read):
    """The slope of a straight line is found exactly."""
    watch = _trend().start()

    assert read(watch, _line(0.6, WINDOW))[-1] == "B"
    assert watch.numbers()["value"] == pytest.approx(0.6)
    assert read(_trend().start(), _line(0.4, WINDOW))[-1] == "o"


def test_trend_noise_must_not_pass_for_a_climb(read):
    """A flat noisy series is OK over 200 seeds but for the few that 99 % allows."""
    watches = [_trend(slope_per_1k_gt=0.0, confidence=0.99).start() for _ in range(200)]

    wrong = sum(
        read(watch, _line(0.0, WINDOW, noise=0.1, seed=seed))[-1] == "B"
        for seed, watch in enumerate(watches)
    )

    assert wrong <= 8


CODES = {"B": BREACH, "?": UNKNOWN, ".": OK}


def _rows(*columns):
    return [tuple(CODES[letter] for letter in row) for row in zip(*columns, strict=True)]


def test_join_the_numbers_say_when_each_breached(read):
    watch = Join(all=("a", "b"), within=2).start()
    read(watch, _rows("B.", ".B"))

    assert watch.numbers() == {
        "step": 1,
        "value": 2,
        "threshold": 2,
        "within": 2,
        "last_breach": {"a": 0, "b": 1},
    }


def _chain(**fields):
    return Sequence(**{"steps": ("grad", "update", "loss"), "within": 3, **fields}).start()


def test_sequence_the_latest_start_is_the_one_that_counts(read):
    """An early gradient spike does not hide the one that fits."""
    watch = _chain()

    assert read(watch, _rows("B..B..", "....B.", ".....B")) == "oooooB"
    assert watch.numbers()["match"] == {
        "first_step": 3,
        "last_step": 5,
        "steps": {"grad": 3, "update": 4, "loss": 5},
    }


def test_sequence_a_near_miss_is_noted_once_when_its_time_is_over():
    watch = _chain()
    rows = _rows("BB......", ".B......", "........")

    codes = [watch.feed(row, step) for step, row in enumerate(rows)]

    assert [step for step, code in enumerate(codes) if code & NOTE_MESSAGE] == [5]
    note = watch.note()
    assert note.kind == "near_miss"
    assert note.details["steps"] == {"grad": 1, "update": 1}
    assert note.details["lacking"] == "loss"


def test_sequence_one_stage_alone_is_no_near_miss():
    """Else every blip of a two-stage sequence would be one."""
    pair = Sequence(("a", "b"), within=1).start()
    codes = [pair.feed(row, step) for step, row in enumerate(_rows("B.....", "......"))]

    assert not any(code & NOTE_MESSAGE for code in codes)


@pytest.fixture
def letters(read):
    """Feed values of one metric, or pairs of two."""

    def _letters(watch, values, first=0):
        rows = [v if isinstance(v, tuple) else (v,) for v in values]
        return read(watch, rows, first)

    return _letters


def test_equal_a_number(letters):
    watch = Equal("opt_state_finite", to=1.0).start()

    assert letters(watch, [1.0, 0.0, 1.0, None, math.nan, math.inf, 1.0000001]) == "oBo???B"
    assert watch.numbers()["difference"] == pytest.approx(1e-7)
    assert watch.numbers()["threshold"] == 1.0


def test_equal_another_metric_of_the_same_step(letters):
    """Within a share of what is referred to; each of the two may be absent."""
    watch = Equal("learning_rate", with_="learning_rate_expected", tolerance=1e-6).start()
    pairs = [(1e-3, 1e-3), (1.0000005e-3, 1e-3), (1.00001e-3, 1e-3), (1e-4, 1e-3)]

    assert letters(watch, pairs) == "ooBB"
    assert letters(watch, [(None, 1.0), (1.0, None), (1.0, math.nan)], 4) == "???"
    assert watch.spec.metrics == ("learning_rate", "learning_rate_expected")
    assert Equal("a", to=1.0).metrics == ("a",)


def test_equal_a_long_constant_takes_no_memory(letters):
    """Only changes are kept, and of them no more than needed."""
    watch = Equal("a", to="previous").start()
    letters(watch, [1.0] * 2000)
    assert len(watch.values) == 1
    letters(watch, [float(i) for i in range(2000)], 2000)

    assert 256 <= len(watch.values) <= 512


def test_paired_the_raw_code_is_of_evaluations_only(letters):
    """Couplings must not see one evaluation for a thousand steps."""
    watch = Paired("a", gt=0.1).start()
    letters(watch, [1.0, 2.0])
    assert watch.raw == BREACH

    assert watch.feed((None,), 2) == BREACH
    assert watch.raw == UNKNOWN


def test_paired_long_runs_take_no_more_memory(letters):
    watch = Paired("a", key="k", gt=0.1).start()
    letters(watch, [(float(i), float(i // 2)) for i in range(1000)])

    assert 64 <= len(watch.values) <= 128
    assert 64 <= len(watch.keys) <= 128


def test_paired_a_constant_series_does_not_page_on_rounding(letters):
    """Bounds are above zero, so an ulp is not beyond one."""
    watch = Paired("a", gt=1e-6, lt=-1e-6).start()

    assert set(letters(watch, [2.0, 2.0 + 4e-16, 2.0] * 10)) == {"?", "o"}


KNOTS = ((10.0, 4.0, 0.5), (20.0, 2.0, 0.1), (40.0, 2.0, 0.1))


def _band(**fields):
    return Band("loss", **{"knots": KNOTS, "width": 2.0, **fields})


def test_band_lines_between_knots(read):
    """At step 15 the level is 3 and the spread 0.3, so 2.4 to 3.6 is inside."""
    for sample, letter in ((3.59, "o"), (3.61, "B"), (2.41, "o"), (2.39, "B")):
        watch = _band().start()
        assert read(watch, [sample], first=15) == letter
        numbers = watch.numbers()
        assert (numbers["level"], numbers["spread"]) == (3.0, pytest.approx(0.3))
        assert (numbers["low"], numbers["high"]) == (pytest.approx(2.4), pytest.approx(3.6))
        assert numbers["distance"] == pytest.approx((sample - 3.0) / 0.3)


def test_band_a_flat_curve_does_not_page_on_rounding(read):
    """The spread is a thousandth of the level at least."""
    flat = ((0.0, 2.0, 0.0), (100.0, 2.0, 0.0))

    assert read(_band(knots=flat).start(), [2.0 + 1e-12, 2.003, 2.005]) == "ooB"
    zero = ((0.0, 0.0, 0.0), (100.0, 0.0, 0.0))
    assert read(_band(knots=zero).start(), [0.0, 1e-6]) == "oB"
