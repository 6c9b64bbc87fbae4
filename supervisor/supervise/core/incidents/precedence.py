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


def worse(rule: Rule, run: RunbookExecution) -> bool:
    """Return whether a rule is more severe than what a run was started for."""
    return SEVERITIES.index(rule.severity) < SEVERITIES.index(run.severity)


def outranks(policy: Policy, bank: RankMonitor, rule: Rule, run: RunbookExecution) -> bool:
    """Return whether a rule that fires does not wait for the end of a run.

    What is no worse joins: the run is judged by it, too. But a verification goes by frames, and
    learns nothing from silence; what answers that is on no rung.
    """
    aside = rule.runbook not in policy.ladder.rungs
    return worse(rule, run) or (aside and stall.told_by(bank, rule))


def over(incident: Incident, bank: RankMonitor, rule: Rule) -> bool:
    """Return whether a rule fires for frames from before the job was taken back, and for no other.

    Silence is none of them.
    """
    return bank.attempt < incident.recovery.back and not stall.told_by(bank, rule)


def due(
    policy: Policy, banks: Mapping[int, RankMonitor], incident: Incident
) -> Iterable[tuple[Rule, RankMonitor]]:
    """Return the rules that wait and are to be answered now, each with where it fires.

    When the job was taken back meanwhile, a rule is due only if a frame after that is in breach.
    """
    run = incident.run
    for r, rule in enumerate(policy.rules):
        for bank in banks.values() if rule.id in incident.deferred.waiting else ():
            watch = bank.rules[r]
            if not watch.firing or over(incident, bank, rule):
                continue
            calm = incident.recovery.back and watch.code != BREACH
            if not calm and (run is None or outranks(policy, bank, rule, run)):
                yield rule, bank
