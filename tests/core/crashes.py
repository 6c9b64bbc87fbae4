"""A job that crashes, and the runbook that starts it again."""

from __future__ import annotations

from dataclasses import dataclass

from supervise.actions.snapshot import Snapshot
from supervise.core.model.action import Action, Refused
from supervise.core.model.events import Announced, Exited, Finished, Launched
from supervise.core.model.policy import Budget, Runbook

from .conftest import Verify, save


@dataclass(frozen=True)
class Again(Action):
    """Starts the job again from a checkpoint."""

    destructive = True
    budget = "restart"

    def plan(self, context):
        if not context.good:
            raise Refused("no good checkpoint")
        return {"checkpoint": context.good[-1].id, "attempt": context.attempt + 1}


AGAIN = Runbook("again", (Snapshot(), Again(), Verify()), ("snapshot", "relaunch", "verify"))


def crashing(tell, **changes):
    """A job of 50 steps with a checkpoint, that is started again when it crashes."""
    made = {
        "runbooks": {**tell().policy.runbooks, "again": AGAIN},
        "budgets": {"restart": Budget(2), "touch": Budget(2), "all": Budget(9)},
        "job": {"on_crash": "again"},
        "answer": lambda key: None if "relaunch" in key else Finished(0, key, True),
    }
    story = tell(**(made | changes))
    story.frames(2.0, times=50)
    save(story, "ckpt-1", 40)
    return story


def relaunched(story, step, pid=2, ended=False):
    """The job is started again from `step`: its end, its start, its first words."""
    action = story.actions()[-1]
    story.attempt += 1
    if ended:
        story.send(Exited(story.at_ns, -2))
    story.send(Launched(story.at_ns, pid, story.attempt))
    result = {"pid": pid, "attempt": story.attempt, "step": step}
    story.send(Finished(story.at_ns, action, True, result))
    story.send(Announced(story.at_ns, 0, 1, pid, story.names))
    story.step = step
