"""A destructive action asks for its reason again until the moment it acts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from supervise.actions import Snapshot, Stop
from supervise.catalog import load_policy
from supervise.core import CLEARED, withdrawn_requests
from supervise.core.model import Approval, Beat, Budget, Finished, Frame, Runbook, Tick
from supervise.detectors import Absence

from .conftest import SECOND, Story, Touch, Verify, one_rule, rule_on, runbook_of

IDLE_S = 10  # the idle watch of `stop-and-page`


@dataclass
class Job:
    """A job that makes a step a second and may stand still, and the edge that performs a stop."""

    story: Story
    stopped: bool = False
    asked_s: int | None = None

    def second(self, *, step: bool, phase: str = "step") -> None:
        """One second of the clock: perhaps a frame, the tick, and what the edge comes to."""
        story = self.story
        story.at_ns += SECOND
        if step:
            story.step += 1
            story.send(Frame(story.at_ns, 0, story.attempt, story.step, (2.0, 1.0)))
        story.send(Tick(story.at_ns, (Beat(0, story.at_ns, phase),)))
        self._edge(story)

    def seconds(self, count: int, *, step: bool, phase: str = "step") -> None:
        for _ in range(count):
            self.second(step=step, phase=phase)

    def _edge(self, story: Story) -> None:
        run = story.state.incident.run if story.state.incident is not None else None
        if run is None or not run.intent.awaits("stop") or self.stopped:
            self.asked_s = None
            return
        now_s = story.at_ns // SECOND
        self.asked_s = now_s if self.asked_s is None else self.asked_s
        if now_s - self.asked_s < IDLE_S:
            return
        gone = withdrawn_requests(story.policy, story.state)
        if gone:
            asked = run.intent.action_id
            story.send(Finished(story.at_ns, asked, False, {"refused": True}, gone))
        else:
            self.stopped = True


def answer(key):
    return None if key.endswith("stop") else Finished(0, key, True)


@pytest.fixture
def stalling(tell):
    """A job under a policy that stops what stands still for `limit` seconds."""

    def begin(limit=120.0, **changes):
        book = runbook_of("end", Snapshot(), Stop(if_idle=IDLE_S))
        made = {
            **one_rule(Absence(after={"min": limit}), "SEV0", "end"),
            "runbooks": {**tell().policy.runbooks, "end": book},
            "budgets": {"all": Budget(99)},
            "answer": answer,
        }
        job = Job(tell(**(made | changes)))
        job.seconds(40, step=True)
        return job

    return begin


@pytest.mark.parametrize("limit", [4, 6, 30, 120])
def test_no_job_that_goes_on_is_stopped(stalling, limit):
    """Stalls of every length up to the end of the idle watch, each followed by training."""
    for length in range(1, limit + IDLE_S):
        job = stalling(float(limit))
        job.seconds(length, step=False)
        job.seconds(60, step=True)

        assert not job.stopped, f"a stall of {length} s"
        assert job.story.state.incident is None and job.story.state.machine != "holding"


@pytest.mark.parametrize("limit", [4, 120])
def test_a_job_that_stays_hung_is_stopped(stalling, limit):
    job = stalling(float(limit))
    job.seconds(limit + 3, step=False)
    job.seconds(5, step=True)
    job.seconds(limit + IDLE_S + 5, step=False)

    assert job.stopped


def test_before_the_stop_is_even_asked_for_a_frame_is_enough(stalling):
    job = stalling(answer=lambda key: None)
    job.seconds(125, step=False)
    snapshot = job.story.actions()[-1]
    job.second(step=True)
    job.story.send(Finished(job.story.at_ns, snapshot, True))

    assert job.story.actions() == [snapshot]
    assert job.story.kinds("abort")[0].data["what"] == "withdrawn"


def test_a_job_that_a_signal_stops_is_suspended_and_not_hung(stalling):
    """Neither while it is stopped, nor when that began in the middle of the idle watch."""
    job = stalling()
    job.seconds(300, step=False, phase="suspended")
    assert job.story.actions() == []
    job.seconds(125, step=False)
    assert job.story.actions() != []
    job.seconds(300, step=False, phase="suspended")

    assert not job.stopped and job.story.kinds("abort")[0].data["what"] == "withdrawn"


def test_a_yes_to_a_stop_is_void_for_a_job_that_makes_steps_again(stalling):
    job = stalling(approvals={"stop": Approval()})
    job.seconds(125, step=False)
    request = job.story.state.approvals.pending.id
    job.seconds(3, step=True)
    job.story.say("approve", id=request)
    job.seconds(20, step=True)

    assert not job.stopped and not [key for key in job.story.actions() if key.endswith("stop")]


@dataclass(frozen=True)
class Ends(Touch):
    """Ends the job."""

    ends_job = True


BOOK = Runbook("fix", (Snapshot(), Ends(), Verify()), ("snapshot", "touch", "verify"))
TAKES_BACK = runbook_of("fix", Snapshot(), Touch(), Verify())


@pytest.fixture
def high(tell):
    """A loss of 9.0 is in breach; evidence takes as long as the test wants."""

    def begin(book=BOOK, **changes):
        base = tell()
        made = {
            "runbooks": {**base.policy.runbooks, "fix": book},
            "answer": lambda key: None,
            "rules": (rule_on(base.policy.detectors, "high", "SEV1", "fix"),),
        }
        return tell(**(made | changes), healthy=60, then=9.0)

    return begin


def test_a_rule_that_cleared_asks_for_nothing_any_more(high):
    """The loss came back while evidence was taken: nothing is done, and it counts as no try."""
    story = high()
    (snapshot,) = story.actions()
    story.frames(2.0, times=3)
    story.send(Finished(story.at_ns, snapshot, True))

    assert story.actions() == [snapshot]
    assert story.kinds("abort")[0].reason == f"fix withdrawn: {CLEARED}"
    assert story.state.history.tried_runbooks == {} and story.state.history.cooldown == {}
    story.frames(9.0)
    assert len(story.actions()) == 2, "it may be asked for again at once"


def test_a_rule_that_got_used_to_a_ruined_loss_still_asks(high):
    """It cleared, but the loss is far out of the band that it had before."""
    story = high()
    (snapshot,) = story.actions()
    story.frames(4.9, times=3)  # `high` is above 5
    assert not story.state.firing(story.policy)
    story.send(Finished(story.at_ns, snapshot, True))

    assert story.actions()[-1].endswith("touch")


def test_what_takes_the_job_back_answers_damage_that_no_clearing_undoes(high):
    """A bad shard, an oversized update: the rule is in breach for one step, the harm stays."""
    story = high(TAKES_BACK)
    (snapshot,) = story.actions()
    story.frames(2.0, times=3)
    story.send(Finished(story.at_ns, snapshot, True))

    assert story.actions()[-1].endswith("touch")


@pytest.mark.parametrize(
    ("phase", "fails"), [("step", True), ("suspended", False), ("loading", False)]
)
def test_silence_that_has_a_reason_fails_no_verification(high, phase, fails):
    """Two hours without a frame to verify by: somebody stopped the job, or it restores."""
    story = high(TAKES_BACK, answer=lambda key: Finished(0, key, True))
    assert story.actions()[-1].endswith("touch")
    for _ in range(7200):
        story.at_ns += SECOND
        story.send(Tick(story.at_ns, (Beat(0, story.at_ns, phase),)))

    assert bool(story.kinds("verify", "failed")) is fails


def test_the_shipped_policies_judge_short_stalls_alike():
    """`nano` and `large` stop what stands still by a runbook with an idle watch."""
    for name in ("nano", "large"):
        policy = load_policy(name)
        rule = next(rule for rule in policy.rules if rule.id == "hang.stuck")
        stop = next(s for s in policy.runbooks[rule.runbook].steps if isinstance(s, Stop))
        assert stop.if_idle == IDLE_S
