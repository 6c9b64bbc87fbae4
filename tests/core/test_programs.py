"""A rank's program is followed by another one in the same launch: by an exec, or in a shell."""

from __future__ import annotations

import pytest

from supervise.core.model.decisions import UNKNOWN
from supervise.core.model.events import Announced


@pytest.mark.parametrize(("pid", "segment"), [(1, 9), (2, 0)], ids=["exec", "another process"])
def test_another_program_starts_from_nothing_and_is_told_of_once(tell, pid, segment):
    """Its first steps are no jump back, what was seen is not its own, and rows may repeat."""
    story = tell(healthy=40)
    story.step = -1
    news = Announced(story.at_ns, 0, 1, pid, ("train_loss_raw",), segment)
    made = story.send(news)
    monitor = story.state.monitors[0]
    seen = list(monitor.codes), monitor.value("train_loss_raw"), monitor.step
    again = story.send(news)
    story.frames(2.0, times=5)

    assert seen == ([UNKNOWN] * 3, None, -1)
    assert [(d.kind, d.data.get("what", d.data.get("after"))) for d in made] == [
        ("note", "program-replaced"),
        ("state", "warming"),
    ]
    assert made[0].data["last_step"] == 39
    assert "another program of rank 0 started after step 39 in the same launch" in made[0].reason
    assert again == [] and not story.kinds("gap")


def test_the_same_program_may_announce_again(tell):
    story = tell(healthy=40)
    made = story.send(Announced(story.at_ns, 0, 1, 1, (*story.names, "late")))

    assert made == []
    assert story.state.monitors[0].step == 39
