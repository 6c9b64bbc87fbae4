"""Actions of an incident that are still in force, and their reversal.

An action that can be undone leaves its opposite in `Recovery.undos` when it is committed. The
opposite goes when it was carried out, whether by us or by a later step (`resume` after `pause`).
What did not help is taken back before anything else is tried.
"""

from __future__ import annotations

from .incident import Incident, Recovery, RunbookExecution, verb_of
from .model.action import Action
from .model.payload import Outcome, RateArgs, RelaunchArgs

GOES_BACK = ("rollback", "relaunch")
# It limits what comes next, whatever that is: without it what is tried would meet the jump again.
STANDS = ("hold_rate",)
# When a training is over: its data is no better for the next one, and what trains is not paused.
STAY = ("unquarantine", "resume")
CLEAR = 20  # steps behind the first breach, for a runbook that does not verify; project default


def record_committed(
    incident: Incident, run: RunbookExecution, action: Action, verb: str, outcome: Outcome
) -> None:
    """Take note of an action that was done. What a person asked for is not ours to take back."""
    recovery = incident.recovery
    recovery.rolled_back_to = max(recovery.rolled_back_to, outcome.attempt or 0)
    if verb in GOES_BACK:
        recovery.restored_step = outcome.step
        if verb == "relaunch" and outcome.step is None:
            recovery.restored_step = run.intent.args.parse(RelaunchArgs).step
        recovery.loop_kept = verb == "rollback"
    if verb == "hold_rate" and (limit := run.intent.args.parse(RateArgs).limit) is not None:
        recovery.rate_limits.append(limit)
    forget(recovery, verb)
    opposite = action.undo()
    if opposite is not None and not run.requested.operator:
        recovery.undos.append((run.number, opposite))
    led = bool(incident.rules) and incident.breach_step != recovery.crashed  # by a rule
    if verb in GOES_BACK and led and not run.requested.operator:
        clear = max((int(getattr(step, "clear_for", 0)) for step in run.runbook.steps), default=0)
        recovery.must_pass = max(recovery.must_pass, incident.breach_step)
        recovery.probation_step = recovery.must_pass + (clear or CLEAR)


def forget(recovery: Recovery, verb: str) -> None:
    """The opposite `verb` of what was done was carried out otherwise."""
    recovery.undos = [(n, undo) for n, undo in recovery.undos if verb_of(undo) != verb]


def remove(recovery: Recovery, action: Action) -> None:
    """Take note of an undo that was carried out, or failed: it is not tried again."""
    recovery.undos = [pair for pair in recovery.undos if pair[1] is not action]


def all_undos(recovery: Recovery) -> list[Action]:
    """Return what takes back all that stands, newest first."""
    return [undo for _, undo in reversed(recovery.undos)]


def record_uncertain(recovery: Recovery, run: RunbookExecution) -> None:
    """Take note of an action that may have been done: its outcome went with its training."""
    action, failure = run.intent.action, run.failure
    if action is None or run.requested.operator or failure.pending_undos or failure.refused:
        return
    opposite = action.undo()
    if opposite is not None and opposite not in all_undos(recovery):
        recovery.undos.append((run.number, opposite))


def escalation_undos(recovery: Recovery, *, rate_stands: bool) -> list[Action]:
    """Return what takes back all that the next level is not to find, newest first."""
    stand = STANDS if rate_stands else ()
    return [undo for undo in all_undos(recovery) if verb_of(undo) not in stand]


def session_undos(recovery: Recovery) -> list[Action]:
    """Return what takes back all that would act on the next training, newest first."""
    return [undo for undo in all_undos(recovery) if verb_of(undo) not in STAY]


def runbook_undos(
    recovery: Recovery, run: RunbookExecution, sent_index: int | None
) -> list[Action]:
    """Return what takes back this runbook's own steps, newest first.

    Args:
        sent_index: index of a step that failed after it was asked for, and may have half happened.
    """
    undos = [u for n, u in recovery.undos if n == run.number and verb_of(u) not in STANDS]
    if sent_index is not None:
        undos = [undo for undo in undos if verb_of(undo) != run.runbook.verbs[sent_index]]
        opposite = run.runbook.steps[sent_index].undo()
        undos += [] if opposite is None or run.requested.operator else [opposite]
    return undos[::-1]
