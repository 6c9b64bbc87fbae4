"""Which checkpoints may be gone back to, after a trouble and while an attempt is on trial."""

from __future__ import annotations

from supervise.core.model.events import Finished

from .conftest import good, save


def test_checkpoints_of_a_trouble_are_suspect_for_good(tell):
    """Before it, after it, while it is open, of another attempt; not those of an advisory rule."""
    story = tell(healthy=50)
    save(story, "a", 30)
    save(story, "b", 49)
    story.frames(8.0)
    save(story, "c", 50)
    save(story, "late", 48)
    save(story, "nobody-knows", -1)
    assert good(story) == ["a", "late", "b"]
    story.frames(2.0, times=60)
    assert story.state.incident is None
    save(story, "d", 90)
    save(story, "c", 50)
    assert good(story) == ["a", "late", "b", "d"]
    story.frames(2.0, grad=20.0)
    save(story, "e", 111)
    assert good(story)[-1] == "e"
    save(story, "e", 111, ok=False)
    assert good(story)[-1] == "d"


def back_at(story, step):
    """The runbook takes the run back to `step`, where another attempt begins."""
    story.attempt += 1
    result = {"step": step, "attempt": story.attempt}
    story.send(Finished(story.at_ns, story.actions()[-1], True, result))
    story.step = step


def unanswered(tell):
    """A run in trouble since step 200, with a checkpoint from before, that is taken back to 100."""
    story = tell(answer=lambda key: None, healthy=200)
    save(story, "before", 50)
    story.frames(8.0)
    back_at(story, 100)
    return story


def test_an_attempt_that_does_not_help_leaves_nothing_to_go_back_to(tell):
    """It was in trouble all along, from its first step, which lies before the first breach."""
    story = unanswered(tell)
    story.frames(8.0, times=10)
    save(story, "early", 105)
    assert good(story) == ["before"]
    assert not story.state.checkpoints.suspects()  # it may still help
    story.frames(8.0, times=30)
    assert story.kinds("verify", "failed")
    save(story, "late", 120)

    assert good(story) == ["before"]
    assert story.state.checkpoints.suspects() == {"early", "late"}
    assert not story.state.checkpoints.on_trial()


def test_what_is_saved_before_the_recovery_is_good_with_it(tell):
    """Until then it is not gone back to; nor is what another attempt left, ever."""
    story = unanswered(tell)
    save(story, "verifying", 103)
    story.frames(2.0, times=10)
    assert story.state.machine == "probation"
    save(story, "probation", 108)
    save(story, "verifying", 103)
    twin = story.state.copy()
    assert story.state.checkpoints.on_trial() == {"verifying", "probation"}
    story.frames(2.0, times=30)
    assert "recovered" in story.kinds("incident", "closed")[0].reason

    assert good(story) == ["before", "verifying", "probation"]
    assert twin.checkpoints.on_trial()
    assert twin.checkpoints.good() == story.state.checkpoints.good()[:1]
