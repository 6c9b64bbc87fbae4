"""What people are told to do next: by the class of a trouble, and what else is known of it."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from itertools import combinations

import pytest

from supervise.actions import Rollback
from supervise.core import NOTICES, Fact, MessageDraft, choose_advice, has_reward
from supervise.core.model import (
    Advice,
    JobSettings,
    Ladder,
    Lead,
    RelaunchSettings,
    SpikeClass,
    Step,
)
from supervise.detectors import Nonfinite

from .conftest import (
    NAMES,
    NAN,
    Verify,
    above,
    good,
    messages,
    one_rule,
    rules_of,
    runbook_of,
    save,
    taken_back,
)

HIGH = above("train_loss_raw", 5.0)
HIGH_AND_WILD = {"high": above("train_loss_raw", 5.0), "wild": above("grad_global_norm", 9.0)}
ASKED = {"runbook": "calm", "cause": "loss 9", "plan": "a pause", "request": "ask-1"}
ASKED |= {"timeout_s": 900.0, "on_timeout": "deny", "status": "the job keeps training"}
GROWN = {"rule": "a.b", "expression": "x", "numbers": "loss 99", "step": 7}
GROWN |= {"advice": Advice(Lead.UNDER_WAY, (Step("calm runs"),))}


def draft_of(form: str, **facts) -> MessageDraft:
    draft = MessageDraft.of(NOTICES[form](severity="SEV1", incident="inc-1", **facts))
    draft.kind = draft.kind or "updated"
    return draft


def test_a_request_tells_how_to_answer_it_whatever_else_is_said_in_its_message():
    """Evidence is taken while people are asked; only their answer changes the job."""
    asked = draft_of("ApprovalAsked", **ASKED)
    answers = asked.next
    asked.merge(draft_of("RuleGrows", **GROWN), replace=False)

    assert asked.next == answers and "supervise approve RUN ask-1" in answers.text
    news = draft_of("RuleFires", subject="loss 99", **GROWN | {"advice": Advice()})
    news.merge(draft_of("RuleGrows", **GROWN), replace=False)
    assert news.next.lead == Lead.UNDER_WAY


BACK = "supervise rollback RUN --before 150"
WORDS = {
    "onset": "150",
    "rate": "learning rate 0.001 to 0.048 (step 150)",
    "forward": "the forward pass of step 200",
    "recurring": "3 excursions within 400 steps",
    "skipped": "step 150",
    "causes": "the weights were damaged or the batches bad",
    "end": "end the run if it still trains, ",
    "jump": "went from 0.001 to 0.048 at step 150",
    "wiring": "gradients that nothing clears, wiring.uncleared",
}
WAYS = {
    "back": (Step(command=BACK),),
    "start": (Step("start it again from ckpt-1 of step 99 (/c/1)", "supervise -- COMMAND"),),
    "stop": (Step(command="supervise stop RUN"),),
}
OF, F = SpikeClass, Fact


@pytest.mark.parametrize(
    ("kind", "facts", "text"),
    [
        # A rate x 48 is set right; no architecture is blamed for it, whatever was measured.
        (OF.STRUCTURAL, [F.RATE, F.ATTENTION, F.EXHAUSTED], "set it right; then go back: " + BACK),
        (OF.SUSPECT, [F.RATE, F.RECURRING, F.BACK], "set the schedule right"),
        (OF.UNDECIDED, [F.RATE], "compare it with what was meant"),
        (OF.NUMERIC, [F.RATE, F.BACK], "set the learning-rate schedule right, or it jumps again"),
        (OF.NUMERIC, [F.RATE], "to go back: " + BACK),
        (OF.PLATEAU, [F.RATE], "set it right; then go back: " + BACK),
        (OF.SCHEDULE, [F.RATE, F.BACK], "compare the learning-rate schedule with the one meant"),
        (OF.NO_EXCURSION, [F.RATE_STOPPED], "find why the learning rate went from 0.001 to 0.048"),
        (OF.SCHEDULE, [F.RATE], "to go back: " + BACK),
        # A dead input, and one bad batch.
        (OF.STRUCTURAL, [F.INPUT, F.EXHAUSTED], "look at what the model is given from step 150"),
        (
            OF.RECOVERABLE,
            [F.INPUT],
            "if it was meant: nothing to do; if not: end the run if it still trains, use no "
            "checkpoint saved since step 150; start it again from ckpt-1 of step 99",
        ),
        (OF.RECOVERABLE, [F.INPUT, F.PASSED, F.BACK], "look at the batch of step 150: it may"),
        (OF.SUSPECT, [F.INPUT, F.BACK], "look at the batch of step 150"),
        (OF.DATA, [F.INPUT, F.BACK], "look at the batch of step 150: it may come again"),
        (OF.DATA, [F.INPUT], "replay the batches from step 150 on a copy"),
        (OF.UNDECIDED, [F.INPUT], "look at the batch of step 150"),
        # Whatever else: the batch was skipped, or the loss is back.
        (OF.CONTAINED, [F.STATISTICS], "each evaluation is NaN, and so is what was saved since; "),
        (OF.RECOVERABLE, [F.STATISTICS, F.BACK, F.DRILL], "to go back: " + BACK),
        # Weights that were tested need no other test, and no rollback.
        (OF.UNDECIDED, [F.SOUND], "find what changed at step 150, the data or how the loss is"),
        (OF.DATA, [F.SOUND], "find what changed at step 150, the data or how the loss is"),
        (OF.NUMERIC, [F.INPUT], "look at the batch of step 150; to go back: "),
        (OF.NUMERIC, [F.INPUT, F.BACK, F.UNDONE], "look at the batch of step 150: it may come"),
        # The kind of the model.
        (OF.STRUCTURAL, [F.ATTENTION], "check attention (QK-norm, logits)"),
        (OF.RECOVERABLE, [F.HELD], "the learning rate was capped: set its schedule right"),
        (
            OF.STRUCTURAL,
            [F.ATTENTION, F.UNDONE],
            "the rollback did not help: check what the model is given from step 150, attention",
        ),
        (OF.SUSPECT, [F.ATTENTION, F.BACK], "watch attention logits, and try QK-norm"),
        (OF.STRUCTURAL, [F.ROUTING], "check the routing (rate of the router"),
        (OF.UNDECIDED, [F.NO_DESCENT, F.REWARD, F.WIRING], "judge it by its reward"),
        # A loss that never fell, of a job without a reward, is not one that need not fall.
        (
            OF.UNDECIDED,
            [F.NO_DESCENT],
            "where it is no objective, as in reinforcement learning, judge the run by its return",
        ),
        (OF.UNDECIDED, [F.NO_DESCENT, F.WIRING], "how the job is put together: gradients that"),
        (OF.UNDECIDED, [F.REWARD], "compare the weights from before and after"),
        (
            OF.STRUCTURAL,
            [F.WIRING, F.UNDONE],
            "nothing clears, wiring.uncleared: supervise runbook",
        ),
        (OF.STRUCTURAL, [F.WIRING, F.RATE], "set it right; then go back"),
        (OF.PLATEAU, [F.WIRING], "then start it again from ckpt-1"),
        (OF.SUSPECT, [F.WIRING, F.BACK], "3 excursions within 400 steps; mend how the job is put"),
        (OF.RECOVERABLE, [F.WIRING, F.BACK], "mend how the job is put together"),
        (OF.NO_EXCURSION, [F.WIRING], "mend how the job is put together"),
        # What was tried.
        (OF.STRUCTURAL, [], "lower the learning rate: supervise lr RUN 0.5; then go back: " + BACK),
        (OF.STRUCTURAL, [F.HELD, F.UNDONE], "a lower learning rate did not help"),
        (OF.STRUCTURAL, [F.EXHAUSTED, F.UNDONE], "nothing that was tried helped"),
        (OF.STRUCTURAL, [F.ENDED], "then start it again from ckpt-1"),
        (OF.NUMERIC, [], "the weights may be damaged; to go back: " + BACK),
        (OF.NUMERIC, [F.UNDONE, F.BACK], "unknown which: look at the batches from step 150"),
        (OF.PLATEAU, [F.UNDONE], "the rollback did not help"),
        (OF.PLATEAU, [], "go back 100 steps or more before step 150, and skip 200 to 500 batches"),
        (OF.CUT, [], "compare the tokens per update with what was meant; to go back: " + BACK),
        (OF.CUT, [F.BACK], "compare the tokens per update with what was meant"),
        (OF.CONTAINED, [], "find the first value that was not finite, in step 150; no rollback is"),
        (OF.CONTAINED, [F.INPUT], "look at the data of step 150; no rollback is needed: step 150"),
        (OF.CONTAINED, [F.UNDONE], "unknown which: look at the batches from step 150"),
        (OF.SUSPECT, [F.RECURRING, F.BACK], "3 excursions within 400 steps; compare the batches"),
        (OF.SUSPECT, [F.BACK, F.ENDED], "try a lower learning rate on a short run"),
        (OF.SUSPECT, [F.BACK], "a lower rate: supervise lr RUN 0.5"),
        (OF.ARTEFACT, [], "the weights are fine; check how the loss is logged"),
        (OF.UNDECIDED, [], "compare the weights from before and after on a fixed batch"),
        (OF.PLATEAU, [F.DRILL, F.RATE], "a drill did it, on purpose; to go back: " + BACK),
        (OF.NUMERIC, [F.UNDONE, F.CAME_BACK, F.BACK], "came again after the rollback, and ended"),
        (
            OF.STRUCTURAL,
            [F.EXHAUSTED, F.BACK, F.ATTENTION],
            "it came again, and the loss is back now",
        ),
        (OF.NUMERIC, [F.RESTORED, F.BACK, F.UNDONE], "find the NaN or Inf in the forward pass"),
    ],
)
def test_the_advice_follows_the_cause_the_model_and_what_was_tried(kind, facts, text):
    advice = choose_advice(kind, facts, WORDS, WAYS)

    assert advice.lead is None
    assert text in advice.text


@pytest.mark.parametrize(
    ("kind", "facts", "texts"),
    [
        (OF.NO_EXCURSION, [], []),
        (OF.RECOVERABLE, [F.BACK, F.RATE], []),
        (OF.EXPECTED, [], ["it was planned"]),
        (OF.NUMERIC, [F.DRILL, F.BACK, F.UNDONE], ["a drill did it, on purpose"]),
        (OF.NO_EXCURSION, [F.DRILL, F.RATE_STOPPED], ["a drill did it, on purpose"]),
        (OF.ARTEFACT, [F.DRILL], ["a drill did it, on purpose"]),
    ],
)
def test_nothing_is_asked_where_nothing_is_left_to_do(kind, facts, texts):
    assert choose_advice(kind, facts, WORDS, WAYS) == Advice(
        Lead.NOTHING, tuple(Step(text) for text in texts)
    )


@pytest.mark.parametrize("kind", list(SpikeClass))
def test_every_case_has_advice_and_attention_is_named_only_where_it_moved(kind):
    for count in range(4):
        for facts in combinations(Fact, count):
            advice = choose_advice(kind, facts, WORDS, WAYS)

            assert advice
            assert F.ATTENTION in facts or "ttention" not in advice.text
            assert F.ROUTING in facts or "router" not in advice.text
            assert "architecture" not in advice.text
            assert "{" not in advice.text
            assert not any("supervise " in step.text for step in advice.steps)


@pytest.mark.parametrize(
    ("metric", "is_reward"),
    [
        ("reward", True),
        ("rollout/ep_return", True),
        ("train.mean_episode_length", True),
        ("returned_tokens", False),
        ("train_loss_raw", False),
    ],
)
def test_a_job_that_reports_a_reward_is_told_by_a_word_of_a_name(metric, is_reward):
    assert has_reward(["grad_global_norm", metric]) is is_reward


def test_running_statistics_that_stay_broken_are_nothing_that_is_contained(tell):
    """The update of the batch was skipped; nobody takes back what it did beside the weights."""
    stats = above("running_stats_broken", 0.0)
    names = (*NAMES, "update_skipped", "running_stats_broken")
    story = tell(**one_rule(stats, "SEV1"), names=names, mode="observe", healthy=40)
    row = {"train_loss_raw": 2.0, "grad_global_norm": 1.0, "update_skipped": 0.0}
    bad = {"train_loss_raw": NAN, "grad_global_norm": NAN, "update_skipped": 1.0}
    story.rows(bad, *[row | {"running_stats_broken": 3.0}] * 90)
    story.exit(0)
    opened, *_, closed = [m for m in messages(story) if m["severity"] == "SEV1"]

    assert "no weight changed" not in str(opened)
    assert "running statistics are not finite since step" in closed["next"]
    assert "nothing to do" not in closed["next"]


@pytest.mark.parametrize("lag", [1, 2])
def test_broken_running_statistics_began_in_the_step_that_was_not_finite(tell, lag):
    """They are counted behind it, two steps on an accelerator; what it saved itself has them."""
    stats = above("running_stats_broken", 0.0)
    names = (*NAMES, "update_skipped", "running_stats_broken")
    story = tell(**one_rule(stats, "SEV1"), names=names, healthy=40)
    row = {"train_loss_raw": 2.0, "grad_global_norm": 1.0, "update_skipped": 0.0}
    save(story, "ckpt-1", 39)
    story.rows(row | {"train_loss_raw": NAN, "update_skipped": 1.0})
    save(story, "ckpt-2", 40)
    story.rows(*[row] * (lag - 1), *[row | {"running_stats_broken": 3.0}] * 3)

    assert story.state.incident.breach_step == 40
    assert good(story) == ["ckpt-1"]


def test_a_loss_that_is_not_finite_broke_running_statistics_and_no_overflow_beside_it(tell):
    """A scaler skips overflows now and then; the step counts that nobody skipped."""
    stats = above("running_stats_broken", 0.0)
    names = (*NAMES, "update_skipped", "running_stats_broken")
    story = tell(**one_rule(stats, "SEV1"), names=names, healthy=40)
    row = {"train_loss_raw": 2.0, "grad_global_norm": 1.0, "update_skipped": 0.0}
    story.rows(row | {"grad_global_norm": math.inf, "update_skipped": 1.0})
    story.rows(row | {"train_loss_raw": NAN})
    story.rows(row | {"running_stats_broken": 3.0})

    assert story.state.incident.breach_step == 41


# ── of what waits, and of what is still wrong at the end ──────────────────────────────────────────


def test_a_request_is_not_urged_once_the_loss_is_back(tell):
    """The gradient still fires, so the request waits; the loss that it is about came back."""

    def asked():
        return [message for message in messages(story) if message["kind"] == "approval"]

    story = tell(mode="approve", healthy=60, inhibit=())
    story.frames(8.0, times=60, grad=20.0)
    assert [message["title"] for message in asked()] == ["inc-1: approve soften?"]
    story.frames(2.0, times=60, grad=20.0)

    (_, message) = asked()
    assert message["title"] == "inc-1: soften is no longer needed; ask-1 still waits"
    assert message["next"].startswith("the loss is back without soften, so denying ask-1 loses ")
    assert "supervise deny RUN ask-1" in message["next"]
    assert "approve RUN" not in message["next"]
    assert story.replayed() == story.recorded()


def test_a_request_that_waits_is_told_with_both_answers_and_the_time_that_is_left(tell):
    story = tell(mode="approve", healthy=60, inhibit=())
    story.frames(8.0, times=700)
    asked, diagnosed = (messages(story)[i] for i in (0, -1))

    assert asked["form"] == "ApprovalAsked" and diagnosed["form"] == "Diagnosed"
    assert re.fullmatch(
        r"to approve soften: supervise approve RUN ask-1; to deny it: supervise deny RUN ask-1; "
        r"without an answer within \d+ min, it is denied, and automatic actions are off",
        diagnosed["next"],
    )


def test_a_job_that_does_not_go_on_from_its_checkpoint_is_not_nothing_to_do(tell):
    story = tell(healthy=60)
    story.launch(2, 1)
    story.attempt = 1
    story.notice("resume-refused", "the job did not take its checkpoint", 0, 0, {"path": "/c/a"})
    story.frames(2.0, times=5, grad=20.0)
    story.frames(2.0, times=60)
    closed = [message for message in messages(story) if message["kind"] == "closed"]

    asked = "supervise stop RUN; the job does not train on from its checkpoint"
    assert closed[-1]["next"].startswith(asked)
    assert closed[-1].get("lead") is None


@pytest.mark.parametrize(
    ("args", "newer", "first", "how"),
    [
        ((), False, "", "; replace the last argument by your job's own option"),
        (("--load", "a way of 'mine' to {checkpoint}"), False, "", ""),
        (("--resume",), False, "", "; --resume lets the job choose, so see that it takes this one"),
        (
            ("--resume",),
            True,
            "move checkpoints newer than ckpt-1 away, as --resume may take one of them; then ",
            "",
        ),
    ],
)
def test_the_checkpoint_to_start_from_is_the_one_that_the_command_loads(
    tell, args, newer, first, how
):
    story = tell(healthy=60, job=JobSettings(relaunch=RelaunchSettings(args=args)))
    save(story, "ckpt-1", 39)
    if newer:
        save(story, "ckpt-2", 49, ok=False)
    story.exit(1)

    given = [arg.replace("{checkpoint}", "/c/ckpt-1") for arg in args]
    given = shlex.join(given or ["<OPTION TO LOAD /c/ckpt-1>"])
    assert messages(story)[-1]["next"].endswith(
        f"; then {first}start it again from ckpt-1 of step 39 (/c/ckpt-1, verified; 20 steps are "
        f"made again){how}: supervise --policy RUN/policy.yaml -- COMMAND {given}"
    )


@pytest.mark.parametrize("judged", ["", "older", "good", "damaged"])
def test_a_save_without_a_verdict_is_named_as_that(tell, judged):
    """One that verifies, or is found to be damaged, is none any more."""
    story = tell(healthy=60)
    story.notice("checkpoint-saved", "", 0, 40, data={"path": "/c/a.pt", "attempt": 0})
    if judged:
        save(story, "ckpt-1", 29 if judged == "older" else 39, ok=judged != "damaged")
    story.exit(1)

    expected = {
        "": "list the checkpoints, as no good one is known: supervise checkpoints RUN; then start "
        "it again from /c/a.pt of step 39 (saved, not verified; 20 steps are made again)",
        "older": "from ckpt-1 of step 29 (/c/ckpt-1, verified; 30 steps are made again; /c/a.pt of "
        "step 39 is newer, but not verified)",
        "good": "from ckpt-1 of step 39 (/c/ckpt-1, verified; 20 steps are made again)",
        "damaged": "list the checkpoints, as no good one is known: supervise checkpoints RUN; then "
        "start it again with your job's own option to load the newest, or without it from step 0",
    }
    assert expected[judged] in messages(story)[-1]["next"]


def test_a_damaged_checkpoint_is_named_while_it_is_the_newest(tell):
    alarm = replace(above("checkpoint_ok", 0.0), gt=None, lte=0.0)
    damaged = one_rule(alarm, "SEV1", see="checkpoint-failure")
    for good_again in (False, True):
        story = tell(**damaged, names=(*NAMES, "checkpoint_ok"), healthy=40)
        save(story, "ckpt-1", 29)
        save(story, "ckpt-2", 39, ok=False, damage="it is empty")
        story.rows({"train_loss_raw": 2.0, "checkpoint_ok": 0.0})
        named = "/c/ckpt-2: it is empty; the newest good one is ckpt-1 of step 29: supervise checkp"
        assert named in messages(story)[-1]["next"]
        if good_again:
            save(story, "ckpt-3", 40)
        story.frames(2.0, times=10)
        story.exit(0)
        closed = [m["next"] for m in messages(story) if m["title"] == "inc-1: closed"]
        assert [named in then for then in closed] == [not good_again]


@pytest.mark.parametrize("when", ["before", "since", "overwritten", "given-up", "temporary"])
def test_a_save_of_the_trouble_or_without_hope_of_a_verdict_is_not_named(tell, when):
    alarm = replace(above("train_loss_raw", 5.0), m_of_n=(3, 50))
    story = tell(**one_rule(alarm, "SEV1"), healthy=60, answer=lambda key: None)

    def reported(path, step):
        data = {"path": path, "attempt": 0}
        story.notice("checkpoint-saved", "", 0, step + 1, data=data)

    reported("/c/good.pt", 39)
    story.frames(8.0)
    if when == "before":
        reported("/c/bad.pt", story.step)
    story.frames(8.0, 8.0)
    assert story.state.incident.breach_step == 60
    if when in ("since", "overwritten"):
        reported("/c/good.pt" if when == "overwritten" else "/c/bad.pt", story.step)
    if when == "temporary":
        story.notice("checkpoint-saved", "", 0, 51, data={"path": "/c/x.pt.partial", "attempt": 0})
    if when == "given-up":
        said = {"unverified": [0, 39]}
        story.notice("note", "it could not be verified", data=said)
    newest = story.state.checkpoints.unverified(story.step + 1)

    assert (newest and newest.path) == (
        None if when in ("overwritten", "given-up") else "/c/good.pt"
    )


@pytest.mark.parametrize(("ratio", "is_offered"), [(1.0, False), (0.0, True)])
def test_no_other_rollback_is_offered_while_the_batches_are_wrong(tell, ratio, is_offered):
    detectors = {"high": above("train_loss_raw", 5.0), "same": above("batch_unique_ratio", 0.5)}
    story = tell(
        **rules_of(detectors, ("high", "SEV1", "mend"), ("same", "SEV2")),
        names=("train_loss_raw", "batch_unique_ratio"),
        runbooks={"mend": runbook_of("mend", Rollback(), Verify(10, 5))},
        ladder=Ladder(("mend", "hold"), reset_after_steps=500),
        answer=lambda key: None,
    )
    wrong = {"train_loss_raw": 8.0, "batch_unique_ratio": ratio}
    story.rows(*[{"train_loss_raw": 2.0, "batch_unique_ratio": 0.0}] * 60, wrong)
    taken_back(story, 50)
    story.rows(*[wrong] * 15)
    held = [message for message in messages(story) if message["form"] == "Held"]

    assert held and ("supervise rollback RUN" in held[-1]["next"]) == is_offered
    wrong_data = "a further rollback would not help while the data are the same"
    assert (wrong_data in held[-1]["verdict"]) != is_offered


STOP = (
    "supervise stop RUN; then list the checkpoints, as no good one from before step 60 is known: "
    "supervise checkpoints RUN; then start it again with your job's own option to load one saved "
    "before step 60, or without it from step 0: supervise --policy RUN/policy.yaml -- COMMAND "
    "'<OPTION TO LOAD IT>'"
)
RELEASE = "then, for automatic actions again: supervise release RUN"
GIVEN = "look at what the model is given from step 60 on, and at what was changed last, as a"
GIVEN += " rollback did not end this"


def mending(tell, bad=8.0, **more):
    """A loss of 2 that is bad at step 60, of a policy that rolls back once."""
    story = tell(
        **one_rule(Nonfinite(("train_loss_raw",)) if bad != bad else HIGH, "SEV1", "mend"),
        runbooks={"mend": runbook_of("mend", Rollback(at_least=7), Verify(30, 5))},
        ladder=Ladder(("mend", "hold"), reset_after_steps=500),
        probation_steps=50,
        healthy=60,
        answer=lambda key: None,
        **more,
    )
    story.frames(bad)
    return story


def newest_hold(story):
    return [m for m in messages(story) if m["form"] == "Held"][-1]["next"]


AGAIN = "go back again (the weights of step 50 {}): supervise rollback RUN --before {}; " + RELEASE


@pytest.mark.parametrize(
    ("bad", "healthy", "expected"),
    [
        # The job trains on NaN: to end that comes first, whatever is looked at.
        (
            NAN,
            20,
            f"recommended: {AGAIN.format('held for 20 steps', 64)}; or: {STOP.replace('60', '71')}"
            "; and look at the batch of step 71, as going back held for 20 steps",
        ),
        (
            NAN,
            0,
            f"recommended: {STOP}; or: {AGAIN.format('were tried already', 53)}; and {GIVEN}",
        ),
        (
            8.0,
            0,
            f"recommended: {GIVEN}; or: {STOP}; or: {AGAIN.format('were tried already', 53)}",
        ),
        (
            8.0,
            20,
            "recommended: look at the batch of step 71, as going back held for 20 steps; "
            f"or: {AGAIN.format('held for 20 steps', 64)}; or: {STOP.replace('60', '71')}",
        ),
    ],
)
def test_advice_in_a_hold_follows_how_long_a_rollback_held(tell, bad, healthy, expected):
    story = mending(tell, bad)
    taken_back(story, 50)
    story.frames(*[2.0] * healthy, *[bad] * 35)

    assert newest_hold(story) == expected


@pytest.mark.parametrize(
    ("outcome", "first"),
    [
        ("failed", "a rollback failed"),
        ("lost", "a rollback may have happened (then its attempt is a new one)"),
        ("denied", ""),
    ],
)
def test_a_rollback_without_a_known_result_is_not_repeated_blindly(tell, outcome, first):
    story = mending(tell, mode="approve" if outcome == "denied" else "enforce")
    if outcome == "failed":
        story.finish(story.actions()[-1], error="no memory")
    elif outcome == "lost":
        story.tick(200.0)
    else:
        story.say("deny", id="ask-1")

    look = f"see first how the job is, as {first}: supervise status RUN; then: " if first else ""
    back = f"{look}supervise rollback RUN --before 53"
    assert newest_hold(story) == f"recommended: {back}; {RELEASE}; or: {STOP}"


@pytest.mark.parametrize("in_incident", [True, False])
def test_no_checkpoint_of_a_trouble_is_loaded_after_a_crash_in_it(tell, in_incident):
    story = tell(healthy=60, answer=lambda key: None)
    story.frames(8.0 if in_incident else 2.0)
    story.notice("checkpoint-saved", "", 0, 62, data={"path": "/c/bad.pt", "attempt": 0})
    story.exit(1)
    then = messages(story)[-1]["next"]

    assert then.startswith("the job is down; read the end of the job's output; then list the")
    assert ("load one saved before step 60, or without it" in then) == in_incident
    assert ("/c/bad.pt" in then) != in_incident


def test_the_rate_is_a_cause_too_where_it_was_cut_with_the_rollback(tell):
    story = mending(tell, NAN, names=("train_loss_raw", "grad_global_norm"))
    taken_back(story, 50)
    story.frames(2.0, times=90)
    (closed,) = (message for message in messages(story) if message["form"] == "Closed")

    causes = "the weights were damaged, the batches bad, or the learning rate too high (it was cut"
    assert f"going back ended it, so {causes} to 10 % too), unknown which" in closed["next"]


@pytest.mark.parametrize(("share", "text"), [(60.0, "2.5"), (1.0, "")])
def test_a_run_that_waits_for_data_is_told_how_much_slower_it_is(tell, share, text):
    slow = {"above": above("dataloader_stall_frac", 50.0), "high": above("grad_global_norm", 9.0)}
    story = tell(
        **rules_of(slow, ("above", "SEV2"), ("high", "SEV2")),
        names=("grad_global_norm", "dataloader_stall_frac"),
    )
    story.rows(*[{"grad_global_norm": 1.0, "dataloader_stall_frac": 1.0}] * 60)
    story.rows(*[{"grad_global_norm": 1.0 if text else 20.0, "dataloader_stall_frac": share}] * 60)
    slower = f"the run is about {text} times slower while it waits; use more workers or prefetch at"

    expected = f"{slower} the next restart" if text else "it can wait until tomorrow"
    assert expected in messages(story)[-1]["next"]


def test_a_hold_because_the_job_has_ended_does_not_say_that_it_trains(tell):
    error = "the job has ended (exit code 0)"
    story = tell(healthy=60, answer=lambda key: None)
    story.frames(60.0)
    story.finish(story.actions()[-1], {"job_ended": True}, error=error)
    held = [message for message in messages(story) if message["form"] == "Held"]

    assert error in held[-1]["verdict"] and "keeps training" not in held[-1]["verdict"]
    assert held[-1]["next"].startswith("list the checkpoints") and "RUN --" not in held[-1]["next"]
    assert "supervise release" not in held[-1]["next"]


def test_what_was_done_is_not_denied_by_a_later_message(tell):
    healthy = {"train_loss_raw": 2.0, "update_skipped": 0.0, "grad_global_norm": 1.0}
    rules = rules_of(HIGH_AND_WILD, ("high", "SEV2"), ("wild", "SEV1"))
    story = tell(names=tuple(healthy), **rules)
    story.rows(*[healthy] * 40, healthy | {"train_loss_raw": 9.0})
    story.rows(healthy | {"train_loss_raw": float("nan"), "update_skipped": 1.0})
    story.rows(healthy, healthy | {"grad_global_norm": 20.0})
    first, *_, newest = messages(story)

    assert (first["lead"], newest["lead"]) == (Lead.NO_ACTION, Lead.SKIPPED)
