"""A trouble that began on one rank is over when that rank says so, too."""

from __future__ import annotations

import pytest

from supervise.actions import Rollback, Verify
from supervise.core.model import Announced, Budget, Finished, Frame

from .conftest import above, one_rule, runbook_of

NAMES = ("train_loss_raw", "residual_rms")


@pytest.mark.parametrize(("newest", "verified"), [(2.0, True), (4.0, False)])
def test_the_rank_that_it_began_on_has_to_be_back_in_its_band(tell, newest, verified):
    """The rule is clear in both, and so is the other rank."""
    book = runbook_of("only", Rollback(at_least=10, rewarm=0), Verify(clear_for=5, within=40))
    result = {"attempt": 1, "step": 40, "ranks": 2}
    story = tell(
        **one_rule(above("residual_rms", 5.0), "SEV1", "only"),
        names=NAMES,
        runbooks={"only": book},
        budgets={name: Budget(9) for name in ("all", "rollback")},
        answer=lambda key: Finished(0, key, True, result),
    )
    for rank in (0, 1):
        story.send(Announced(story.at_ns, rank, 2, rank + 1, NAMES))

    def step(loss):
        story.frames(2.0)
        story.send(Frame(story.at_ns, 1, story.attempt, story.step, (loss, loss)))

    for _ in range(60):
        step(2.0)
    step(8.0)
    assert story.state.incident.case.rank == 1
    story.attempt = 1
    for _ in range(90):
        step(newest)

    texts = [record.reason for record in story.kinds("verify")]
    assert any("no rule fired for 5 steps" in text for text in texts) == verified
    assert any("above its band" in text for text in texts) != verified
