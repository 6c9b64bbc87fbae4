"""Trials of policies away from a run: scenarios, back-tests, and the conditions of a rule."""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "backtest": (
            "events_of as recording_events, outcomes as backtest_outcomes, run as run_backtest, "
            "shadowed as shadowed_outcomes"
        ),
        "fake_job": "FakeJob",
        "policy_diff": "Change, compare as compare_policies",
        "scenario_runner": (
            "Coverage, MetricSeries, Outcome, ScenarioRunner, engine as scenario_engine, "
            "load_suite, run as run_scenario, run_suite, samples as series_samples"
        ),
        "score": (
            "Act as ScoredAction, Alarm, CAVEAT as SCORE_CAVEAT, Delay, LEAD as LEAD_STEPS, "
            "Label, Outcome as AlarmOutcome, SLACK as SLACK_STEPS, Score, lines as score_lines, "
            "outcome_line, poisson_interval, read_labels, score as score_alarms, "
            "scores as scores_of, table as score_table"
        ),
        "why_not": (
            "blocking as blocking_conditions, if_fired as answer_if_fired, "
            "missing as missing_metrics"
        ),
    },
)
