"""Makes the runs of a canary trial or a drill suite, and keeps what was judged.

Nothing that an arm does may reach the run that it is tried for: `scratch` gives it directories and
an environment of its own, `arm_run` starts and ends it, `outside_writes` notices what it writes
elsewhere. `recorded_arm` reads a run as an arm, `recorded_fault` its alarms and actions, too;
`suite_run` makes the runs of a suite; `trial_log` keeps plans and results, and cites them.
"""
