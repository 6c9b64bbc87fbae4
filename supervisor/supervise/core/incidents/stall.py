"""A job that makes no step: which rules tell of it, and what may be said of the job.

Pure questions: nothing is decided, said or done.
"""

from __future__ import annotations

from ..detection.rank_monitor import RankMonitor
from ..model.policy import Policy, Rule
from ..state.run_state import State

SILENT_S = 900.0  # longer than an evaluation or a checkpoint; project default


def told_by(bank: RankMonitor, rule: Rule) -> bool:
    """Return whether a rule is in breach because something did not come."""
    readings = bank.numbers(rule).values()
    return any("signal" in one and one.get("code") == "BREACH" for one in readings)


def word(policy: Policy, state: State) -> str:
    """Return how it is with the job while nothing is done about it, as a clause."""
    if state.job.returncode is not None:
        return "the job has ended"
    if state.job.paused:
        return "the job is paused"
    if any(_stands_still(policy, state.at_ns, bank) for bank in state.banks.values()):
        return f"the job stands still at step {state.step}"
    return "the job goes on"


def _stands_still(policy: Policy, at_ns: int, bank: RankMonitor) -> bool:
    rules = zip(policy.rules, bank.rules, strict=True)
    if any(watch.firing and told_by(bank, rule) for rule, watch in rules):
        return True
    frames = bank.history.frames
    return bool(frames) and at_ns - frames[-1].at_ns > SILENT_S * 1e9
