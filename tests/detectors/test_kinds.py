"""Examples of the kinds: numbers of evidence, and what the slow references do not show."""

import math
import pickle
import random

import pytest

from supervise.core.model import BREACH, HAS_NOTE, OK, UNKNOWN, Note
from supervise.detectors import (
    Band,
    Collapse,
    Cusum,
    Equal,
    Nonfinite,
    Paired,
    Rate,
    Ratio,
    Record,
    RobustZ,
    Sequence,
    Trend,
)

from .test_laws import ALL

NAN, INF = math.nan, math.inf

# ── several kinds ─────────────────────────────────────────────────────────────────────────────────

QUIET = [9.0, 9.0, 10.0, 11.0, 11.0] * 20  # median 10, MAD 1, scale 1.4826; also with a few more
UP = 10.0 + 1.4826 * 1.49  # z = 1.49: each one adds 0.99 at k = 0.5
SMALL_Z = RobustZ("loss", gt=4.0, window=15, min_=8, freeze=8)
SMALL_SUM = Cusum("loss", k=0.5, h=4.0, window=100, min_=8, freeze=8)
BOTH_SUM = Cusum("loss", k=0.5, h=4.0, window=100, min_=8, freeze=8, side="both")


def _flat(level):
    return Band("loss", knots=((0.0, level, 0.0), (100.0, level, 0.0)), width=2.0)


@pytest.mark.parametrize(
    ("detector", "samples", "letters"),
    [
        (SMALL_Z, [2.0] * 15 + [2.0 + 1e-12, 2.007, 2.009], "ooB"),
        (BOTH_SUM, [2.0 + 1e-12 * (i % 7) for i in range(400)], "o" * 300),
        (BOTH_SUM, [0.0] * 100, "o" * 90),
        (_flat(2.0), [2.0 + 1e-12, 2.003, 2.005], "ooB"),
        (_flat(0.0), [0.0, 1e-6], "oB"),
        (Paired("a", gt=1e-6, lt=-1e-6), [(2.0,), (2.0 + 4e-16,), (2.0,)] * 10, "o" * 29),
    ],
)
def test_a_constant_series_does_not_page_on_rounding(read, detector, samples, letters):
    """A scale is a thousandth of the level at least, and bounds are above zero."""
    assert read(detector.start(), samples).endswith(letters)


@pytest.mark.parametrize(
    ("detector", "before", "details"),
    [
        (SMALL_Z, QUIET[:15], {"median": 20.0, "steps": [15, 22]}),
        (Ratio("norm", fast=1, slow=100, gt=2.0, freeze=8), [1.0] * 50, {"reference": 20.0}),
    ],
)
def test_a_lasting_level_becomes_the_baseline_and_says_so(detector, before, details):
    watch = detector.start()
    steps = range(len(before), len(before) + 8)
    for step, sample in enumerate(before):
        watch.feed(sample, step)

    codes = [watch.feed(20.0, step) for step in steps]
    note = watch.note()

    assert codes == [BREACH] * 7 + [BREACH | HAS_NOTE]
    assert watch.feed(20.0, steps.stop) == OK
    assert note.kind == "rebaseline"
    assert note.details.items() >= details.items()
    assert watch.note() == Note()


@pytest.mark.parametrize("name", ALL)
def test_long_runs_take_no_more_memory(name):
    """Also over a gap of a million steps."""
    watch, chance, sizes = ALL[name].start(), random.Random(1), []
    for first in (1_000_000, 1_001_000, 1_002_000, 3_000_000):
        for step in range(first, first + 1000):
            value, other = chance.gauss(2.0, 0.1), float(step // 2)
            rows = {"metric": value, "metrics": (value, other), "metric+detector": (value, OK)}
            watch.feed(rows.get(ALL[name].reads, (OK, OK, OK, OK)), step)
        sizes.append(len(pickle.dumps(watch)))

    assert sizes[-1] < 1.2 * max(sizes[:2])


# ── not finite ────────────────────────────────────────────────────────────────────────────────────


def test_nonfinite_a_large_number_is_still_a_number_and_the_culprit_is_named():
    """The largest floats, whose sum would overflow, are finite."""
    watch = Nonfinite(("loss", "grad")).start()

    assert watch.feed((1.7e308, 1.7e308), 0) == OK
    assert watch.feed((1.5, INF), 7) == BREACH
    assert watch.numbers()["nonfinite"] == ["grad"]


def test_nonfinite_a_metric_that_tells_more_may_come_in_some_steps_only(read):
    """As the norm of the update in short steps: it is there, though not in the step that is bad."""
    watch = Nonfinite(("grad",), without=("update",)).start()

    assert read(watch, [(1.0, 0.1), (1.0, None), (INF, None)]) == "ooo"
    assert read(watch, [(INF, None)] * 31, 3) == "o" * 30 + "B"


def test_nonfinite_a_gap_is_none_where_another_metric_is_there_instead(read):
    """As of the rates of two optimizers that take turns."""
    turns = [(1.0, None)] * 40 + [(None, 2.0)] * 200 + [(1.0, None)] * 40 + [(None, None)] * 70
    codes = read(Nonfinite(("a",), without=("b",), gap=64).start(), turns)

    assert "B" not in codes[:340] and codes.endswith("B" * 7)


@pytest.mark.parametrize(
    ("rows", "breach", "numbers"),
    [
        ([(1.0, 2.0)] * 40 + [(None, 2.0)] * 70, 103, (64.0, 64)),
        ([(1.0, None)] * 40 + [(1.0, 2.0)] + [(None, 2.0)] * 500, None, None),  # turns that meet
        ([(1.0, None)] * 40 + [(None, 2.0)] * 500, None, None),  # another one from here on
        ([(1.0, None)] * 40 + [(None, 2.0)] * 200 + [(None, None)] * 64, 303, (264.0, 264)),
        (
            [(1.0, None)] * 40 + [(None, 2.0)] * 9 + [(1.0, None)] * 40 + [(None, 2.0)] * 200,
            88 + 79 + 64,
            (143.0, 143),
        ),
    ],
)
def test_nonfinite_others_that_step_together_with_a_metric_take_no_turns(
    read, rows, breach, numbers
):
    """As the rates of two groups; and what took turns is missed 8 times its longest one later."""
    watch = Nonfinite(("a",), without=("b",), gap=64).start()
    codes = read(watch, rows[: None if breach is None else breach + 1])

    assert codes.find("B") == (-1 if breach is None else breach)
    if numbers is not None:
        assert (watch.numbers()["value"], watch.numbers()["threshold"]) == numbers


def test_nonfinite_a_rule_is_about_the_metric_that_is_missing():
    """Not about those that may be there instead."""
    assert Nonfinite(("a",), without=("b",), gap=64).subjects == ("a",)


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


def test_nonfinite_a_rollback_beyond_the_window_leaves_turns_as_they_were(read):
    """Of two metrics by turns, the other one's so long that only its samples are left."""
    watch = Nonfinite(("a",), without=("b",), gap=64).start()
    read(watch, [(1.0, None)] * 100 + [(None, 1.0)] * 1000)
    watch.rewind(100)
    assert "B" not in read(watch, [(1.0, None)] * 10 + [(None, 1.0)] * 10, 1100)


def test_nonfinite_steps_that_a_rollback_dropped_are_no_part_of_a_gap(read):
    """Of a metric in every second step, behind a rollback by 300 steps that counts on."""
    watch, rows = Nonfinite(("a",), gap=64).start(), [(1.0,), (None,)]
    watch.rewind(5)  # before its first sample
    read(watch, rows * 200)
    watch.rewind(100)
    assert "B" not in read(watch, [(None,)] + rows * 20, 400)
    assert read(watch, [(None,)] * 140, 441).index("B") == 126
    watch.rewind(100)
    assert read(watch, rows * 20 + [(None,)] * 140, 600).index("B") == 40 + 126


# ── rates and ratios ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("share", "window", "events"), [(0.07, 100, 7), (0.29, 100, 29), (1, 9, 9)]
)
def test_rate_a_share_needs_the_least_count_that_reaches_it(read, share, window, events):
    """In floats 0.07 * 100 is a little more than 7, and 0.29 * 100 a little less than 29."""
    letters = read(Rate("skip", window=window, share_gte=share).start(), [1] * window)

    assert letters.index("B") == events - 1


def test_ratio_the_averages_are_bias_corrected(read):
    """After one sample both are that sample; after 1, 3 a span of 3 gives (0.5 + 3) / 1.5."""
    watch = Ratio("norm", fast=3, slow=9, gt=2.0, min_=1).start()
    read(watch, [1.0, 3.0])

    numbers = watch.numbers()

    assert numbers["fast"] == pytest.approx(3.5 / 1.5)
    assert numbers["reference"] == pytest.approx((0.8 * 1 + 3) / 1.8)
    assert numbers["ratio"] == pytest.approx(numbers["fast"] / numbers["reference"])


@pytest.mark.parametrize("step", [60, 47])
def test_ratio_rewind_goes_back_to_a_mark_not_far_before(read, step):
    """From step 99 to the mark at 47, that of 48 samples: it answers and knows no 1.9."""
    watch = Ratio("norm", fast=1, slow=100, gt=2.0, freeze=64).start()
    read(watch, [1.0] * 80 + [1.9] * 20)
    watch.rewind(step)

    assert watch.feed(1.0, step + 1) == OK
    assert watch.numbers()["samples"] == 48 + 1
    assert watch.numbers()["reference"] == 1.0


def test_ratio_a_step_up_that_stayed_is_a_precedent(read):
    """A ramp doubles; three times as much is news, and so is a step that went again."""
    spec = Ratio("tokens", fast=1, ref=16, gt=1.5, clear=1.1, freeze=8, min_=4, precedent=1.25)
    ramp = [8.0] * 20 + [16.0] * 20 + [32.0] * 20
    watch, again = spec.start(), spec.start()

    assert read(watch, ramp) == "????" + "o" * 16 + "B" * 8 + "o" * 32
    assert "B" in read(watch, [96.0] * 4, 60)
    watch.rewind(15)
    assert "B" in read(watch, [16.0] * 4, 16), "it went back to before the first step up"
    assert "B" in read(again, [8.0] * 20 + [16.0] * 2 + [8.0] * 20)
    assert "B" in read(again, [16.0] * 2, 42)


# ── robust z and cusum ────────────────────────────────────────────────────────────────────────────


def test_robust_z_a_rollback_deeper_than_the_ring_leaves_it_unknown(read):
    watch = SMALL_Z.start()
    read(watch, QUIET[:60])
    watch.rewind(33)

    assert watch.feed(10.0, 34) == UNKNOWN


def test_cusum_small_excesses_add_up_and_a_lasting_drift_becomes_the_baseline(read):
    """One a step: beyond 4 at the fifth; the eighth sample in breach is noted."""
    watch = SMALL_SUM.start()
    read(watch, QUIET)
    watch.rewind(99)  # the sums begin at zero

    assert read(watch, [UP] * 4, first=100) == "oooo"
    assert watch.numbers()["sum"] == pytest.approx(3.96)
    codes = [watch.feed(UP, step) for step in range(104, 107)]
    assert (watch.numbers()["since"], watch.numbers()["direction"]) == (100, "high")
    codes += [watch.feed(UP, step) for step in range(107, 112)]
    note = watch.note()

    assert codes == [BREACH] * 7 + [BREACH | HAS_NOTE]
    assert note.kind == "rebaseline"
    assert (note.details["median"], note.details["steps"]) == (UP, [104, 111])
    assert note.details["before"]["median"] == 10.0
    assert watch.numbers()["sum"] > 4.0  # what it was judged by
    assert watch.feed(UP, 112) == OK
    assert watch.numbers()["sum"] == 0.0


# ── trends and couplings ──────────────────────────────────────────────────────────────────────────


def test_trend_noise_is_no_climb(read):
    """Of 100 flat series as few as 99 % allows."""
    chance, breaches = random.Random(0), 0
    for _ in range(100):
        watch = Trend("loss", window=160, slope_per_1k_gt=0.0, confidence=0.99).start()
        breaches += read(watch, [chance.gauss(2.0, 0.1) for _ in range(160)])[-1] == "B"

    assert breaches <= 4


CODES = {"B": BREACH, "?": UNKNOWN, ".": OK}


def _rows(*columns):
    return [tuple(CODES[letter] for letter in row) for row in zip(*columns, strict=True)]


CHAIN = Sequence(("grad", "update", "loss"), within=3)


def test_sequence_a_near_miss_is_noted_once_when_its_time_is_over():
    """Of more than one stage, else every blip would be one."""
    watch, pair = CHAIN.start(), Sequence(("a", "b"), within=1).start()
    rows = _rows("BB......", ".B......", "........")

    codes = [watch.feed(row, step) for step, row in enumerate(rows)]

    assert [step for step, code in enumerate(codes) if code & HAS_NOTE] == [5]
    note = watch.note()
    assert note.kind == "near_miss"
    assert note.details["steps"] == {"grad": 1, "update": 1}
    assert note.details["lacking"] == "loss"
    blips = [pair.feed(row, step) for step, row in enumerate(_rows("B.....", "......"))]
    assert not any(code & HAS_NOTE for code in blips)


# ── equal and paired ──────────────────────────────────────────────────────────────────────────────


NOISE = [random.Random(seed).gauss(2.3, 0.03) for seed in range(64)]
LINE = [4.0 - 0.02 * i for i in range(64)]


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
        (LINE, 2.72, False),  # it may have converged
        ([*LINE, 2.745], 2.715, True),
    ],
)
def test_equal_a_repetition_unlike_its_past(value, before, repeats, read):
    spec = Equal("a", to="previous", law="changing", unlike_past=True, for_=32)

    letters = read(spec.start(), [(each,) for each in [*before, *[value] * 40]])

    assert ("B" in letters) == repeats
    assert "B" not in letters[: len(before) + 32]


@pytest.mark.parametrize(
    ("lengths", "limit"),
    [
        ([1] * 8, 2),  # `for` alone
        ([1] * 8 + [4, 1, 1, 4, 1, 1], 4),
        ([3] * 2, 12),  # nobody saw the first of the first
        ([3] + [4] * 8, 4),
        ([3, 6, 3, 8, 5, 7, 2, 9, 3], 16),
        ([1] * 32 + [4] * 8, 7),
        ([3] + [4] * 12 + [300] + [4] * 9, 4),
        ([1] * 32 + [9] + [1] * 12, 2),
    ],
)
def test_equal_the_longest_repetition(lengths, limit, read):
    """Of values that stay for some steps each, only one that stays by no chance is unlike them."""
    spec = Equal("a", to="previous", law="changing", longest=True, for_=2)
    before = [float(i) for i, length in enumerate(lengths) for _ in range(length)]

    letters = read(spec.start(), [(each,) for each in [*before, *[-1.0] * 20]])

    assert letters[len(before) :].index("B") == limit


def test_paired_the_raw_code_is_of_evaluations_only(read):
    """Couplings must not see one evaluation for a thousand steps."""
    watch = Paired("a", gt=0.1).start()
    read(watch, [(1.0,), (2.0,)])
    assert watch.raw == BREACH

    assert watch.feed((None,), 2) == BREACH
    assert watch.raw == UNKNOWN


# ── curves ────────────────────────────────────────────────────────────────────────────────────────


def test_band_the_numbers_say_what_is_inside_between_two_knots():
    """At step 15 the level is 3 and the spread 0.3, so 2.4 to 3.6 is inside."""
    knots = ((10.0, 4.0, 0.5), (20.0, 2.0, 0.1), (40.0, 2.0, 0.1))
    watch = Band("loss", knots=knots, width=2.0).start()

    assert watch.feed(3.61, 15) == BREACH
    numbers = watch.numbers()
    assert (numbers["level"], numbers["spread"]) == (3.0, pytest.approx(0.3))
    assert (numbers["low"], numbers["high"]) == (pytest.approx(2.4), pytest.approx(3.6))
    assert numbers["distance"] == pytest.approx(0.61 / 0.3)


SHARED = ((0.0, 3.0, 0.0), (0.5, 1.5, 0.01), (1.0, 1.0, 0.01))
THIN = tuple((x, level, 0.0) for x, level, _ in SHARED)


def _collapse(knots=SHARED):
    return Collapse("loss", knots=knots, total_steps=1000, smooth=10).start()


def _run(final=2.0, worse=0.0):
    """A run that ends at `final`, worse than its curve by so much of it from step 600 on."""
    parts = [(step + 1) / 1000 for step in range(1000)]
    shape = [3.0 - 3.0 * x if x <= 0.5 else 2.0 - x for x in parts]
    return [final * (x + (worse if step >= 600 else 0.0)) for step, x in enumerate(shape)]


def test_collapse_a_residual_that_lasts_is_a_breach(read):
    """4 % over a bound of 3 %: seen once the mean is past it, and 20 steps later."""
    watch = _collapse()
    reading = read(watch, _run(worse=0.04))

    first = reading.index("B")
    assert first == 600 + 7 + 20
    assert set(reading[first:]) == {"B"}
    assert watch.numbers()["since"] == 607
    assert watch.numbers()["threshold"] == pytest.approx(0.03)
    assert watch.numbers()["residual"] == pytest.approx(0.04)


@pytest.mark.parametrize(("worse", "breach"), [(0.0049, False), (0.0051, True)])
def test_collapse_the_margin_holds_where_the_spread_is_nothing(read, worse, breach):
    assert ("B" in read(_collapse(THIN), _run(worse=worse))) == breach


def test_collapse_huge_samples_are_no_numbers(read):
    run = _run()
    run[300:360] = [1e308, -1e308, INF] * 20

    assert read(_collapse(), run)[-1] == "o"


def test_collapse_a_rollback_into_the_alignment_aligns_again(read):
    watch = _collapse()
    read(watch, [*_run(final=2.0)[:350], *_run(final=3.0)[350:520]])
    watch.rewind(349)
    read(watch, _run(final=2.0)[350:520], first=350)

    assert watch.numbers()["scale"] == pytest.approx(2.0)


# ── record ────────────────────────────────────────────────────────────────────────────────────────

FOUR = [2.0, 2.1, 1.9, 2.0] * 10
EXCURSION = [10.0] * 12


@pytest.mark.parametrize(
    ("samples", "letters"),
    [
        # The first of its size is one; the same once more 20 samples later is none.
        ([*FOUR, 10.0, *FOUR[:20], 10.0, 2.0, 2.0, 2.0, 2.0, 30.0], "B" + "o" * 25 + "B"),
        # An excursion is no precedent of its own, until the median has followed it.
        ([*FOUR, *EXCURSION], "B" * 9 + "o" * 3),
        # Three usual samples do not end it, four do (`calm`).
        ([*FOUR, 10.0, 2.0, 2.0, 2.0, 10.0], "B"),
        ([*FOUR, 10.0, 2.0, 2.0, 2.0, 2.0, 10.0], "o"),
        # What is older than the window of 64 samples is forgotten.
        ([*FOUR, 10.0, *[2.0] * 63, 10.0], "o"),
        ([*FOUR, 10.0, *[2.0] * 64, 10.0], "B"),
        # Two levels by turns are both usual: a robust z of either is beyond any bound.
        (([2.0] * 5 + [14.0] * 5) * 8, "o" * 70),
        # A log-likelihood below zero is judged like any other loss.
        ([*[x - 9.0 for x in FOUR], -3.0], "B"),
        # A falling loss lies below its median, and the first one above it is a record.
        ([*[5.0 - 0.05 * step for step in range(40)], 5.5], "o" * 32 + "B"),
    ],
)
def test_a_record_is_further_above_its_past_than_any_other_of_late(read, samples, letters):
    watch = Record("loss", ref=16, window=64, min_=8).start()

    assert read(watch, samples).endswith(letters)
