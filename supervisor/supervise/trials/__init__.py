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
        "arms": "Act, Alarm, Arm, ArmBuilder, FaultArm",
        "drill_findings": (
            "Drill, Runs, departure as loss_departure, finding as drill_finding, "
            "healthy as healthy_runs, lost as lost_steps, monitors as drill_monitors, "
            "moved as moved_metrics, spread_of, unhealthy as unhealthy_runs"
        ),
        "gate_statistics": (
            "Differences, against_target, autocorrelation_time, block_means, "
            "estimate as estimate_difference, look_levels, spent_alpha, student_cdf, "
            "student_quantile, successive_variance"
        ),
        "judgement": (
            "IGNORABLE as IGNORABLE_GUARDS, NAMES as GUARD_NAMES, Plan, arm_order, "
            "filled as filled_gate, is_decided, judge as judge_gate, "
            "missing as missing_metrics, plan_of"
        ),
        "suite_report": (
            "FAULTS as FAULT_SECTION, SuiteReport, TrialPolicy, fault_plot, fault_result, "
            "fault_rows, limits as suite_limits, markdown as suite_markdown, monitor_rows, "
            "suite_page, summary as suite_summary, undetected as undetected_faults"
        ),
        "trial_runs": (
            "SUITE as SUITE_LOG, VERDICT as VERDICT_LOG, arm_environment, by_default, "
            "citation as log_citation, clashes as clashing_options, opened as opened_log, "
            "waves as run_waves, without_refused"
        ),
    },
)
