"""Scores of made-up outcomes against made-up labels."""

from __future__ import annotations

import math

import msgspec
import pytest

from supervise.lab import (
    Alarm,
    BacktestOutcome,
    Delay,
    Label,
    ScoredAction,
    outcome_line,
    poisson_interval,
    score_alarms,
)

SPIKE = Label("r", 100, 110, "loss_spike_recovered")


def _outcome(alarms=(), actions=(), *, spacing=1.0, rows=1000, **extra):
    """Alarms as `(step, severity)` or `(step, severity, "untold")`, actions as `(step, stops)`."""
    made = BacktestOutcome("r", "p", rows=rows, spacing=spacing, probation=50, **extra)
    made.pieces = [(0, round((rows - 1) * spacing), rows)]
    for step, severity, *untold in alarms:
        row = round(step / spacing)
        made.alarms.append(
            Alarm(step, severity, "rule", "inc-1", "opened", "", row, notified=not untold)
        )
    for step, stops in actions:
        row = round(step / spacing)
        made.actions.append(
            ScoredAction(step, "SEV1", "rule", "inc-1", "book", True, True, stops=stops, row=row)
        )
    return made


def _score(outcome, *labels):
    return score_alarms("p", [outcome], labels)


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(0, 0.0, 3.68888), (4, 1.08987, 10.24159), (100, 81.36399, 121.62679)],
)
def test_the_interval_of_a_count_is_close_to_the_exact_one(count, low, high):
    """Against half of the chi-square quantiles of 2k and 2k + 2 degrees of freedom, from tables."""
    assert poisson_interval(count) == pytest.approx((low, high), rel=6e-3, abs=0.015)


@pytest.mark.parametrize(("step", "found"), [(95, True), (94, False), (130, True), (131, False)])
@pytest.mark.parametrize("spacing", [1, 5])
def test_an_alarm_counts_a_little_before_and_after(step, found, spacing):
    """In logged rows: 5 steps apart, it may be five times as many steps."""
    label = Label("r", 100 * spacing, 110 * spacing, "loss_spike_recovered")
    scored = _score(_outcome([(step * spacing, "SEV2")], spacing=spacing), label)

    assert scored.kinds == {"loss_spike_recovered": [int(found), 1]}
    assert scored.false_notices == (not found)
    assert scored.delays == ([(step - 100) * spacing] if found else [])


@pytest.mark.parametrize(
    ("kind", "severity", "found"),
    [
        ("loss_spike_recovered", "SEV2", 1),
        ("divergence", "SEV2", 0),
        ("divergence", "SEV1", 1),
        ("something_new", "SEV2", 1),
    ],
)
def test_some_trouble_must_be_taken_seriously(kind, severity, found):
    """A notice of a divergence does not find it; it is not false either."""
    scored = _score(_outcome([(105, severity)]), Label("r", 100, 110, kind))

    assert scored.kinds[kind] == [found, 1]
    assert scored.false_notices == scored.false_pages == 0
    assert [m.best for m in scored.missed] == ([] if found else [severity])


def test_what_people_are_not_told_of_neither_finds_nor_is_false():
    outcome = _outcome([(105, "SEV2", "untold"), (300, "SEV1", "untold"), (301, "SEV2")])
    scored = _score(outcome, SPIKE)

    assert scored.kinds == {"loss_spike_recovered": [0, 1]}
    assert (scored.false_pages, scored.false_notices) == (0, 1)


@pytest.mark.parametrize("kind", ["benign_hard_data", "probable_restart_first_iteration"])
def test_what_only_looks_like_trouble_is_none(kind):
    scored = _score(_outcome([(100, "SEV1")], [(100, False)]), Label("r", 100, 100, kind))

    assert scored.kinds == {}
    assert (scored.false_pages, scored.false_actions) == (1, 1)


def test_an_alarm_serves_the_label_it_lies_in():
    labels = Label("r", 100, 110, "divergence"), Label("r", 115, 120, "divergence")
    scored = _score(_outcome([(116, "SEV1")]), *labels)

    assert [m.step for m in scored.missed] == [100]
    assert scored.delays == [1]


def test_false_actions_have_a_rate_per_row():
    actions = [(300, False), (340, False), (351, False), (105, False)]
    scored = _score(_outcome([(105, "SEV1")], actions), SPIKE)

    assert scored.false_actions == 2
    assert scored.rows == 1000
    per, low, high = scored.rate(2)
    assert per == pytest.approx(2e4 / scored.rows)
    assert (low, high) == pytest.approx([b * 1e4 / scored.rows for b in poisson_interval(2)])
    assert scored.actions == scored.destructive == 4


def test_a_run_that_was_stopped_for_nothing_sees_nothing_more():
    """What comes later is missed, and is no time without false actions."""
    outcome = _outcome([(20, "SEV1"), (101, "SEV1")], [(20, True), (101, False)])
    scored = _score(outcome, SPIKE)

    assert scored.kinds == {"loss_spike_recovered": [0, 1]}
    assert scored.false_actions == 1
    assert scored.rows <= 20
    assert scored.destructive == 1


def test_a_score_of_nothing_has_no_rate():
    line = score_alarms("p", [], []).line()

    assert line.false_action_rate.per_10k is None
    assert line.delay == Delay(None, None)
    assert math.isnan(score_alarms("p", [], []).rate(0)[0])


def test_names_in_the_code_do_not_change_the_keys_of_the_json():
    """Readers of `--json` find labels under `found`, and what happened to an incident in `what`."""
    outcome = _outcome([(100, "SEV1")])
    line = msgspec.to_builtins(_score(outcome, SPIKE).line())

    assert line["found"] == [
        {"run": "r", "kind": SPIKE.kind, "step": 100, "at": 100, "rule": "rule"}
    ]
    assert "detections" not in line and "delays" not in line
    assert msgspec.to_builtins(outcome_line(outcome))["incidents"][0]["what"] == "opened"
