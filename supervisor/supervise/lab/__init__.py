"""Trials of policies away from a run: scenarios, back-tests, and the conditions of a rule."""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "backtest": (
            "events_of_run, make_events, backtest_source, run_backtest, load_in_shadow_mode"
        ),
        "fake_job": "FakeJob",
        "policy_diff": "Change, compare_policies",
        "scenario_runner": (
            "Coverage, MetricSeries, Outcome, ScenarioRunner, load_suite, run_suite, parse_series"
        ),
        "score": (
            "ScoredAction, Alarm, SCORE_CAVEAT, Delay, Label, "
            "BacktestOutcome, Score, format_outcomes, outcome_line, poisson_interval, "
            "read_labels, score_alarms, score_policies, format_score_table"
        ),
    },
)
