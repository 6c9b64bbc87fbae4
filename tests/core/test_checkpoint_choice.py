"""Which checkpoints a relaunch may go back to, and which one it takes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest

from supervise.actions import LrScale, Relaunch, Rollback, Snapshot
from supervise.core import awaited_checkpoint_bound, needs_dense_sampling, savepoint_retention_bound
from supervise.core.model import (
    Approval,
    Budget,
    Exited,
    JobSettings,
    Ladder,
    Notice,
    RelaunchSettings,
)

from .conftest import (
    AMPLE,
    Verify,
    above,
    good,
    messages,
    one_rule,
    policy,
    relaunched,
    rules_of,
    runbook_of,
    save,
    taken_back,
)

ACTION = "inc-1/1/0-relaunch"


def choose(story):
    story.notice("checkpoint-choice", "what it left was looked at")
    return [d.data["action"]["args"]["checkpoint"] for d in story.kinds("note", "replanned")]


def stopping(tell, resumable="full", **changes):
    """The trouble of step 60 is answered by a relaunch to step 19."""
    book = runbook_of("soften", Relaunch(rewarm=0, skip=30), Verify(clear_for=5))
    story = tell(
        answer=lambda key: None,
        budgets=AMPLE,
        job=JobSettings(relaunch=RelaunchSettings()),
        ladder=Ladder(("soften", "hold")),
        runbooks={"soften": book, "back": book},
        **changes,
        healthy=60,
    )
    save(story, "a", 19, resumable=resumable)
    story.frames(8.0)
    return story


@pytest.mark.parametrize("silent", [0, 12], ids=["answered at once", "silenced at first"])
def test_a_trouble_begins_where_its_rule_came_true_and_not_where_it_fires(tell, silent):
    story = stopping(tell, **one_rule(above("train_loss_raw", 5.0), "SEV1", "back", for_steps=5))
    story.say("silence", rule="only", **{"for": silent})
    story.frames(8.0, 8.0)
    save(story, "b", 62)
    assert not story.actions()
    story.frames(8.0, times=2 + silent)

    assert story.actions() == [ACTION] and story.state.incident.breach_step == 60
    assert story.state.checkpoints.suspects() == {"b"}


@pytest.fixture
def stopped(tell):
    story = stopping(tell)
    assert story.actions() == [ACTION]
    story.exit(-2)
    return story


def test_what_is_verified_after_the_stop_is_gone_back_to(stopped):
    save(stopped, "b", 39)

    assert choose(stopped) == ["b"]
    (note,) = stopped.kinds("note", "replanned")
    action = note.data["action"]
    assert action["id"] == ACTION and note.incident == "inc-1"
    assert note.reason == "relaunch goes back to b of step 39, not to a of step 19"
    assert action["args"] == stopped.state.incident.run.intent.args
    assert (action["args"]["attempt"], action["args"]["skip"]) == (1, [[40, 60]])
    relaunched(stopped, 39)
    stopped.frames(2.0, times=21)
    assert not stopped.kinds("verify", "passed")
    stopped.frames(2.0)
    assert stopped.kinds("verify", "passed")


def test_weights_alone_are_gone_back_to_if_there_is_nothing_else(stopped):
    save(stopped, "b", 45, resumable="weights only")
    assert choose(stopped) == []
    save(stopped, "c", 39, resumable="full")
    assert choose(stopped) == ["c"]
    for name in "ac":
        save(stopped, name, 19, ok=False)
    assert choose(stopped) == ["c", "b"]
    assert stopped.state.incident.run.intent.args["resumable"] == "weights only"


def test_what_people_approved_is_what_is_done(tell):
    story = stopping(tell, mode="approve", resumable="weights only")
    assert "step 19, which holds weights only" in str(messages(story))
    story.say("approve", id="ask-1")
    assert story.actions()[-1].endswith("relaunch")
    story.exit(-2)
    save(story, "b", 39)

    assert choose(story) == []


@pytest.mark.parametrize("final", [True, False])
def test_who_ends_the_run_meanwhile_is_told_of_its_end(stopped, final):
    """Ctrl-C while what the job left is looked at: nothing starts it again, and people hear so."""
    data = {"signal": "SIGINT", "final": final}
    stopped.notice("signal", "SIGINT was passed on", data=data)

    assert stopped.state.job.over == final and (stopped.state.machine == "halted") == final
    said = [message["title"] for message in messages(stopped)]
    assert any("ended by SIGINT, as asked, at step 60" in text for text in said) == final
    failed = f"{ACTION} failed: a request to end the job came first"
    assert (failed in [d.reason for d in stopped.kinds("abort")]) == final


FIRST, AGAIN = "inc-1/1/0-snapshot", "inc-1/2/1-relaunch"
BOOK = runbook_of("soften", Snapshot(), Relaunch(rewarm=0), Verify(clear_for=5))


def refused(tell, breach=60, unavailable=(), calm=False, **changes):
    """The trouble of step 60 finds no checkpoint, and lasts."""
    made = {
        "ladder": Ladder(("soften", "hold")),
        "job": JobSettings(relaunch=RelaunchSettings()),
        "answer": lambda key: None,
        "rules": policy().rules[:1],
        "runbooks": {"soften": BOOK},
        "budgets": {name: Budget(1) for name in ("restart", "all")},
        "inhibit": (),
    }
    story = tell(**(made | changes))
    for verb in unavailable:
        story.notice(f"{verb}-unavailable", "a for statement drives the step")
    story.frames(2.0, times=breach)
    if not calm:
        story.frames(8.0)
    return story


@pytest.mark.parametrize("ladder", [Ladder(("soften", "hold")), Ladder(())])
def test_the_first_good_checkpoint_is_gone_back_to(tell, ladder):
    story = refused(tell, ladder=ladder)
    assert story.actions() == [FIRST]
    assert messages(story)[0]["title"] == "inc-1: soften waits for a good checkpoint"
    assert "the relaunch follows the first good one" in messages(story)[0]["next"]
    story.finish(FIRST)
    story.frames(8.0, times=30)
    assert story.state.machine != "holding"
    save(story, "near", 55)
    save(story, "after", 70)
    save(story, "bad", 39, ok=False)
    assert story.actions() == [FIRST]
    save(story, "a", 39)
    story.finish("inc-1/2/0-snapshot")
    save(story, "b", 45)

    assert story.actions() == [FIRST, "inc-1/2/0-snapshot", AGAIN]
    assert story.state.incident.run.intent.args["checkpoint"] == "a"
    assert "a good checkpoint is now available" in story.kinds("state")[-1].reason
    relaunched(story, 39, ended=True)
    story.frames(2.0, times=60)
    assert story.kinds("verify", "passed")
    assert story.actions()[-1] == AGAIN


def test_what_no_checkpoint_helps_is_not_waited_for(tell):
    """It cannot be started again, or is too young for one that is old enough."""
    for story in (refused(tell, unavailable=["relaunch"]), refused(tell, breach=8)):
        assert story.kinds("abort", "refused")
        assert "tried again" not in messages(story)[0]["next"]
        story.finish(FIRST)
        save(story, "a", 0)
        assert story.actions() == [FIRST]


def test_a_crash_is_answered_when_one_comes_while_evidence_is_taken(tell):
    job = JobSettings(on_crash="soften", relaunch=RelaunchSettings())
    early, late = (refused(tell, calm=True, job=job) for _ in range(2))
    for story in (early, late):
        story.exit(-9)
        assert story.actions() == [FIRST]
    save(early, "a", 39)
    early.finish(FIRST)
    late.finish(FIRST)
    save(late, "a", 39)

    assert early.actions() != [FIRST] and not early.state.job.over
    assert late.actions() == [FIRST] and late.state.job.over


def test_checkpoints_of_a_trouble_are_suspect_for_good(tell):
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


def unanswered(tell):
    """A run in trouble since step 200, with a checkpoint from before, that is taken back to 100."""
    story = tell(answer=lambda key: None, healthy=200)
    save(story, "before", 50)
    story.frames(8.0)
    taken_back(story, 100)
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
    twin = deepcopy(story.state)
    assert story.state.checkpoints.on_trial() == {"verifying", "probation"}
    story.frames(2.0, times=30)
    assert "recovered" in story.kinds("incident", "closed")[0].reason

    assert good(story) == ["before", "verifying", "probation"]
    assert twin.checkpoints.on_trial()
    assert twin.checkpoints.good() == story.state.checkpoints.good()[:1]


WAITS = JobSettings(relaunch=RelaunchSettings(wait="pause"))
PAUSE = "inc-1/1/0-pause"


def search(story, candidates):
    data = {"candidates": candidates}
    story.notice("checkpoint-search", "looked for", data=data)


def paused(tell, **changes):
    """A run that is paused while a checkpoint is verified, its evidence taken."""
    story = refused(tell, job=WAITS, **changes)
    search(story, 2)
    assert story.actions() == [FIRST]
    story.finish(FIRST)
    return story


def test_a_ruined_job_is_paused_while_its_checkpoint_is_verified(tell):
    """It trains on with nothing that the relaunch is to throw away; the budget is not touched."""
    story = paused(tell)
    assert story.actions() == [FIRST, PAUSE]
    said = messages(story)[-1]
    assert said["title"] == "inc-1: the job is paused while a checkpoint is verified"
    assert said["verdict"] == "2 from before step 50 to verify, the newest first"
    story.finish(PAUSE, {"paused_step": story.step})
    story.tick(5.0)
    save(story, "bad", 39, ok=False)
    search(story, 1)
    assert story.state.job.paused
    save(story, "a", 19)
    story.finish("inc-1/2/0-snapshot")

    assert story.actions() == [FIRST, PAUSE, "inc-1/2/0-snapshot", AGAIN]


@pytest.mark.parametrize(("left", "last"), [(2, PAUSE), (None, FIRST), (0, "inc-1/2/0-lr_scale")])
def test_smaller_steps_do_not_end_a_wait(tell, left, last):
    """They mend nothing, and the run goes on, ruined; where nothing is to come they are made."""
    high, wild = policy().rules[:2]
    calm = runbook_of("calm", LrScale(set=0.5), Verify())
    story = refused(
        tell,
        job=WAITS,
        rules=(high, replace(wild, severity="SEV1", runbook="calm")),
        runbooks={"soften": BOOK, "calm": calm},
        budgets=AMPLE,
    )
    assert awaited_checkpoint_bound(story.policy, story.state) == 50
    story.finish(FIRST)
    if left is not None:
        search(story, left)
    story.frames(8.0, grad=10.0)

    assert story.actions()[-1] == last
    said = [d.reason for d in story.kinds("suppressed")]
    assert any("waits for a checkpoint, and calm" in text for text in said) == (left is None)


def test_a_paused_job_that_no_checkpoint_can_help_waits_for_a_person(tell):
    story = paused(tell)
    story.finish(PAUSE, {"paused_step": story.step})
    search(story, 0)
    assert story.state.machine == "holding" and story.state.job.paused
    said = messages(story)[-1]
    assert "no checkpoint from before step 50 is good" in said["verdict"]
    assert "the job is paused" in said["verdict"] and "supervise resume RUN" in said["next"]
    save(story, "late", 39)

    assert story.actions() == [FIRST, PAUSE]


@pytest.mark.parametrize(
    ("changes", "candidates", "still"),
    [
        ({"job": WAITS}, 2, True),  # it ruins nothing, and would not answer
        ({"job": JobSettings(relaunch=RelaunchSettings(wait="train"))}, 2, False),
        ({"job": WAITS, "mode": "approve"}, 2, False),
        ({"job": WAITS}, 0, False),
    ],
)
def test_a_job_trains_on_where_it_may_or_nothing_is_to_be_verified(
    tell, changes, candidates, still
):
    story = refused(tell, **changes)
    story.state.incident.trigger.still = still
    search(story, candidates)
    story.finish(FIRST)
    story.frames(8.0, times=40)

    assert story.actions() == [FIRST] and not story.state.job.paused


def test_a_job_that_refuses_to_pause_is_relaunched_all_the_same(tell):
    story = paused(tell)
    story.finish(PAUSE, {"refused": True}, "no")
    story.finish(story.actions()[-1])
    search(story, 1)
    save(story, "a", 39)
    story.finish("inc-1/2/0-snapshot")

    assert story.actions()[-1] == AGAIN and story.actions().count(PAUSE) == 1


# ── what the engine asks of the probes: savepoints to keep, and denser samples ────────────────────


def going_back(tell, **changes):
    """A run of 50 steps that goes back on its second level."""
    back = runbook_of("back", Rollback(at_least=10), Verify())
    books = {**policy().runbooks, "back": back}
    return tell(**({"runbooks": books, "budgets": AMPLE} | changes), healthy=50)


def spared(story):
    return savepoint_retention_bound(story.policy, story.state)


def test_while_a_request_waits_and_until_it_is_over(tell):
    story = going_back(tell, mode="approve", approvals={"all": Approval(900.0)})
    assert spared(story) == 0
    story.frames(60.0)
    assert story.kinds("approval_requested")[0].data["args"][0]["args"]["before_step"] == 40
    assert spared(story) == 40
    story.frames(60.0, times=200)
    assert spared(story) == 40
    story.say("deny", id="ask-1")
    assert (story.state.machine, spared(story)) == ("holding", 40)
    story.say("release")
    assert (story.state.incident, spared(story)) == (None, 0)


@pytest.mark.parametrize(
    "event",
    [Notice(60, "rollback-unavailable", "no rollback is possible: a `for` loop"), Exited(60, 1)],
)
def test_where_nothing_can_go_back_nothing_is_spared(tell, event):
    story = going_back(tell, mode="approve")
    story.frames(60.0)
    assert spared(story) == 40
    story.send(event)
    assert spared(story) == 0


def test_only_for_what_may_act(tell):
    story = going_back(tell)
    story.frames(2.0, grad=20.0)
    assert story.state.incident is not None
    assert spared(story) == 0
    story.frames(8.0, grad=20.0)
    assert spared(story) == story.step - 10

    story = going_back(tell, mode="shadow")
    story.frames(8.0)
    assert story.state.incident is not None
    assert spared(story) == 0


@pytest.mark.parametrize("metric", ["probe_overhead_frac", "step_time", "train_time_linearity"])
def test_samples_are_denser_in_an_incident_but_not_for_what_that_makes_worse(tell, metric):
    detectors = {"high": above("train_loss_raw", 5.0), "slow": above(metric, 1.0)}
    rules = rules_of(detectors, *((name, "SEV2") for name in detectors))
    story = tell(**rules, names=("train_loss_raw", metric))
    story.rows(*[{"train_loss_raw": 2.0, metric: 0.01}] * 30)
    assert not needs_dense_sampling(story.policy, story.state)
    story.rows(*[{"train_loss_raw": 2.0, metric: 2.0}] * 4)  # as long as slow steps must last
    assert story.state.machine == "suspect"
    assert not needs_dense_sampling(story.policy, story.state)
    story.rows({"train_loss_raw": 6.0, metric: 2.0})
    assert needs_dense_sampling(story.policy, story.state)
