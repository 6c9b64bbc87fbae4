"""The band of a loss, and the class of a spike: of made-up curves and of recorded runs."""

from __future__ import annotations

import csv
import gzip
import math
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from supervise.core import (
    Band,
    Evidence,
    classify_spike,
    describe_recurring_onsets,
    detect_input_change,
    find_change,
    find_jump,
    fit_data_level,
    fit_loss_band,
)
from supervise.core.model import ContextEvent, SpikeClass


def curve(steps, seed, noise=0.02):
    """A falling loss, 1.5 + 6 / sqrt(step), with Gaussian noise."""
    random = np.random.default_rng(seed)
    return [(int(t), float(1.5 + 6.0 / math.sqrt(t + 1) + noise * random.normal())) for t in steps]


def theil_sen(points):
    """Return the median of all pairs' slopes over ln(step + 1): the definition."""
    x = np.log(np.array([step for step, _ in points]) + 1.0)
    y = np.array([value for _, value in points])
    i, j = np.triu_indices(len(x), 1)
    return float(np.median((y[j] - y[i]) / (x[j] - x[i])))


@pytest.mark.parametrize("seed", range(2))
def test_the_slope_is_theil_and_sens(seed):
    """Of the medians of blocks of 4: the flatter one of 256 losses and of the newest 128."""
    points = curve(range(500, 756), seed)
    blocks = [
        (
            math.exp(np.mean([math.log(s + 1.0) for s, _ in points[i : i + 4]])) - 1.0,
            float(np.median([v for _, v in points[i : i + 4]])),
        )
        for i in range(0, 256, 4)
    ]
    expected = max(theil_sen(blocks), theil_sen(blocks[-32:]))

    assert fit_loss_band(points, 766).slope == pytest.approx(expected, rel=1e-9)


def test_level_and_spread_are_of_what_the_trend_leaves():
    """Median of 128 and 1.4826 MAD of 256 residuals, the 10 steps before the onset left out."""
    points = [*curve(range(1000), 1), *((t, 99.0) for t in range(990, 1000))]
    points = [p for p in points if p[1] == 99.0 or p[0] < 990]
    band = fit_loss_band(points, 1000)
    pre = np.array(points[990 - 256 : 990])
    left = pre[:, 1] - band.slope * (np.log(pre[:, 0] + 1) - math.log(1001))
    mad = np.median(np.abs(left - band.level))

    assert band.samples == 256
    assert band.level == pytest.approx(np.median(left[-128:]), rel=1e-12)
    assert band.spread == pytest.approx(1.4826 * mad, rel=1e-9)
    assert band.limit == pytest.approx(band.level + max(6 * band.spread, 0.05 * band.level))
    wide = max(4 * band.spread / math.sqrt(50 / 4), 0.01 * band.level)
    assert band.width(50) == pytest.approx(wide)


def test_half_of_the_slope_is_trusted_after_the_onset_and_all_of_it_before():
    """A loss falls ever slower: the forecast lies between the trend and the level."""
    band = fit_loss_band(curve(range(2000), 2), 1000)
    away = math.log(1301) - math.log(1001)

    assert band.slope < 0
    assert band.forecast(1300) == pytest.approx(band.level + 0.5 * band.slope * away, rel=1e-3)
    back = math.log(901) - math.log(1001)
    assert band.forecast(900) == pytest.approx(band.level + band.slope * back)
    assert band.limit_at(1300) < band.limit < band.limit_at(900)


def test_a_loss_above_zero_is_not_expected_below_it():
    learned = fit_loss_band([(step, 0.01 * math.exp(-step / 200)) for step in range(900)], 900)
    away = 0.5 * learned.slope * (math.log(1801) - math.log(901))
    positive = learned.level * math.exp(away / learned.level)
    assert learned.level + away < 0.0 < learned.forecast(1800) == pytest.approx(positive)
    density = fit_loss_band([(step, -1.0 - step / 900) for step in range(900)], 900)
    away = 0.5 * density.slope * (math.log(1801) - math.log(901))
    assert density.forecast(1800) == pytest.approx(density.level + away)


@pytest.mark.parametrize("count", [8, 265])
def test_a_short_past_gives_a_level_and_no_slope(count):
    """Under 256 losses (10 before the onset left out) a warm-up would be taken for a trend."""
    losses = [(step, 2.0 + 0.01 * (step % 3)) for step in range(count)]
    band = fit_loss_band(losses, count)

    assert (band.slope, band.samples) == (0.0, min(count, 256))
    assert band.level == pytest.approx(2.01, abs=0.01)
    assert fit_loss_band(losses[:7], 7) is None and fit_loss_band(losses, 7) is None


def noisy(level, count=300, noise=0.02, seed=3):
    """Return a falling series with log-normal noise, and the course that it follows."""
    random = np.random.default_rng(seed)
    course = [level * (1.0 + math.exp(-i / 150)) for i in range(count)]
    return [(i, c * math.exp(noise * random.normal())) for i, c in enumerate(course)], course


@pytest.mark.parametrize("level", [1e-4, 900.0])
@pytest.mark.parametrize(
    ("shape", "step", "doubt"),
    [
        (lambda i: 1.6, 250, 1),
        (lambda i: 0.4, 250, 1),
        (lambda i: math.nan if i > 1 else 1.0, 252, 0),
        (lambda i: 1.02**i, 250, 12),  # slow: the doubt says so
        (lambda i: 1.0, None, 0),
    ],
)
@pytest.mark.parametrize("hard", [0, 244])
def test_an_onset_is_a_change_against_the_noise_of_the_run(level, shape, step, doubt, hard):
    """A hard batch some steps before is none of it."""
    points, course = noisy(level)
    moved = [
        (i, v * (shape(i - 250) if i >= 250 else 3.0 if i == hard else 1.0)) for i, v in points
    ]
    change = find_change(moved[:290], 252 if doubt < 10 else 275)

    assert (change is None) is (step is None)
    if change is not None:
        assert change.earliest - doubt <= step <= change.latest
        assert abs(change.step - step) <= doubt
        assert change.before == pytest.approx(course[change.step], rel=0.02)


def test_what_is_measured_rarely_began_after_its_newest_healthy_sample():
    points = [(i, 5.0 + 0.01 * (i % 7)) for i in range(0, 400, 20)] + [(400, 9.0), (420, 9.0)]
    change = find_change(points, 405)

    assert (change.earliest, change.step, change.latest) == (381, 400, 400)


@pytest.mark.parametrize("breach", [120, 123])
@pytest.mark.parametrize(
    "samples",
    [
        [0.0697, 0.0753, 0.1028, 0.0746, 1.95],  # a little off, as a falling norm may be
        [0.1150, 0.1140, 0.1120, 0.1110, 20.5],
    ],
)
def test_a_leap_begins_where_it_is_seen(samples, breach):
    """Samples a little off before it are noise; updates skipped for it are no fall."""
    random = np.random.default_rng(1)
    points = [(i, 0.1 + 0.6 * math.exp(-i / 25 + 0.03 * random.normal())) for i in range(64)]
    points += [*zip(range(64, 88, 4), [0.114, 0.118, 0.11, 0.109, 0.112, 0.107], strict=True)]
    points += [*zip(range(88, 121, 8), samples, strict=True)]
    points += [(121, 79.0), (122, 84.0), *((i, 0.0) for i in range(123, 126))]

    change = find_change(points, breach)

    assert (change.earliest, change.step, change.is_up) == (113, 120, True)


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize(
    ("drift", "factor", "step"), [(-8e-3, 1, 120), (8e-3, 1, 120), (0, 2, 117)]
)
def test_what_becomes_nan_begins_there_or_with_a_leap_before_it(seed, drift, factor, step):
    """A norm that drifts with its rate is no beginning; one that doubles in each step is."""
    random = np.random.default_rng(seed)
    course = [1.0 + drift * max(0, i - 102) for i in range(120)]
    noise = np.exp(0.03 * random.normal(size=120))
    points = [(i, 0.25 * course[i] * noise[i] * factor ** max(0, i - 116)) for i in range(120)]

    change = find_change(points + [(i, math.nan) for i in range(120, 130)], 120)

    assert (change.earliest, change.step, change.is_up) == (step, step, True)


COSINE = [0.5e-3 * (1.0 + math.cos(math.pi * (i % 100) / 100)) + 1e-6 for i in range(400)]


@pytest.mark.parametrize(
    ("rates", "highest", "step"),
    [
        ([1e-5 * (i + 1) for i in range(400)], 0.0, None),  # a warm-up
        ([1e-6 * 1.05**i for i in range(260)], 0.0, None),
        ([1e-3 * 0.1 ** (i // 100) for i in range(400)], 0.0, None),  # a staircase
        (COSINE, 0.0, None),  # restarts
        (COSINE[150:], 1e-3, None),
        ([1e-3 * 0.99**i * (30.0 if i >= 200 else 1.0) for i in range(260)], 0.0, 200),
        ([1e-5 * (i + 1) * (8.0 if i == 200 else 1.0) for i in range(260)], 0.0, 200),
        ([0.0] * 200 + [1e-3] * 60, 0.0, None),  # nothing to compare with
    ],
)
def test_a_rate_jumps_where_its_schedule_does_not_explain_it(rates, highest, step):
    jumps = {
        jump.step
        for breach in range(50, len(rates), 10)
        if (jump := find_jump(list(enumerate(rates[: breach + 10])), breach, highest))
    }

    assert jumps == ({step} if step is not None else set())


ONSET = 1000
BAND = Band(onset=ONSET, level=2.0, slope=-0.2, spread=0.02, samples=256)
WIDTH = max(4 * 0.02 / math.sqrt(50 / 4), 0.02)  # of a median of 50
CALM = {"grad_global_norm": (1.0, [1.1] * 60), "update_norm": (0.1, [0.09] * 60)}
WILD = {"grad_global_norm": (1.0, [1.1] * 60), "update_norm": (0.1, [0.4] * 60)}


def after(*pieces):
    """Return `(step, loss)` from the onset on; a piece is `(frames, distance from the trend)`."""
    offsets = [offset for count, offset in pieces for _ in range(count)]
    return [(ONSET + i, BAND.forecast(ONSET + i) + offset) for i, offset in enumerate(offsets)]


def probes(shift, every=25):
    """Return evaluations every 25 steps; `shift` is added after the onset."""
    steps = range(ONSET - 300, ONSET + 360, every)
    return [(s, 2.2 - 0.1 * math.log(s / ONSET) + (shift if s >= ONSET else 0.0)) for s in steps]


SPIKE = Evidence(BAND, after((12, 3.0), (60, 0.0)), CALM, peak=5.0)
PLATEAU = Evidence(BAND, after((12, 3.0), (400, 0.3)), CALM, {"val_loss": probes(0.3)}, peak=5.0)


def test_a_spike_that_comes_back_is_recoverable():
    verdict = classify_spike(SPIKE)
    first = verdict.questions.rejoined

    assert verdict.kind == SpikeClass.RECOVERABLE
    assert (first.answer, first.rejoined_step) == ("yes", ONSET + 12)
    assert first.residual == pytest.approx(0.0, abs=1e-12)
    assert first.band == pytest.approx(WIDTH)
    assert (first.window, first.frames, first.peak) == (50, 72, 5.0)
    left = classify_spike(Evidence(BAND, after((5, 3.0), (80, 0.0), (80, 0.5)))).questions.rejoined
    assert (left.answer, left.rejoined_step) == ("no", ONSET + 5)


def test_the_shift_is_measured_from_the_evaluations_own_trend():
    """Ten before, four after, against numpy's Theil-Sen over ln(step + 1)."""
    random = np.random.default_rng(5)
    points = [(s, v + 0.01 * random.normal()) for s, v in probes(0.05)]
    case = replace(PLATEAU, probes={"val_loss": points})
    second = classify_spike(case).questions.eval_shifted
    before = [p for p in points if p[0] < ONSET][-10:]
    late = [p for p in points if p[0] >= PLATEAU.after[49][0]][-4:]
    x = np.log(np.array([s for s, _ in before]) + 1.0)
    y = np.array([v for _, v in before])
    slope = theil_sen(before)
    level = np.median(y - slope * (x - x[-1]))
    left = y - level - slope * (x - x[-1])
    limit = max(4 * 1.4826 * np.median(np.abs(left)), 0.01 * abs(level))
    shift = np.median([v - level - slope * (math.log(s + 1) - x[-1]) for s, v in late])

    assert second.shift == pytest.approx(shift)
    assert second.limit == pytest.approx(limit)
    assert second.answer == ("yes" if shift > limit else "no")
    assert second.evaluations == (10, 4)


def test_an_evaluation_that_falls_more_slowly_than_its_trend_is_told_by_its_values():
    """It is above the trend and lower than before, which is no damage, and both are said."""
    before = [(step, 3.0 - 0.3 * math.log(step + 1.0)) for step in range(10, ONSET, ONSET // 8)]
    lower = before[-1][1] - 0.05
    late = [(PLATEAU.after[-1][0] + n, lower) for n in range(4)]
    case = replace(PLATEAU, probes={"val_loss": [*before, *late]})
    second = classify_spike(case).questions.eval_shifted

    assert second.answer == "yes" and second.shift > second.limit
    assert second.text.endswith(f": {lower:.3g}, {before[-1][1]:.3g} before")


def test_a_steep_course_that_ends_in_a_rise_is_no_proof_that_an_evaluation_stayed():
    """What it varied by before would hide as much; a logging artefact is not made of it."""
    before = [(step, 40.0 / (1 + step / 20)) for step in range(0, ONSET, ONSET // 9)]
    late = [(PLATEAU.after[-1][0] + n, 1.5 * before[-1][1]) for n in range(4)]
    verdict = classify_spike(replace(PLATEAU, probes={"val_loss": [*before, *late]}))
    second = verdict.questions.eval_shifted

    assert 0.0 < second.shift < second.limit
    assert (second.answer, verdict.kind) == ("unknown", SpikeClass.UNDECIDED)


@pytest.mark.parametrize(
    ("before", "now", "answer"), [(1.0, 4.0, "yes"), (1.0, 4.1, "no"), (0.0, 2.0, "yes")]
)
def test_the_share_of_clipped_steps_may_double_and_two_points_more(before, now, answer):
    case = Evidence(BAND, norms={"grad_clip_rate": (before, [now] * 50)})

    assert classify_spike(case).questions.norms_stayed.answer == answer


@pytest.mark.parametrize(
    ("onsets", "series"),
    [
        ([], False),
        ([10, 1900], False),
        ([10, 1900, 2009], True),
        ([10, 1900, 2010], False),
        ([0, 9000, 15000, 18000], True),
        ([0, 9000, 15000, 21000], False),
        ([0, 6000, 9000, 18000], False),
    ],
)
def test_a_series_is_three_in_two_thousand_or_four_ever_closer(onsets, series):
    assert bool(describe_recurring_onsets(onsets)) is series


ODD = ContextEvent(ONSET, "data", "batch_token_entropy 5.4, 3.3 before")
QUIET = replace(SPIKE, after=after((100, 0.0)), peak=2.0, about_loss=False)
TESTED = ContextEvent(ONSET, "weights", "the weights show no damage")
FEWER = ContextEvent(ONSET, "batch", "tokens_per_update 64, 512 before")
SAME = {"val_loss": probes(0.0)}
SERIES = "3 excursions within 900 steps"


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        (PLATEAU, SpikeClass.PLATEAU, ""),
        (replace(PLATEAU, happened=[ODD]), SpikeClass.DATA, "batch_token_entropy 5.4"),
        (replace(PLATEAU, happened=[TESTED]), SpikeClass.DATA, "the weights show no damage"),
        (replace(PLATEAU, norms=WILD), SpikeClass.STRUCTURAL, ""),
        (replace(PLATEAU, probes=SAME), SpikeClass.ARTEFACT, ""),
        # The batch, then the norms, whatever an evaluation says, or if there is none.
        (replace(PLATEAU, norms=WILD, happened=[ODD]), SpikeClass.DATA, ""),
        (replace(PLATEAU, probes=SAME, norms=WILD), SpikeClass.STRUCTURAL, ""),
        # Updates of fewer tokens are noisier: no matter of the architecture.
        (replace(PLATEAU, norms=WILD, happened=[FEWER]), SpikeClass.CUT, ""),
        (replace(SPIKE, norms=WILD, happened=[FEWER]), SpikeClass.CUT, ""),
        (replace(SPIKE, exhausted=True, happened=[FEWER]), SpikeClass.CUT, ""),
        (replace(SPIKE, happened=[FEWER]), SpikeClass.RECOVERABLE, ""),
        # A step that was skipped is contained, not when it repeats or behind a rollback.
        (replace(QUIET, skipped=[ONSET], bad_losses=1), SpikeClass.CONTAINED, ""),
        (replace(QUIET, skipped=[ONSET, ONSET + 9]), SpikeClass.CONTAINED, ""),
        (replace(QUIET, skipped=[ONSET], bad_losses=2), SpikeClass.NUMERIC, ""),
        (replace(QUIET, skipped=[ONSET], rolled_back=True), SpikeClass.NUMERIC, ""),
        # No evaluation, or one that changed itself: never guessed where the norms are as before.
        (replace(PLATEAU, probes={}), SpikeClass.UNDECIDED, "no evaluation to compare"),
        (replace(PLATEAU, probes={"val_loss": probes(0.3)[:10]}), SpikeClass.UNDECIDED, ""),
        (replace(PLATEAU, artefact="changed"), SpikeClass.UNDECIDED, "itself changed"),
        # It may still come back; too few losses behind the onset, and before it.
        (replace(PLATEAU, after=PLATEAU.after[:100]), SpikeClass.UNDECIDED, ""),
        (Evidence(BAND, after((19, 0.0)), CALM), SpikeClass.UNDECIDED, ""),
        (Evidence(None, after((100, 0.0))), SpikeClass.UNDECIDED, ""),
        # Whatever the curve says.
        (replace(PLATEAU, planned=True), SpikeClass.EXPECTED, ""),
        (replace(PLATEAU, planned=True, nonfinite=ONSET), SpikeClass.NUMERIC, ""),
        (replace(SPIKE, nonfinite=ONSET + 1), SpikeClass.NUMERIC, ""),
        (replace(SPIKE, exhausted=True), SpikeClass.STRUCTURAL, ""),
        # The loss came back, the cause did not leave.
        (replace(SPIKE, recurring=SERIES), SpikeClass.SUSPECT, f"{SERIES}; "),
        (replace(SPIKE, norms=WILD), SpikeClass.SUSPECT, ""),
        # Of a loss that never descended neither is said: its level moves with the policy.
        (replace(PLATEAU, norms=WILD, objective=False), SpikeClass.UNDECIDED, ""),
        (replace(SPIKE, exhausted=True, objective=False), SpikeClass.UNDECIDED, ""),
        (replace(SPIKE, recurring=SERIES, objective=False), SpikeClass.RECOVERABLE, ""),
        (replace(SPIKE, norms=WILD, objective=False), SpikeClass.RECOVERABLE, ""),
        # A hang or a slow step is no excursion of the loss.
        (QUIET, SpikeClass.NO_EXCURSION, ""),
    ],
)
def test_the_evidence_decides_the_class(case, kind, says):
    verdict = classify_spike(case)

    assert verdict.kind == kind
    assert says in f"{verdict.recurring}; {verdict.text}"


# ── the classes on recorded runs: what the labels and the faults' own README say of them ──────────


DATA = Path(os.environ.get("SUPERVISE_DATA", Path(__file__).parents[2] / "../shared/data"))
NAMES = {
    "loss": "train_loss_raw",
    "grad_norm": "grad_global_norm",
    "update_norm": "update_norm",
    "lr": "learning_rate",
    "val_loss": "val_loss",
    "tok_entropy": "batch_token_entropy",
    "skipped": "update_skipped",
}
FAULT_AT = 800

needs_recordings = pytest.mark.skipif(
    not (DATA / "faults").is_dir(), reason=f"no recordings at {DATA}: set SUPERVISE_DATA"
)


@cache
def fault(run):
    """Return the rows of a faulted run, `{metric: value}`."""
    with gzip.open(DATA / "faults" / f"{run}.csv.gz", "rt") as lines:
        return [
            {name: float(row[column]) for column, name in NAMES.items() if row[column]}
            for row in csv.DictReader(lines)
        ]


def series(rows, metric):
    return [(step, row[metric]) for step, row in enumerate(rows) if metric in row]


def classify(run, onset):
    """Classify as of 400 rows after the onset."""
    rows = fault(run)[: onset + 400]
    norms = {}
    for metric in ("grad_global_norm", "update_norm"):
        points = series(rows, metric)
        before = median([v for step, v in points if onset - 266 <= step < onset - 10])
        norms[metric] = (before, [v for step, v in points if step >= onset])
    losses = series(rows, "train_loss_raw")
    after = [point for point in losses if point[0] >= onset]
    return classify_spike(
        Evidence(
            fit_loss_band(losses, onset),
            after,
            norms,
            {"val_loss": series(rows, "val_loss")},
            peak=max(loss for _, loss in after),
        )
    )


@needs_recordings
@pytest.mark.parametrize("run", ["healthy_s0", "healthy_s1", "healthy_b3_s0"])
def test_a_quiet_place_is_in_its_band_whenever_one_looks(run):
    losses = series(fault(run), "train_loss_raw")
    for onset in range(60, 1100, 130):
        band = fit_loss_band(losses, onset)
        for frames in (20, 60, 110, 350):
            after = losses[onset : onset + frames]

            assert classify_spike(Evidence(band, after)).questions.rejoined.answer == "yes"
        assert all(loss <= band.limit_at(step) for step, loss in losses[onset : onset + 110])


@needs_recordings
@pytest.mark.parametrize(
    ("run", "onset", "kind"),
    [
        # Bad data for thirty steps: back 100 to 345 steps later.
        ("label_shuffle_s0", FAULT_AT, SpikeClass.RECOVERABLE),
        ("bad_random_s0", FAULT_AT, SpikeClass.RECOVERABLE),
        ("bad_repeat_s0", FAULT_AT, SpikeClass.RECOVERABLE),
        # A rate that stays wrong: the evaluation and the update norm stay up with the loss.
        ("lr30_s0", FAULT_AT, SpikeClass.STRUCTURAL),
        ("lr10_b3_s0", FAULT_AT + 1, SpikeClass.STRUCTURAL),
        # One that was too low before: the loss comes back, the update norm stays 5 times its past.
        ("lr10_s0", FAULT_AT, SpikeClass.SUSPECT),
        # Damage for good with calm norms.
        ("adam_v0_s0", FAULT_AT, SpikeClass.PLATEAU),
        ("label_shuffle_inf_s0", FAULT_AT, SpikeClass.PLATEAU),
    ],
)
def test_a_recorded_fault_has_the_class_of_its_label(run, onset, kind):
    verdict = classify(run, onset)

    assert verdict.kind == kind, verdict.text


# ── data that come back ───────────────────────────────────────────────────────────────────────────

ENTROPY, TOP, DRIFT = "batch_token_entropy", "batch_top1_share", "batch_token_drift"


def turns(*stretches, every=1):
    """Return the losses and the statistics of tokens, looked at each `every`th step.

    A stretch has a number of steps, a loss, an entropy, and a share of the commonest token.
    """
    random, losses, looks = np.random.default_rng(3), [], {ENTROPY: [], TOP: []}
    for count, loss, entropy, share in stretches:
        for _ in range(count):
            step = len(losses)
            losses.append((step, loss + 0.03 * float(random.normal())))
            if step % every == 0:
                looks[ENTROPY].append((step, entropy + 0.02 * float(random.normal())))
                looks[TOP].append((step, share + 0.003 * float(random.normal())))
    return losses, looks


OWN, OTHER = (1.9, 3.75, 0.065), (4.8, 4.08, 0.031)
TWO = ((160, *OWN), (60, *OTHER), (60, *OWN))  # 160 to 219, and until 280


@pytest.mark.parametrize("every", [1, 4, 16])
def test_tasks_that_take_turns_are_known_the_second_time(every):
    losses, looks = turns(*TWO, (60, *OTHER), every=every)
    level = fit_data_level(looks, losses[:280], 160)

    assert (level.step, level.end) == (160, 220)
    for late in (0, 2, 6):  # steps in which a rule notices it
        assert level.describe_recurrence(looks, losses, 280 + late)


@pytest.mark.parametrize(
    "then",
    [
        (60, 4.8, *OWN[1:]),  # the loss jumps on the same data
        (60, 9.0, *OTHER[1:]),  # and far more on the other ones than when they were new
        (60, 4.8, 3.2, 0.12),  # third data
        (60, 4.8, 4.08, 0.99),
    ],
)
def test_another_reason_of_the_same_rise_is_not_hidden_by_data_of_before(then):
    losses, looks = turns(*TWO, then)
    level = fit_data_level(looks, losses[:280], 160)

    assert level.describe_recurrence(looks, losses, 280) is None


def test_data_of_the_same_statistics_are_known_by_what_drifts():
    """Which tokens came is another thing than how many of each; it is seen at the turns alone."""
    losses, looks = turns((160, *OWN), (60, 4.8, *OWN[1:]), (60, *OWN), (60, 4.8, *OWN[1:]))
    switches, drift = (160, 220, 280), []
    for step, _ in losses:
        since = min((step - at for at in switches if step >= at), default=99)
        drift.append((step, 0.05 + 0.01 * (step % 5) + 1.5 * 0.9**since))
    both = turns(*TWO, (60, *OTHER))[1] | {DRIFT: drift}
    level = fit_data_level(looks | {DRIFT: drift}, losses[:280], 160)

    assert level.describe_recurrence(looks | {DRIFT: drift}, losses, 280)
    calm = [(step, value if step < 280 else 0.06) for step, value in drift]
    assert level.describe_recurrence(looks | {DRIFT: calm}, losses, 280) is None
    for at in (280, 220):  # other data, and those of before
        assert fit_data_level(both, losses[:280], 160).describe_recurrence(
            both, losses[: at + 60], at
        )


def test_one_look_at_a_batch_that_is_far_out_is_no_change_of_the_data():
    """It may be one bad batch, and the weights may be damaged by it."""
    _, looks = turns((160, *OWN), (60, *OTHER), every=16)
    for looked, is_changed in ((1, False), (2, True)):
        until = 160 + 16 * looked - 6
        seen = {name: [p for p in points if p[0] < until] for name, points in looks.items()}
        assert (detect_input_change(seen, 160) is not None) == is_changed


SAMPLES, SAME, OTHERS = "batch_samples_differ", [0.0], [1.0]


@pytest.mark.parametrize(
    ("before", "since", "lasting"),
    [
        (OTHERS * 60, SAME * 9, True),
        ([*SAME, *OTHERS * 59], [*OTHERS * 9, *SAME * 3, *OTHERS], False),
        (SAME * 60, SAME * 9, None),  # a mask, or what is the same by design
        ((SAME + OTHERS * 4) * 12, SAME * 9, None),
        (OTHERS * 60, (SAME + OTHERS * 19) * 6, None),  # one now and then
        ([], SAME * 9, None),
    ],
)
def test_samples_that_are_the_same_since_an_onset_were_others_before(before, since, lasting):
    begin = 100 - len(before)
    points = [*enumerate(before, begin), *enumerate(since, 160)]
    change = detect_input_change({SAMPLES: points}, 160)

    assert (None if change is None else change.lasting) is lasting


def test_tokens_that_changed_are_named_before_samples_that_are_the_same():
    _, looks = turns((160, *OWN), (60, *OTHER))
    points = [(step, float(step < 160)) for step in range(220)]
    change = detect_input_change({**looks, SAMPLES: points}, 160)

    assert "entropy" in change.text and not change.degenerate


@pytest.mark.parametrize(("last", "is_learned"), [(4.8, False), (4.5, False), (3.6, True)])
def test_a_stretch_of_garbage_is_told_from_data_by_what_is_learned_of_it(last, is_learned):
    losses, looks = turns((160, *OWN), (10, *OTHER), (20, last, *OTHER[1:]), (60, *OWN))

    assert fit_data_level(looks, losses, 160).is_learned == is_learned


def test_a_loss_that_stays_up_behind_the_data_is_a_trouble():
    losses, looks = turns(*TWO, (60, *OTHER), (200, OTHER[0], *OWN[1:]))
    level = fit_data_level(looks, losses[:280], 160)

    assert level.describe_recurrence(looks, losses[:440], 280)
    assert level.describe_recurrence(looks, losses, 280) is None


def test_until_a_look_at_the_batches_the_loss_says_it_for_a_few_steps():
    losses, looks = turns(*TWO, (60, *OTHER), every=16)
    level = fit_data_level(looks, losses[:280], 160)
    unseen = {name: [p for p in points if p[0] < 280] for name, points in looks.items()}

    assert "not seen yet" in level.describe_recurrence(unseen, losses[:290], 280)
    assert level.describe_recurrence(unseen, losses, 280) is None


@pytest.mark.parametrize(
    "stretches",
    [
        ((120, *OWN), (60, *OTHER)),  # it is not over
        ((120, *OWN), (60, 4.8, *OWN[1:]), (60, *OWN)),  # the data were the same
        ((120, *OWN), (60, 4.8, 0.1, 0.999), (60, *OWN)),  # they were one token
        ((4, *OWN), (60, *OTHER), (60, *OWN)),  # nothing is known from before it
    ],
)
def test_only_data_that_were_others_and_went_again_are_remembered(stretches):
    losses, looks = turns(*stretches)

    assert fit_data_level(looks, losses, stretches[0][0]) is None
