"""Canary trials and drill suites: their runs, what is judged of them, and the reports.

An arm is a run of a trial. `trial_runs` makes it: nothing that it does may reach the run that it
is tried for; `arms` reads it. The gate compares a candidate with a baseline (`judgement`): the
difference of their losses (`gate_statistics`), guards that must not get worse, invariants;
`gate_report` has the outcome. A suite injects faults; `drill_findings` has the result of each drill
and each monitor, `suite_report` the outcome. `trial_runs` keeps plans and results, and cites them.
"""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "arms": "Act, Alarm, Arm, ArmBuilder, FaultArm, LOSS, MUTED, read_fault",
        "drill_findings": (
            "Drill, Finding, METRICS, Runs, "
            "find_departure, summarize_fault, summarize_healthy_run, "
            "sum_excess_loss, summarize_monitors, find_moved_metrics, spread_of, "
            "explain_unhealthy"
        ),
        "gate_statistics": (
            "Differences, autocorrelation_time, block_means, "
            "estimate_difference, look_levels, spent_alpha, student_cdf, student_quantile, "
            "successive_variance"
        ),
        "judgement": (
            "IGNORABLE_GUARDS, Plan, arm_order, fill_placeholders, is_decided, "
            "judge_gate, find_missing_placeholders, plan_look"
        ),
        "suite_report": (
            "FAULT_HEADER, FaultResult, SuiteReport, fault_plot, fault_result, "
            "fault_rows, describe_limits, render_suite, monitor_rows, suite_page, "
            "summarize_suite, describe_undetected"
        ),
        "trial_runs": (
            "PlannedRun, SUITE_LOG, TrialPolicy, VERDICT_LOG, arm_environment, default_faults, "
            "cite_trial, find_clashes, "
            "open_log, plan_waves, drop_refused"
        ),
    },
)
