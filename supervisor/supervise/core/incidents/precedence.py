"""Which trouble goes first, when another one is answered already, and what has to wait.

Pure questions: nothing is decided, said or done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..detection.rank_monitor import RankMonitor
from ..model.decisions import BREACH, SEVERITIES
from ..model.policy import Policy, Rule
from ..state.incident import Incident
from ..state.runbook_execution import RunbookExecution
from . import stall


def is_more_severe(rule: Rule, run: RunbookExecution) -> bool:
    """Return whether a rule is more severe than what a run was started for."""
    return SEVERITIES.index(rule.severity) < SEVERITIES.index(run.severity)


def outranks(policy: Policy, monitor: RankMonitor, rule: Rule, run: RunbookExecution) -> bool:
    """Return whether a rule that fires does not wait for the end of a run.

    What is no worse joins: the run is judged by it, too. But a verification goes by frames, and
    learns nothing from silence; what answers that is on no level.
    """
    aside = rule.runbook not in policy.ladder.levels
    return is_more_severe(rule, run) or (aside and stall.reports_stall(monitor, rule))


def predates_rollback(incident: Incident, monitor: RankMonitor, rule: Rule) -> bool:
    """Return whether a rule fires for frames from before the job was taken back, and for no other.

    Silence is none of them.
    """
    return monitor.attempt < incident.recovery.rolled_back_to and not stall.reports_stall(
        monitor, rule
    )


def due_rules(
    policy: Policy, monitors: Mapping[int, RankMonitor], incident: Incident
) -> Iterable[tuple[Rule, RankMonitor]]:
    """Return the rules that wait and are to be answered now, each with where it fires.

    When the job was taken back meanwhile, a rule is due only if a frame after that is in breach.
    """
    run = incident.run
    for r, rule in enumerate(policy.rules):
        for monitor in monitors.values() if rule.id in incident.deferred.rules else ():
            watch = monitor.rules[r]
            if not watch.firing or predates_rollback(incident, monitor, rule):
                continue
            calm = incident.recovery.rolled_back_to and watch.code != BREACH
            if not calm and (run is None or outranks(policy, monitor, rule, run)):
                yield rule, monitor
