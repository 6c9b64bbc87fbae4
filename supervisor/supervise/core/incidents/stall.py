"""A job that makes no step: which rules tell of it, and what may be said of the job.

Pure questions: nothing is decided, said or done.
"""

from __future__ import annotations

from ..detection.rank_monitor import RankMonitor
from ..model.policy import Policy, Rule
from ..state.run_state import State

SILENT_S = 900.0  # longer than an evaluation or a checkpoint; project default


def reports_stall(monitor: RankMonitor, rule: Rule) -> bool:
    """Return whether a rule is in breach because something did not come."""
    readings = monitor.numbers(rule).values()
    return any("signal" in one and one.get("code") == "BREACH" for one in readings)


def job_status(policy: Policy, state: State) -> str:
    """Return how it is with the job while nothing is done about it, as a clause."""
    if state.job.returncode is not None:
        return "the job has ended"
    if state.job.paused:
        return "the job is paused"
    if any(_is_stalled(policy, state.at_ns, monitor) for monitor in state.monitors.values()):
        return f"the job is stalled at step {state.step}"
    return "the job continues"


def _is_stalled(policy: Policy, at_ns: int, monitor: RankMonitor) -> bool:
    rules = zip(policy.rules, monitor.rules, strict=True)
    if any(watch.firing and reports_stall(monitor, rule) for rule, watch in rules):
        return True
    frames = monitor.history.frames
    return bool(frames) and at_ns - frames[-1].at_ns > SILENT_S * 1e9
