"""What was done about an incident and still stands, and how it is taken back.

An action that can be undone leaves its opposite in `Recovery.standing` when it is committed. The
opposite goes when it was carried out, whether by us or by a later step (`resume` after `pause`).
What did not help is taken back before anything else is tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model.action import Action
from .incident import Incident, verb_of
from .recovery import Recovery
from .runbook_execution import RunbookExecution

GOES_BACK = ("rollback", "relaunch")
# When a training is over: its data is no better for the next one, and what trains is not paused.
STAY = ("unquarantine", "resume")
CLEAR = 20  # steps behind the first breach, for a runbook that does not verify; project default


def committed(
    incident: Incident, run: RunbookExecution, action: Action, verb: str, result: Mapping[str, Any]
) -> None:
    """Take note of an action that was done. What a person asked for is not ours to take back."""
    recovery = incident.recovery
    recovery.back = max(recovery.back, int(result.get("attempt", 0)))
    forget(recovery, verb)
    opposite = action.undo()
    if opposite is not None and not run.order.operator:
        recovery.standing.append((run.number, opposite))
    led = bool(incident.rules) and incident.breach_step != recovery.crashed  # by a rule
    if verb in GOES_BACK and led and not run.order.operator:
        clear = max((int(getattr(step, "clear_for", 0)) for step in run.runbook.steps), default=0)
        recovery.beyond = max(recovery.beyond, incident.breach_step)
        recovery.settled = recovery.beyond + (clear or CLEAR)


def forget(recovery: Recovery, verb: str) -> None:
    """The opposite `verb` of what was done was carried out otherwise."""
    recovery.standing = [(n, undo) for n, undo in recovery.standing if verb_of(undo) != verb]


def tried(recovery: Recovery, action: Action) -> None:
    """Take note of an undo that was carried out, or failed: it is not tried again."""
    recovery.standing = [pair for pair in recovery.standing if pair[1] is not action]


def everything(recovery: Recovery) -> list[Action]:
    """Return what takes back all that stands, newest first."""
    return [undo for _, undo in reversed(recovery.standing)]


def left_open(recovery: Recovery, run: RunbookExecution) -> None:
    """Take note of an action that may have been done: its outcome went with its training."""
    action, failure = run.intent.action, run.failure
    if action is None or run.order.operator or failure.undoing or failure.refused:
        return
    opposite = action.undo()
    if opposite is not None and opposite not in everything(recovery):
        recovery.standing.append((run.number, opposite))


def of_training(recovery: Recovery) -> list[Action]:
    """Return what takes back all that would act on the next training, newest first."""
    return [undo for undo in everything(recovery) if verb_of(undo) not in STAY]


def of_run(recovery: Recovery, run: RunbookExecution, sent: int | None) -> list[Action]:
    """Return what takes back this runbook's own steps, newest first.

    Args:
        sent: index of a step that failed after it was asked for, and may have half happened.
    """
    found = [undo for number, undo in recovery.standing if number == run.number]
    if sent is not None:
        found = [undo for undo in found if verb_of(undo) != run.runbook.verbs[sent]]
        opposite = run.runbook.steps[sent].undo()
        found += [] if opposite is None or run.order.operator else [opposite]
    return found[::-1]
