"""What did not help does not stay; and what cannot work here gives way to what can."""

from __future__ import annotations

from supervise.actions.lr_scale import LrScale
from supervise.actions.pause import Pause
from supervise.actions.resume import Resume
from supervise.actions.rollback import Rollback
from supervise.actions.undo import Undo
from supervise.core.model.events import Finished, Notice
from supervise.core.model.policy import Budget, Ladder

from .conftest import Touch, Verify, above, one_rule, rule_on, runbook_of


def easing(tell, **changes):
    books = {
        "ease": runbook_of("ease", Pause(), LrScale(set=0.5, rewarm=200), Resume(), Verify()),
        "back": runbook_of("back", Touch(), Verify()),
        "other": runbook_of("other", Undo(), Touch(), Verify()),
    }
    detectors = {
        "high": above("train_loss_raw", 5.0),
        "huge": above("train_loss_raw", 50.0),
    }
    made = {
        "detectors": detectors,
        "rules": (
            rule_on(detectors, "high", "SEV1", "ease"),
            rule_on(detectors, "huge", "SEV0", "other"),
        ),
        "runbooks": books,
        "ladder": Ladder(("ease", "back", "hold")),
        "budgets": {name: Budget(9) for name in ("all", "lr_scale", "touch", "rollback")},
        "inhibit": (),
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


def test_what_helped_stays(tell):
    story = easing(tell)
    story.frames(8.0)
    story.frames(2.0, times=60)

    assert story.state.machine == "nominal"
    assert not any("undo" in label for label in labels(story))


def test_an_undo_that_fails_holds_instead_of_climbing(tell):

    def answer(key):
        return Finished(0, key, "undo" not in key, {}, "gone" if "undo" in key else None)

    story = easing(tell, answer=answer)
    story.frames(8.0, times=60)

    assert labels(story)[-1] == "1/undo-lr_scale"
    assert story.state.machine == "holding"
    assert story.state.incident.severity == "SEV0"


def test_a_step_undo_takes_back_what_an_earlier_runbook_did(tell):
    """Its own intents, in the runbook that has the step; with nothing to undo it is passed over."""
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
    story.send(Notice(1, "rollback-unavailable", "a for statement drives the step"))
    story.frames(8.0)

    assert labels(story) == ["1/0-touch"]
    refused = story.kinds("abort", "refused")[0]
    assert refused.data == {"what": "refused", "runbook": "mend", "substitute": "back"}
    assert story.state.incident.escalation.level == 1


def test_a_recovery_needs_the_update_norm_where_its_rules_read_it(tell):
    """The rule is quiet, the loss is back, the updates are three times what they were."""
    names = ("train_loss_raw", "update_norm")
    book = runbook_of("ease", LrScale(set=0.5), Verify(within=30, clear_for=5))
    for norm, passed in ((3.0, False), (1.2, True)):
        story = easing(
            tell,
            names=names,
            **one_rule(above("update_norm", 9.0), "SEV1", "ease"),
            runbooks={"ease": book},
            ladder=Ladder(("ease", "hold")),
        )
        story.rows({"train_loss_raw": 2.0, "update_norm": 20.0})
        story.rows(*[{"train_loss_raw": 2.0, "update_norm": norm}] * 40)
        assert bool(story.kinds("verify", "passed")) == passed
        if not passed:
            assert (
                "update_norm is 3 times its value before"
                in story.kinds("verify", "failed")[0].reason
            )


def test_what_the_job_itself_refuses_gives_way_too(tell):
    """Found out only when it was asked: what was done before is taken back first."""

    def answer(key):
        if "rollback" in key:
            return Finished(0, key, False, {"refused": True}, "no savepoint is older")
        return Finished(0, key, True)

    mend = runbook_of("mend", Pause(), Rollback(), Resume(), Verify(), if_refused="back")
    back = runbook_of("back", Touch(), Verify())
    story = refusing(tell, answer=answer, runbooks={"mend": mend, "back": back})
    story.frames(8.0)

    assert labels(story) == ["1/0-pause", "1/1-rollback", "1/undo-resume", "2/0-touch"]
    assert story.kinds("abort", "refused")[0].data["substitute"] == "back"
