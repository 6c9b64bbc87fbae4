"""What drills show: the first alarm, misattributed alarms, undetected faults; and the reports."""

from __future__ import annotations

import json
import math
import random
from html import unescape

import pytest

from supervise import trials

LOSS, ONSET, STEPS = "train_loss_raw", 100, 200
SPIKE, BATCH = (
    trials.Drill("lr_spike:factor=10", "lr_spike"),
    trials.Drill("bad_batch", "bad_batch"),
)
climbs, nothing = (lambda after: 0.02 * after), (lambda after: 0.0)
READS = {"rate": {"learning_rate"}, "loss": {LOSS}, "speed": {"step_time"}}


def arm(seed, change=None, *, alarms=(), acts=(), made=STEPS, tokens=64.0, refused="", **more):
    """Return a run; `change` is what the fault adds to the loss, by the steps since."""
    rng = random.Random(seed)
    rows = {}
    for step in range(made):
        loss = 2.0 + rng.gauss(0.0, 0.02)
        loss += change(step - ONSET) if change and step >= ONSET else 0.0
        rows[step] = {LOSS: loss, "tokens_per_update": 64.0 if step < ONSET else tokens}
    return trials.FaultArm(
        trials.Arm("a", rows, exit_code=more.get("code", 0), stopped=more.get("stopped", False)),
        repeated=more.get("repeated", 0),
        injected=ONSET if change and not refused and made > ONSET else None,
        refused=refused,
        alarms=tuple(trials.Alarm(*one) for one in alarms),
        acts=tuple(trials.Act(verb, step, is_done=True) for verb, step in acts),
    )


ACTED_ON = arm(1, acts=[("pause", 60)])


def judged(unattended, acting=None, control=None, fault=SPIKE):
    control = arm(1) if control is None else control
    return trials.summarize_fault(
        trials.Runs(fault, 1, unattended, acting, control), LOSS, STEPS, READS
    )


def test_alarms_and_the_loss_are_dated_from_the_fault_on():
    alarms = [("loss", "SEV1", 125), ("rate", "SEV2", 100), ("loss", "SEV0", 126)]
    acting = arm(1, nothing, acts=[("hold_rate", 101)], repeated=7)

    found = judged(arm(1, climbs, alarms=[*alarms, ("late", "SEV1", STEPS)]), acting)

    assert [(one.rule, one.delay) for one in found.detections] == [("rate", 0), ("loss", 25)]
    assert found.page.rule == "loss"
    assert 4 <= found.departed <= 12
    assert found.harmed and not found.end
    assert found.lost == pytest.approx(sum(map(climbs, range(100))))
    assert (found.lost_acting, found.repeated) == (pytest.approx(0.0), 7)
    assert found.acts == (("hold_rate", 1),)
    assert not found.moved and not found.not_repeatable


def test_an_alarm_that_the_control_has_too_is_not_counted():
    control = arm(1, alarms=[("rate", "SEV2", 104), ("loss", "SEV2", 190)])
    alarms = [("rate", "SEV2", 105), ("loss", "SEV2", 110)]

    found = judged(arm(1, climbs, alarms=alarms), control=control)

    assert [one.rule for one in found.detections] == ["loss"], "earlier than in the control"


def test_a_monitor_of_what_a_fault_leaves_alone_does_not_detect_it():
    found = judged(arm(1, climbs, alarms=[("speed", "SEV1", 103)]))

    assert (found.detections, found.misattributed) == ((), ("speed",))
    assert row_of(found)[0]["best monitor"] == "none"


def test_a_fault_that_moves_what_it_must_leave_alone_is_noticed():
    found = judged(arm(1, nothing, tokens=32.0))

    assert found.moved == (("tokens_per_update", 0),)
    assert not found.harmed and found.detections == ()


def test_a_run_that_ends_early_is_harmed_and_has_no_sum():
    ended = arm(1, nothing, made=150, code=1)
    stopped = arm(1, nothing, made=103, code=143, stopped=True)

    found = judged(ended, stopped)

    assert (found.end, found.harmed) == ("ended after 150 steps with code 1", True)
    assert found.end_acting == "stood still and was stopped after 103 steps"
    assert found.lost is None and found.lost_acting is None


def test_a_fault_that_never_came_with_actions_saves_nothing():
    assert judged(arm(1, climbs), arm(1)).lost_acting is None
    cells, _, _ = row_of(judged(arm(1, climbs), arm(1, nothing)))
    assert (cells["with actions"], cells["actions"]) == ("", "none")


@pytest.mark.parametrize(
    ("unattended", "control", "why"),
    [
        (arm(1, made=50), None, "the job ended before the step of the fault"),
        (arm(1, nothing, refused="no router"), None, "no router"),
        (arm(1, nothing), ACTED_ON, "the healthy run of this seed was acted on"),
        (arm(1, nothing), arm(1, made=5), "too few values of train_loss_raw"),
    ],
)
def test_what_cannot_be_judged_is_excluded(unattended, control, why):
    found = judged(unattended, control=control)

    assert found.excluded == why
    assert not found.harmed and found.lost is None


def test_runs_of_a_job_that_does_not_repeat_itself_are_doubted():
    assert judged(arm(2, climbs)).not_repeatable


@pytest.mark.parametrize(
    ("control", "why"),
    [
        (arm(1), ""),
        (arm(1, made=0, code=127), "ended after 0 steps with code 127"),
        (arm(1, made=150, code=1), "ended after 150 steps with code 1"),
        (arm(1, lambda after: math.nan), "has a train_loss_raw that is not finite"),
    ],
)
def test_a_healthy_run_must_be_whole_to_be_a_control(control, why):
    assert trials.explain_unhealthy(control, LOSS, STEPS, ONSET) == why
    assert trials.explain_unhealthy(arm(1), "val_loss", STEPS, ONSET) == "has no val_loss"
    few = trials.explain_unhealthy(arm(1), LOSS, STEPS, 60)
    assert few == "has 60 values of train_loss_raw before step 60; 64 are needed"


@pytest.fixture
def report():
    """The report of a suite of two seeds."""
    drills = [SPIKE, BATCH, trials.Drill("router", "router")]
    runs = []
    for seed in (1, 2):
        rate = [("rate", "SEV2", 100), ("loss", "SEV1", 125), ("speed", "SEV2", 103)]
        acting = arm(seed, nothing, acts=[("hold_rate", 100)], repeated=7)
        runs.append(trials.Runs(SPIKE, seed, arm(seed, climbs, alarms=rate), acting, arm(seed)))
        alarms = [("loss", "SEV1", 100)] if seed == 1 else []
        jump = arm(seed, lambda after: 3.0 * (after < 5), alarms=alarms)
        runs.append(trials.Runs(BATCH, seed, jump, None, arm(seed)))
    lacking = arm(1, climbs, refused="no router")
    runs.append(trials.Runs(drills[2], 1, lacking, None, arm(1)))
    found = [trials.summarize_fault(one, LOSS, STEPS, READS) for one in runs]
    controls = [
        trials.summarize_healthy_run(1, arm(1, alarms=[("speed", "SEV2", 60)]), LOSS, STEPS),
        trials.summarize_healthy_run(2, arm(2), LOSS, STEPS),
    ]
    return make_report(
        drills,
        found,
        controls,
        means={SPIKE.text: "multiply the learning rate"},
        plots={SPIKE.text: trials.fault_plot(runs[0], found[0], LOSS)},
    )


def make_report(drills, found, controls=(), **more):
    return trials.SuiteReport(
        suite="suite-x",
        command=["python", "<train.py>"],
        policy=trials.TrialPolicy("nano", "0123456789abcdef", []),
        metric=LOSS,
        steps=STEPS,
        fault_step=ONSET,
        seeds=[1, 2],
        acts=True,
        notes=[],
        rules={},
        healthy=controls,
        faults=[trials.fault_result(drill, found) for drill in drills],
        **{"means": {}, "plots": {}, "monitors": trials.summarize_monitors(found, controls)} | more,
    )


def test_monitors_are_ranked_and_a_fault_has_the_columns_of_its_best_one(report):
    ranked = [monitor.rule for monitor in report.monitors]
    rows = {row[0]: row for row in trials.monitor_rows(report)}

    assert ranked == ["rate", "loss", "speed"], "false alarms last"
    assert rows["rate"][2].endswith(" ahead)")
    assert rows["loss"][3].endswith("bad_batch (with it, 1 of 2)")
    assert rows["speed"][5] == "1"
    cells = [dict(zip(trials.FAULT_HEADER, row, strict=True)) for row in trials.fault_rows(report)]
    spike, batch, router = cells
    assert (spike["best monitor"], spike["alarm"], spike["page"]) == ("SEV2 rate", "0", "25")
    assert spike["lead"].endswith(" ahead") and spike["harm"] == "2 of 2"
    assert spike["with actions"] == "0, 7 steps again" and spike["actions"] == "hold_rate"
    assert (batch["best monitor"], batch["alarm"]) == ("SEV1 loss", "0 (1 of 2)")
    assert router["best monitor"] == "not judged: no router"
    missed = "bad_batch: no alarm in 1 of 2 runs; the loss leaves its band, and ends no worse"
    assert trials.describe_undetected(report) == [missed]
    assert (
        "speed has alarms during lr_spike:factor=10, which change nothing that it measures: not "
        "counted above"
    ) in trials.describe_limits(report)
    assert trials.summarize_suite(report) == (
        "2 faults. Harmful: 1, 1 of them paged in every run. With a monitor ahead of the loss: 1. "
        "With a run without an alarm: 1. False alarms: 1 in 2 healthy runs of 400 steps in all"
    )


def row_of(*found):
    """Return the cells of a fault by column, undetected faults, and the limits of the suite."""
    report = make_report([SPIKE], found, monitors=[])
    (row,) = trials.fault_rows(report)
    cells = dict(zip(trials.FAULT_HEADER, row, strict=True))
    return cells, trials.describe_undetected(report), trials.describe_limits(report)


ENDED = "ended after 150 steps with code 1"


LOWER = "the loss ends lower, so it does not measure what this fault does"


@pytest.mark.parametrize(
    ("unattended", "missed"),
    [
        (arm(1, nothing, made=150, code=1), f"harm, the run {ENDED}"),
        (arm(1, lambda after: -1.0), LOWER),
    ],
)
def test_a_run_without_an_alarm_is_named(unattended, missed):
    cells, undetected, _ = row_of(judged(unattended))

    assert undetected == [f"lr_spike:factor=10: no alarm; {missed}"]
    assert cells["best monitor"] == "none" and (ENDED in missed) == (cells["lost"] == ENDED)


def test_the_best_monitor_is_not_dated_by_another_one():
    early = [("early", "SEV1", 100), ("late", "SEV1", 130)]
    found = [judged(arm(1, climbs, alarms=alarms)) for alarms in (early, early, early[1:])]

    cells, _, _ = row_of(*found)

    assert (cells["best monitor"], cells["alarm"]) == ("SEV1 late", "30")
    assert cells["lead"].endswith(" behind")


def test_a_seed_that_was_not_judged_is_a_limit():
    acted = judged(arm(1, climbs), control=ACTED_ON)

    cells, _, found = row_of(judged(arm(1, climbs)), acted)

    assert cells["harm"] == "1 of 1"
    assert found == [
        "lr_spike:factor=10, seed 1: not judged: the healthy run of this seed was acted on"
    ]


def test_the_page_and_the_tables_hold_it_all(report):
    page, table = trials.suite_page(report), trials.render_suite(report)

    for text in ("python <train.py>", "SEV2 rate", "not judged: no router", "no alarm in 1 of 2"):
        assert text in unescape(page)
    for tag in ("section", "table", "tr", "td", "svg", "p"):
        assert page.count(f"<{tag}>") + page.count(f"<{tag} ") == page.count(f"</{tag}>")
    assert "<train.py>" not in page
    assert "| lr_spike:factor=10 | SEV2 rate | 0 | 25 |" in table
    assert "Undetected faults:" in table and "Limits of this suite:" in table
    assert not math.isnan(json.loads(report.encode())["faults"][0]["lost"]["median"])


def test_runs_come_in_waves_with_names_of_their_own():
    waves = trials.plan_waves([SPIKE, BATCH], 2, 3, acts=True)

    assert [[run.name for run in wave] for wave in waves[:2]] == [
        ["healthy-1", "healthy-2", "healthy-3"],
        ["lr_spike-factor=10-1-unattended", "bad_batch-1-unattended"],
    ]
    assert len(waves[2]) == 6
    assert {run.drill for run in trials.drop_refused({BATCH.text: "no"}, waves[2])} == {SPIKE}
    assert len(trials.plan_waves([SPIKE], 2, 2, acts=False)[2]) == 1
    alike = [trials.Drill(f"lr_spike:factor=1e{sign}3", "lr_spike") for sign in "-+"]
    assert trials.find_clashes([SPIKE, *alike]) == ["lr_spike:factor=1e+3"]
    assert trials.default_faults(["bad_batch", "crash", "lr_spike"]) == ["bad_batch", "lr_spike"]


# ── when a loss leaves the band of its healthy control, and what is lost against it ───────────────


BEGIN, END = 200, 400


def healthy(seed=0, noise=0.05):
    rng = random.Random(seed)
    return {s: 2.0 + 3.0 / (1.0 + s / 20.0) + rng.gauss(0.0, noise) for s in range(END)}


def with_fault(control, change):
    return {s: v + (change(s - BEGIN) if s >= BEGIN else 0.0) for s, v in control.items()}


def test_a_spread_is_that_of_the_noise_and_not_of_the_trend():
    assert trials.spread_of(healthy(), BEGIN) == pytest.approx(0.05, rel=0.3)
    assert trials.spread_of(healthy(), 30) == pytest.approx(0.05, rel=1.0), "in a steep fall"
    assert math.isnan(trials.spread_of(healthy(), 5)), "too few"


@pytest.mark.parametrize(
    ("change", "step"),
    [
        (lambda after: 0.0, None),
        (lambda after: 0.06, None),  # within 4 spreads of a median of 20
        (lambda after: 1.0 if after == 7 else 0.0, 7),
        (lambda after: -1.0 if after == 7 else 0.0, 7),  # a loss that falls has left it, too
        (lambda after: 0.2, 19),  # a level, once there are 20 of it
        (lambda after: 0.01 * after, 20),
        (lambda after: math.nan if after == 3 else 0.0, 3),
    ],
)
def test_a_loss_leaves_its_band(change, step):
    control = healthy()

    departure = trials.find_departure(with_fault(control, change), control, BEGIN)

    assert (departure is None) == (step is None)
    assert step is None or abs(departure.step - BEGIN - step) <= 3


def test_the_excess_loss_is_the_sum_over_the_steps_that_both_have():
    control = healthy()
    run = with_fault(control, lambda after: 0.5 if after < 10 else 0.0)

    assert trials.sum_excess_loss(run, control, BEGIN) == pytest.approx(5.0)
    assert trials.sum_excess_loss({**run, END: 9.0}, control, BEGIN) == pytest.approx(5.0)
    assert trials.sum_excess_loss({**run, 300: math.nan}, control, BEGIN) == math.inf
    assert trials.sum_excess_loss(control, control, BEGIN) == 0.0


def test_a_metric_that_must_stand_still_is_compared_with_its_twin():
    rate = {s: 1e-3 * min(1.0, (s + 1) / 50) for s in range(END)}
    tokens = dict.fromkeys(range(END), 768.0)
    falling = {s: 1e-3 * (1.0 + math.cos(math.pi * s / END)) for s in range(END)}

    assert trials.find_moved_metrics(rate, rate, BEGIN, END) is None
    assert trials.find_moved_metrics({**rate, 250: 2e-3}, rate, BEGIN, END) == 250
    assert trials.find_moved_metrics({**tokens, 201: 767.0}, tokens, BEGIN, END) == 201
    assert trials.find_moved_metrics({**tokens, 150: 1.0, 390: 1.0}, tokens, BEGIN, 380) is None
    assert trials.find_moved_metrics(tokens, {BEGIN: 1.0}, BEGIN, END) is None, (
        "nothing to compare with"
    )
    doubled = {s: v * (2.0 if s == 250 else 1.0) for s, v in falling.items()}
    assert trials.find_moved_metrics(doubled, falling, BEGIN, END) == 250, "a schedule is no noise"


def test_steps_at_which_the_control_is_not_finite_tell_nothing():
    control = {**healthy(), 250: math.nan}
    run = {**healthy(), 250: math.nan, 260: 9.0}

    assert trials.find_departure(run, control, BEGIN).step == 260
    assert trials.sum_excess_loss(run, control, BEGIN) == pytest.approx(9.0 - control[260])
