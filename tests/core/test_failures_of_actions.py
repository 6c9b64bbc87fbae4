"""Actions fail, did not help, or cannot work here: what is taken back, and what follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervise.actions import LrScale, Pause, Resume, Rollback, SkipStep, Snapshot, Stop, Undo
from supervise.core.model import Budget, Inhibit, Ladder
from supervise.detectors import Nonfinite

from .conftest import (
    AMPLE,
    NAN,
    Touch,
    Verify,
    above,
    messages,
    one_rule,
    rule_on,
    rules_of,
    runbook_of,
)

BOOKS = {
    "mend": (Pause(), Snapshot(), Rollback(at_least=5), Resume(), Verify()),
    "ease": (Snapshot(), LrScale(set=0.5), SkipStep(), Verify()),
    "end": (Snapshot(), Stop()),
}
BACK = {"step": 30, "attempt": 0}  # what a rollback answers; others have no use for it
ALL_STEPS = [
    (name, i)
    for name, steps in BOOKS.items()
    for i, step in enumerate(steps)
    if not step.engine_step
]


def mending(name):
    return {
        **one_rule(above("train_loss_raw", 5.0), "SEV1", name),
        "runbooks": {name: runbook_of(name, *BOOKS[name])},
        "ladder": Ladder((name, "hold")),
        "budgets": AMPLE,
    }


@pytest.mark.parametrize(("name", "at"), ALL_STEPS)
@pytest.mark.parametrize("how", ["fails", "late"])
def test_each_step_of_each_runbook_may_fail(tell, name, at, how):
    def answer(key):
        return None if f"/{at}-" in key else BACK

    story = tell(answer=answer, **mending(name), healthy=50, then=8.0)
    action = story.actions()[-1]
    assert f"/{at}-" in action
    if how == "fails":
        story.finish(action, BACK, "no space left on device")
    else:
        story.tick(1000.0)
        story.finish(action, BACK)
    story.frames(2.0, times=3)

    assert story.state.machine == "holding"
    assert len(story.kinds("in_doubt")) == (how == "late")
    assert bool(story.kinds("note", "late-outcome")) == (how == "late")
    asked = [label.rpartition("/")[2] for label in story.actions()]
    numbers = [label.partition("-")[0] for label in asked if not label.startswith("undo-")]
    assert numbers == [str(number) for number in range(at + 1)]
    assert len(set(asked)) == len(asked)
    if name == "mend":  # the pause does not stay; a resume that failed leaves it to its lease
        assert ("undo-resume" in asked) == (at != 3)


def test_an_outcome_that_comes_twice_counts_once(tell):
    story = tell(answer=lambda key: None, **mending("mend"), healthy=50, then=8.0)
    (pause,) = story.actions()
    for _ in range(2):
        story.finish(pause, BACK)

    assert len(story.actions()) == 2
    assert story.kinds("note", "late-outcome")


def test_on_a_full_disk_the_remedy_comes_without_evidence(tell):

    def answer(key):
        full = {"retryable": True, "no_space": True}, "no space left on device"
        return full if "snapshot" in key else BACK

    story = tell(answer=answer, **mending("mend"), healthy=50, then=8.0)

    assert labels(story) == ["1/0-pause", "1/1-snapshot", "1/2-rollback", "1/3-resume"]
    assert [r.data["action"]["id"] for r in story.kinds("abort")] == ["inc-1/1/1-snapshot"]


@pytest.mark.parametrize(("calm", "second"), [(100, "touch"), (560, "reach")])
def test_the_ladder_resets_only_after_clean_steps(tell, calm, second):
    story = tell(
        ladder=Ladder(("soften", "back", "hold"), reset_after_steps=500), healthy=50, then=8.0
    )
    story.frames(2.0, times=8)
    story.frames(8.0)  # a relapse on probation: back
    story.frames(2.0, times=calm)
    assert story.state.machine == "nominal"
    story.frames(8.0)

    begun = [action for action in story.actions() if "undo" not in action]
    assert begun[2].endswith(second)


@pytest.mark.parametrize("order", [1, -1])
def test_source_and_target_in_one_step_do_not_depend_on_their_order(tell, order):
    """The muted rule does not act although it is listed first, and is on record."""
    story = tell(rules=tell().policy.rules[::order], healthy=50, then=99.0)

    assert story.actions() == ["inc-1/1/0-touch"]
    assert [d.data["suppressed_by"] for d in story.kinds("suppressed")] == ["inhibit:gone"]


def test_a_mute_by_state_ends_with_the_state(tell):
    inhibit = (Inhibit(mute=("grad",), by_state=("acting", "probation")),)
    story = tell(inhibit=inhibit, healthy=50, then=8.0)
    story.frames(2.0, times=3, grad=20.0)
    assert story.kinds("suppressed")[-1].data["suppressed_by"] == "inhibit:acting"
    assert "grad" not in story.state.incident.rules
    story.frames(2.0, times=60, grad=20.0)

    assert story.state.machine == "suspect"
    assert story.state.incident.rules == ["grad"]


@pytest.mark.parametrize(("again", "opens"), [(0, False), (1, True)])
def test_what_held_only_while_an_action_changed_the_job_opens_nothing_by_its_keep(
    tell, again, opens
):
    plain = tell().policy.rules
    rules = (plain[0], replace(plain[1], keep_steps=250), plain[2])
    inhibit = (Inhibit(mute=("grad",), by_state=("acting", "probation")),)
    story = tell(rules=rules, inhibit=inhibit, healthy=50, then=8.0)
    story.frames(2.0, times=3, grad=20.0)
    story.frames(2.0, times=60)
    assert story.state.machine == "nominal"
    story.frames(2.0, times=again, grad=20.0)
    story.frames(2.0, times=5)

    assert (story.state.incident is not None) == opens


@pytest.mark.parametrize("again", [0, 5])
def test_three_samples_in_128_that_are_over_by_the_end_of_their_mute_are_not_told(tell, again):
    """NaN of forty steps, told as what it is; what comes behind it is told once."""
    detectors = {
        "applied": Nonfinite(("train_loss_raw",)),
        "few": Nonfinite(("train_loss_raw", "grad_global_norm"), m_of_n=(3, 128)),
    }
    rules = tuple(
        rule_on(detectors, name, severity)
        for name, severity in (("applied", "SEV0"), ("few", "SEV1"))
    )
    inhibit = (Inhibit(mute=("few",), by_rule="applied"),)
    story = tell(detectors=detectors, rules=rules, inhibit=inhibit, healthy=50)
    story.frames(NAN, times=40)
    story.frames(2.0, times=30)
    story.frames(2.0, times=again, grad=NAN)
    story.frames(2.0, times=30)

    told = [message for message in messages(story) if "few" in message["why"]]
    assert len(told) == (again > 0)


def easing(tell, **changes):
    books = (
        runbook_of("ease", Pause(), LrScale(set=0.5, rewarm=200), Resume(), Verify()),
        runbook_of("back", Touch(), Verify()),
        runbook_of("other", Undo(), Touch(), Verify()),
    )
    detectors = {"high": above("train_loss_raw", 5.0), "huge": above("train_loss_raw", 50.0)}
    made = {
        **rules_of(detectors, ("high", "SEV1", "ease"), ("huge", "SEV0", "other")),
        "runbooks": {book.name: book for book in books},
        "ladder": Ladder(("ease", "back", "hold")),
        "budgets": AMPLE,
    }
    return tell(**(made | changes), healthy=50)


def labels(story):
    return [action.split("/", 1)[1] for action in story.actions()]


def test_a_lower_rate_that_did_not_help_is_taken_back_before_the_next_rung(tell):
    """What a later step took back already (pause by resume) is not taken back again."""
    story = easing(tell)
    story.frames(8.0, times=35)

    steps = "1/0-pause 1/1-lr_scale 1/2-resume 1/undo-lr_scale 2/0-touch"
    assert labels(story) == steps.split()
    undo = story.kinds("intent")[3].data["action"]
    assert undo["args"] == {"value": 1.0, "rewarm_steps": 0}
    order = [d.kind for d in story.log if d.kind in ("verify", "intent")]
    assert order[-4:] == ["verify", "intent", "intent", "verify"]


@pytest.mark.parametrize("outcome", [({}, "gone"), None])
def test_an_undo_that_fails_or_has_no_outcome_is_asked_for_once_and_holds(tell, outcome):
    story = easing(tell, answer=lambda key: outcome if "undo" in key else {})
    story.frames(8.0, times=60)
    story.tick(1000.0)
    story.tick(1000.0)

    assert labels(story)[-1] == "1/undo-lr_scale" and labels(story).count("1/undo-lr_scale") == 1
    assert story.state.machine == "holding"
    assert story.state.incident.severity == "SEV0"


def test_a_step_undo_takes_back_what_an_earlier_runbook_did(tell):
    story = easing(tell)
    story.frames(8.0)
    story.frames(99.0)
    assert labels(story)[3:] == ["2/0-undo-lr_scale", "2/1-touch"]

    story = easing(tell)
    story.frames(99.0)
    assert labels(story) == ["1/1-touch"]


def refusing(tell, **changes):
    books = {
        "mend": runbook_of("mend", Rollback(), Verify(), if_refused="back"),
        "back": runbook_of("back", Touch(), Verify(), if_refused="mend"),
    }
    rule = one_rule(above("train_loss_raw", 5.0), "SEV1", "mend")
    made = {"runbooks": books, **rule, "ladder": Ladder(("mend", "back", "hold"))}
    return easing(tell, **(made | changes))


def test_what_cannot_work_here_gives_way_to_what_can(tell):
    story = refusing(tell)
    story.notice("rollback-unavailable", "a for statement drives the step")
    story.frames(8.0)

    assert labels(story) == ["1/0-touch"]
    refused = story.kinds("abort", "refused")[0]
    assert refused.data == {"what": "refused", "runbook": "mend", "substitute": "back"}
    assert story.state.incident.escalation.level == 1


def test_a_substitute_that_did_not_help_is_not_tried_again(tell):
    books = (
        runbook_of("mend", Rollback(), Verify(), if_refused="back"),
        runbook_of("again", Rollback(), Verify(), if_refused="back"),
        runbook_of("back", Touch(), Verify()),
    )
    story = refusing(
        tell,
        runbooks={book.name: book for book in books},
        ladder=Ladder(("mend", "again", "hold")),
    )
    story.notice("rollback-unavailable", "a for statement drives the step")
    story.frames(8.0, times=60)

    assert labels(story) == ["1/0-touch"] and story.state.machine == "holding"


def test_a_recovery_needs_the_update_norm_where_its_rules_read_it(tell):
    """The rule is quiet, the loss is back, the updates are three times what they were."""
    for norm, passed in ((3.0, False), (1.2, True)):
        story = easing(
            tell,
            names=("train_loss_raw", "update_norm"),
            **one_rule(above("update_norm", 9.0), "SEV1", "ease"),
            runbooks={"ease": runbook_of("ease", LrScale(set=0.5), Verify())},
            ladder=Ladder(("ease", "hold")),
        )
        story.rows({"train_loss_raw": 2.0, "update_norm": 20.0})
        story.rows(*[{"train_loss_raw": 2.0, "update_norm": norm}] * 40)
        assert bool(story.kinds("verify", "passed")) == passed
        failed = story.kinds("verify", "failed")
        assert bool(failed) != passed
        assert all("update_norm is 3 times its value before" in d.reason for d in failed)


def test_what_the_job_itself_refuses_gives_way_too(tell):
    """Found out only when it was asked: what was done before is taken back first."""

    def answer(key):
        return ({"refused": True}, "no savepoint is older") if "rollback" in key else {}

    mend = runbook_of("mend", Pause(), Rollback(), Resume(), Verify(), if_refused="back")
    back = runbook_of("back", Touch(), Verify())
    story = refusing(tell, answer=answer, runbooks={"mend": mend, "back": back})
    story.frames(8.0)

    assert labels(story) == ["1/0-pause", "1/1-rollback", "1/undo-resume", "2/0-touch"]
    assert story.kinds("abort", "refused")[0].data["substitute"] == "back"


def test_no_rollback_is_recommended_that_the_job_has_just_refused(tell):
    def answer(key):
        return ({"refused": True}, "no savepoint is older") if "rollback" in key else {}

    story = tell(answer=answer, **mending("mend"), healthy=50)
    story.frames(8.0)
    page = messages(story)[-1]

    assert "a person is needed" in page["title"] and "no savepoint is older" in str(page)
    assert "supervise rollback" not in page["next"] and "supervise stop RUN" in page["next"]


@pytest.mark.parametrize(
    ("moved", "why"),
    [
        (0.05, ""),
        (1.5, ""),
        (2.5, "12.5 times the usual one, as large as those from step 50 on: what changed there"),
        (9.0, "45 times the usual one, as if other weights had been written back"),
    ],
)
def test_the_first_update_from_restored_weights_is_a_usual_one(tell, moved, why):
    """What keeps other weights elsewhere, and writes them back, makes a far larger one; so does
    what the job changed at the onset, as layers that it trains since."""
    done = {"step": 40, "attempt": 1, "from_step": 60}
    story = tell(
        answer=lambda key: done, names=("train_loss_raw", "update_norm"), **mending("mend")
    )
    story.rows(*[{"train_loss_raw": 2.0, "update_norm": 0.2}] * 50)
    story.rows({"train_loss_raw": 8.0, "update_norm": 3.0})
    story.attempt = 1
    story.rows({"train_loss_raw": 2.0, "update_norm": moved})

    if why:
        (failed,) = story.kinds("verify", "failed")
        assert why in failed.reason
    else:
        (compared,) = story.kinds("verify", "weights")
        assert f"the first update is {moved / 0.2:.3g} times the usual" in compared.reason
    assert (story.state.machine == "holding") is bool(why)


ALONE = {"budgets": {"all": Budget(0)}}  # what would help may not
RANKS = "no rollback is possible: 2 ranks"


def helpless(tell, how, **more):
    """A trouble that lasts, and whose remedy is not possible, or was refused by its budget."""
    story = tell(**(mending("mend") | more | (ALONE if how == "budget" else {})), healthy=50)
    if how == "refused":
        story.notice("rollback-unavailable", RANKS)
    story.frames(8.0)
    return story


@pytest.mark.parametrize("how", ["refused", "budget"])
def test_where_nothing_can_help_that_is_a_sev0_and_repeated(tell, how):
    story = helpless(tell, how)
    assert messages(story)[-1]["severity"] == "SEV0"

    def pages():
        return [m for m in messages(story) if "still " in m["title"]]

    story.frames(8.0, times=400)
    assert not pages()
    story.tick(600.0)
    assert len(pages()) == 1 and pages()[0]["severity"] == "SEV0"
    assert "supervise stop RUN" in pages()[0]["next"]
    story.tick(1000.0)
    assert len(pages()) == 2
    story.say("ack")
    story.tick(1000.0)
    assert len(pages()) == 2
    assert not [action for action in story.actions() if action.endswith("stop")]


def test_a_policy_that_gives_up_stops_what_lasts(tell):
    story = helpless(tell, "budget", give_up="stop")
    assert "is stopped unless it recovers within 20 steps" in messages(story)[-1]["next"]
    story.frames(8.0, times=18)
    before = len(story.actions())
    story.frames(8.0, times=6)
    asked = [action.rpartition("/")[2] for action in story.actions()[before:]]
    assert asked == ["0-snapshot", "1-stop"]
    assert story.kinds("intent")[-1].data["action"]["args"]["exit_code"] == 78

    over, known = (helpless(tell, "refused", give_up="stop") for _ in range(2))
    known.say("ack")
    known.frames(8.0, times=60)
    over.frames(2.0, times=60)
    assert not [key for key in (*over.actions(), *known.actions()) if key.endswith("stop")]
    assert over.state.incident is None and over.kinds("incident", "closed")
