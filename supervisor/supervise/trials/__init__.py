"""Canary trials and drill suites: their runs, what is judged of them, and the reports.

An arm is a run of a trial. `arm_run` makes one: nothing that it does may reach the run that it is
tried for. `recorded_arm` reads one. The gate compares a candidate with a baseline (`judgement`):
the difference of their losses (`gate_statistics`), `guards` that must not get worse, invariants;
`gate_report` has the outcome. A suite injects faults (`suite_run`), and `drill_findings` has what
each drill and each monitor showed; `suite_report` has the outcome. `trial_log` keeps plans and
results, and cites them.
"""
