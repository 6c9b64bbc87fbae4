"""Actions in words, and the choices of a person, as messages have them."""

from __future__ import annotations

import pytest

from supervise.core import by_hand, in_hold
from supervise.core.model import Payload, format_plan

PLAN = {"before_step": 191, "rewarm": {"start": 0.1, "steps": 50}}


@pytest.mark.parametrize(
    ("verb", "args", "said"),
    [
        ("rollback", PLAN, "over 50 steps"),
        ("rollback", PLAN, "restore the weights from before step 191"),
        ("relaunch", {"step": 30, "rewarm": None}, "from the checkpoint of step 30"),
        ("relaunch", {"step": 30, "resumable": "weights only"}, "30, which holds weights only"),
        ("lr_scale", {"value": 0.5}, "multiply the learning rate by 0.5"),
        ("clip", {"max_norm": 1.0, "factor": None}, "clip (max_norm 1.0)"),
        ("savepoint", {}, "savepoint"),
    ],
)
def test_an_action_is_described_with_its_arguments(verb, args, said):
    assert said in format_plan([("resume", Payload()), (verb, Payload(args))])


def test_choices_name_only_what_would_be_accepted(tell):
    """A paused job may be resumed."""
    story = tell(healthy=50)
    story.frames(8.0, times=60)
    policy, state = story.policy, story.state
    assert state.incident is not None
    back = f"supervise rollback RUN --before {state.incident.breach_step}"
    offered = back in in_hold(policy, state, state.incident)
    assert offered == ("rollback" in policy.verbs)
    state.job.paused = True
    ways = by_hand(policy, state, state.incident)
    assert ways.startswith("choose: supervise resume RUN or") and ways.endswith("stop RUN")
