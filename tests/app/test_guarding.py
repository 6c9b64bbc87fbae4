"""What the guard is told of the run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from supervise.app.checkpoint_wiring import may_come_back
from supervise.core import engine
from supervise.core.model.policy import Policy
from supervise.core.state.incident import HELD


@pytest.mark.parametrize(
    ("code", "mode", "on_crash", "change", "comes_back"),
    [
        (-9, "enforce", "restart", {}, True),
        (1, "approve", "restart", {}, True),
        (0, "enforce", "restart", {}, False),
        (143, "enforce", "restart", {}, False),
        (75, "enforce", "restart", {}, False),
        (1, "observe", "restart", {}, False),
        (1, "enforce", None, {}, False),
        (1, "enforce", "restart", {"stopping": True}, False),
        (1, "enforce", "restart", {"called_off": True}, False),
        (1, "enforce", "restart", {"step": 7, "crashes": [7]}, False),
        (1, "enforce", "restart", {"unable": {"relaunch": "nobody said how"}}, False),
        (1, "enforce", "restart", {"incident": SimpleNamespace(phase=HELD)}, False),
    ],
)
def test_nobody_waits_at_the_end_of_a_job_that_stays_ended(
    code, mode, on_crash, change, comes_back
):
    """Only one that crashed, by a policy that starts it again, is worth a hurry."""
    policy = Policy("p", "sha256:0", mode, {}, (), job={"on_crash": on_crash})
    state = engine.start(policy)
    state.unable.clear()
    for name, value in change.items():
        setattr(state, name, value)

    assert may_come_back(policy, state, code) is comes_back
