"""Makes the arms of a canary trial, and keeps what was judged.

Nothing that an arm does may reach the run that it is tried for: `scratch` gives it directories and
an environment of its own, `arm_run` starts and ends it, `outside_writes` notices what it writes
elsewhere. `recorded_arm` reads a run as an arm, `trial_log` keeps plan and verdict.
"""
