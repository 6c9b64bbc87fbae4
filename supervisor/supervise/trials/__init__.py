"""Canary trials and drill suites: their runs, what is judged of them, and the reports.

An arm is a run of a trial. `trial_runs` makes it: nothing that it does may reach the run that it
is tried for; `arms` reads it. The gate compares a candidate with a baseline (`judgement`): the
difference of their losses (`gate_statistics`), `guards` that must not get worse, invariants;
`gate_report` has the outcome. A suite injects faults; `drill_findings` has the result of each drill
and each monitor, `suite_report` the outcome. `trial_log` keeps plans and results, and cites them.
"""
