"""Holds, and what is performed beside them: only one action at a time, and no hold ends by itself.

Evidence is taken without a change of phase, so an incident can be over, held or given up while a
snapshot of it is still being written.
"""

from __future__ import annotations

from supervise.actions import Relaunch, Snapshot, Stop
from supervise.core.model import (
    Approval,
    Beat,
    Frame,
    JobSettings,
    Ladder,
    Refused,
    RelaunchSettings,
    Tick,
)
from supervise.detectors import Absence

from .conftest import (
    AMPLE,
    SECOND,
    Reach,
    Story,
    Touch,
    Verify,
    above,
    policy,
    rules_of,
    runbook_of,
    save,
)

HIGH = above("train_loss_raw", 5.0)
PAGE = runbook_of("page", Snapshot())
BACK = runbook_of("back", Snapshot(), Touch(), Verify())
SNAPSHOT = "inc-1/1/0-snapshot"


def never(action: str) -> None:
    """Answer no action: each one takes its time."""


def paged() -> Story:
    """A run whose spike is over while the snapshot of it is being written."""
    rules = rules_of({"high": HIGH}, ("high", "SEV1", "page"))
    story = Story(policy(**rules, runbooks={"page": PAGE}), answer=never)
    story.frames(2.0, times=60)
    story.frames(9.0)
    return story


def denied() -> Story:
    """A run in which a person has denied a rollback while its evidence was taken."""
    rules = rules_of({"high": HIGH}, ("high", "SEV0", "back"))
    ladder = Ladder(("back", "hold"))
    story = Story(policy("approve", **rules, runbooks={"back": BACK}, ladder=ladder), answer=never)
    story.frames(2.0, times=60)
    story.frames(9.0)
    assert story.say("deny", id="ask-1").data["ok"]
    return story


def test_an_incident_is_not_over_while_its_evidence_is_taken():
    story = paged()
    story.frames(2.0, times=25)
    story.frames(9.0)
    assert story.actions() == [SNAPSHOT]
    story.finish(SNAPSHOT, {"bytes": 1, "sha256": "x"})
    story.frames(2.0, times=25)
    assert story.state.incident is None
    assert len(story.actions()) == 1


def test_a_stop_that_waits_for_evidence_is_carried_out_though_the_spike_is_over():
    story = paged()
    assert "queued" in story.say("stop").reason
    story.frames(2.0, times=25)
    story.finish(SNAPSHOT, {"bytes": 1, "sha256": "x"})
    assert story.actions() == [SNAPSHOT, "inc-1/2/0-stop"]


def test_evidence_goes_on_in_a_hold_and_an_order_waits_for_it():
    story = denied()
    assert story.state.machine == "holding"
    assert "in progress" in story.say("pause").reason
    story.finish(SNAPSHOT, {"bytes": 1, "sha256": "x"})
    assert story.state.incident.phase == "held"
    assert story.kinds("commit"), "the evidence is the incident's, and not late"
    assert story.say("pause").data["ok"]
    assert story.actions() == [SNAPSHOT, "inc-1/2/0-pause"]


def test_a_release_waits_for_evidence_that_is_being_taken():
    story = denied()
    assert "queued" in story.say("release").reason
    assert story.state.machine == "holding"
    story.finish(SNAPSHOT, {"bytes": 1, "sha256": "x"})
    assert story.state.incident is None
    assert story.state.machine == "warming"


def test_a_job_that_nothing_helps_is_stopped_once_its_evidence_is_complete():
    class Never(Touch):
        def plan(self, ctx):
            raise Refused("no savepoint is old enough")

    books = {"back": runbook_of("back", Snapshot(), Never(), Verify())}
    rules = rules_of({"high": HIGH}, ("high", "SEV0", "back"))
    ladder = Ladder(("back", "hold"))
    story = Story(policy(**rules, runbooks=books, ladder=ladder, give_up="stop"), answer=never)
    story.frames(2.0, times=60)
    story.frames(9.0, times=60)
    assert story.actions() == [SNAPSHOT]
    story.finish(SNAPSHOT, {"bytes": 1, "sha256": "x"})
    story.frames(9.0, times=2)
    story.tick(1)
    assert story.actions()[1:] == ["inc-1/2/0-snapshot"]


def test_a_hold_outlives_a_runbook_that_was_withdrawn_in_it():
    stalled = Absence(after={"min": 30.0})
    detectors = {"high": HIGH, "wild": above("grad_global_norm", 9.0), "hung": stalled}
    books = {
        "back": runbook_of("back", Touch(), Verify()),
        "soften": runbook_of("soften", Reach(), Verify()),
        "end": runbook_of("end", Snapshot(), Stop(if_idle=10)),
    }
    rules = rules_of(
        detectors, ("high", "SEV1", "back"), ("wild", "SEV1", "soften"), ("hung", "SEV0", "end")
    )
    ladder = Ladder(("soften", "back", "hold"))
    story = Story(
        policy(
            **rules,
            runbooks=books,
            ladder=ladder,
            budgets=AMPLE,
            approvals={"touch": Approval()},
        ),
        answer=lambda action: None if action.endswith("stop") else {},
    )

    def seconds(count: int, *, step: bool, loss: float = 2.0, gradient: float = 1.0) -> None:
        for _ in range(count):
            story.at_ns += SECOND
            if step:
                story.step += 1
                story.send(Frame(story.at_ns, 0, 0, story.step, (loss, gradient)))
            story.send(Tick(story.at_ns, (Beat(0, story.at_ns, "step"),)))

    seconds(60, step=True)
    seconds(1, step=True, loss=9.0)
    assert story.say("deny", id="ask-1").data["ok"]
    seconds(35, step=False)
    assert story.actions()[-1].endswith("stop"), "a stall is answered in a hold as well"
    seconds(2, step=True)
    story.finish(story.actions()[-1], {"refused": True}, "the job makes steps again")
    before = story.actions()
    assert story.state.incident.phase == "held"
    seconds(1, step=True, gradient=20.0)
    assert story.actions() == before, "nobody has released it"
    seconds(60, step=True)
    assert story.state.machine == "holding"
    assert story.state.incident.phase == "held"
    assert story.say("release").data["ok"]
    assert story.state.incident is None


def test_a_no_while_the_job_is_being_restarted_holds_until_it_is_released():
    """The restart goes on, and nothing of the hold is lost behind it."""
    detectors = {"high": HIGH, "wild": above("grad_global_norm", 9.0)}
    again = runbook_of("again", Snapshot(), Relaunch(rewarm=0), Verify(clear_for=5))
    story = Story(
        policy(
            **rules_of(detectors, ("high", "SEV1", "back"), ("wild", "SEV0", "again")),
            runbooks={"back": runbook_of("back", Touch(), Verify()), "again": again},
            ladder=Ladder(("back", "hold")),
            budgets=AMPLE,
            approvals={"touch": Approval()},
            job=JobSettings(relaunch=RelaunchSettings()),
        ),
        answer=lambda action: None if action.endswith("relaunch") else {},
    )
    story.frames(2.0, times=60)
    save(story, "a", 19)
    story.frames(9.0)
    story.frames(2.0, grad=20.0)
    story.exit(-15)
    assert story.say("deny", id="ask-1").data["ok"]
    assert story.state.machine == "holding"
    story.launch(2, 1)
    story.announce(0, 1, 2)
    story.finish(story.actions()[-1], {"attempt": 1})
    story.attempt, story.step = 1, 19
    story.frames(2.0, times=100)
    assert story.state.incident.phase == "held"
    assert story.say("release").data["ok"]
    assert story.state.incident is None and story.state.machine == "warming"
