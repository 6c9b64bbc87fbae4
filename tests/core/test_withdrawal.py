"""A destructive action asks for its reason again until the moment it acts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from supervise.actions import CheckWeights, Snapshot, Stop
from supervise.core import TaskAlternation, explain_withdrawal, plan_context
from supervise.core.model import Approval, Beat, Budget, Frame, JobSettings, Runbook, Tick
from supervise.detectors import Absence, Nonfinite, Threshold

from .conftest import (
    NAMES,
    NAN,
    SECOND,
    Reach,
    Story,
    Touch,
    Verify,
    above,
    messages,
    one_rule,
    rule_on,
    rules_of,
    runbook_of,
)

IDLE_S = 10  # the idle watch of `stop-and-page`


@dataclass
class Job:
    """A job that makes a step a second and may stand still, and the edge that performs a stop."""

    story: Story
    stopped: bool = False
    asked_s: int | None = None

    def seconds(self, count: int, *, step: bool, phase: str = "step") -> None:
        """In each second perhaps a frame, the tick, and what the edge comes to."""
        story = self.story
        for _ in range(count):
            story.at_ns += SECOND
            if step:
                story.step += 1
                story.send(Frame(story.at_ns, 0, story.attempt, story.step, (2.0, 1.0)))
            story.send(Tick(story.at_ns, (Beat(0, story.at_ns, phase),)))
            self._edge(story)

    def _edge(self, story: Story) -> None:
        run = story.state.incident.run if story.state.incident is not None else None
        if run is None or not run.intent.awaits_outcome("stop") or self.stopped:
            self.asked_s = None
            return
        now_s = story.at_ns // SECOND
        self.asked_s = now_s if self.asked_s is None else self.asked_s
        if now_s - self.asked_s < IDLE_S:
            return
        gone = explain_withdrawal(story.policy, story.state)
        if gone:
            asked = run.intent.action_id
            story.finish(asked, {"refused": True}, gone)
        else:
            self.stopped = True


def stalling(tell, limit=120.0, **changes):
    """A job under a policy that stops what stands still for `limit` seconds."""
    book = runbook_of("end", Snapshot(), Stop(if_idle=IDLE_S))
    made = {
        **one_rule(Absence(after={"min": limit}), "SEV0", "end"),
        "runbooks": {**tell().policy.runbooks, "end": book},
        "budgets": {"all": Budget(99)},
        "answer": lambda key: None if key.endswith("stop") else {},
    }
    job = Job(tell(**(made | changes)))
    job.seconds(40, step=True)
    return job


@pytest.mark.parametrize("limit", [4, 30])
def test_no_job_that_goes_on_is_stopped(tell, limit):
    """Stalls of every length up to the end of the idle watch, each followed by training."""
    for length in range(1, limit + IDLE_S):
        job = stalling(tell, float(limit))
        job.seconds(length, step=False)
        job.seconds(60, step=True)

        assert not job.stopped, f"a stall of {length} s"
        assert job.story.state.incident is None and job.story.state.machine != "holding"


def test_a_job_that_stays_hung_is_stopped(tell):
    job = stalling(tell, 30.0)
    job.seconds(33, step=False)
    job.seconds(5, step=True)
    job.seconds(30 + IDLE_S + 5, step=False)

    assert job.stopped


def test_a_job_that_a_signal_stops_is_suspended_and_not_hung(tell):
    """Neither while it is stopped, nor when that began in the middle of the idle watch."""
    job = stalling(tell)
    job.seconds(300, step=False, phase="suspended")
    assert job.story.actions() == []
    job.seconds(125, step=False)
    assert job.story.actions() != []
    job.seconds(300, step=False, phase="suspended")

    assert not job.stopped and job.story.kinds("abort")[0].data["what"] == "withdrawn"


def test_a_yes_to_a_stop_is_void_for_a_job_that_makes_steps_again(tell):
    job = stalling(tell, approvals={"stop": Approval()})
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


def high(tell, book=BOOK, **changes):
    """A loss of 9.0 is in breach; evidence takes as long as the test wants."""
    base = tell()
    made = {
        "runbooks": {**base.policy.runbooks, "fix": book},
        "answer": lambda key: None,
        "rules": (rule_on(base.policy.detectors, "high", "SEV1", "fix"),),
    }
    return tell(**(made | changes), healthy=60, then=9.0)


@pytest.mark.parametrize(
    ("book", "loss", "asks"),
    [
        (BOOK, 2.0, False),
        (BOOK, 4.9, True),  # `high` is above 5 and cleared, but the loss is far out of its band
        (TAKES_BACK, 2.0, True),  # a bad shard, an oversized update: the harm stays
    ],
)
def test_a_rule_that_cleared_asks_for_nothing_any_more_unless_harm_stays(tell, book, loss, asks):
    """What came back while evidence was taken: nothing is done, and it counts as no try."""
    story = high(tell, book)
    (snapshot,) = story.actions()
    story.frames(loss, times=3)
    assert not story.state.firing(story.policy)
    story.finish(snapshot)

    assert story.actions()[-1].endswith("touch") is asks
    if asks:
        return
    why = "fix withdrawn: every rule that requested it has cleared"
    assert story.kinds("abort")[0].reason == why
    assert story.state.history.tried_runbooks == {} and story.state.history.cooldown == {}
    story.frames(9.0)
    assert len(story.actions()) == 2, "it may be asked for again at once"


@pytest.mark.parametrize(
    ("phase", "fails"), [("step", True), ("suspended", False), ("loading", False)]
)
def test_silence_that_has_a_reason_fails_no_verification(tell, phase, fails):
    """Two hours without a frame to verify by: somebody stopped the job, or it restores."""
    story = high(tell, TAKES_BACK, answer=lambda key: {})
    assert story.actions()[-1].endswith("touch")
    story.beat(7200, phase)

    assert bool(story.kinds("verify", "failed")) is fails


# ── a rollback for a loss is withdrawn where the probe batch says that the weights are good ───────


GOOD, BAD = 2.05, 3.0
KEPT = JobSettings(probe_batch=True)
WAS = [[10, 2.2], [25, 2.0], [60, 9.0]]


def checked(tell, probe, limit, *, again, severity="SEV1", for_steps=1, **more):
    """A job whose loss above a limit, or that is none, is taken back unless `probe` objects."""

    def answer(key):
        if "check_weights" in key:
            return probe(key)
        return {"attempt": 1} if "touch" in key else {}

    steps = (CheckWeights(again=again), Snapshot(), Touch(), Verify(within=30, clear_for=5))
    detector = Nonfinite(NAMES[:1]) if limit is None else above("train_loss_raw", limit)
    rule = one_rule(detector, severity, "back", for_steps=for_steps)
    runbooks = {"back": runbook_of("back", *steps)}
    return tell(**rule | {"runbooks": runbooks, "answer": answer, "job": KEPT} | more)


def asked(tell, *answers, unknown=False, changes=None, **result):
    """A job of 40 healthy steps and one of loss 8, whose probe batch answers as the test says."""
    found = iter(answers)

    def probe(key):
        said = {"why": "2 ranks"} if unknown else {"loss": next(found), "was": WAS}
        return said | result

    story = checked(tell, probe, 5.0, again=40, healthy=40, **changes or {})
    story.frames(8.0)
    return story


def verbs(story):
    return [key.rpartition("-")[2] for key in story.actions()]


def test_bad_batches_cost_no_rollback_and_are_told_once(tell):
    story = asked(tell, GOOD)
    story.frames(2.0, times=60)

    assert verbs(story) == ["check_weights", "snapshot"]
    assert story.kinds("abort", "withdrawn")[0].reason == (
        "back withdrawn: the weights show no damage: the probe batch has a loss of 2.05, and had 2 "
        "before step 40"
    )
    titles = [message["title"] for message in messages(story)]
    assert "inc-1: back is called off" in titles and not any("started" in title for title in titles)
    (withdrawn,) = [m["steps"] for m in messages(story) if "is called off" in m["title"]]
    assert [step["text"] for step in withdrawn] == [
        "the loss of step 40 is above its normal range",
        "decided again in 40 steps at the earliest",
    ]
    assert story.state.incident is None and story.state.machine == "nominal"


@pytest.mark.parametrize(
    "result", [{"loss": BAD}, {"loss": float("inf")}, {"was": []}, {"was": WAS[2:]}, {"loss": NAN}]
)
def test_weights_that_are_bad_or_of_which_nobody_knows_are_taken_back(tell, result):
    story = asked(tell, GOOD, **result)

    assert verbs(story) == ["check_weights", "snapshot", "touch"]
    assert any("automatic action started" in message["title"] for message in messages(story))


@pytest.mark.parametrize(
    ("was", "begins"),
    [([[10, 2.2], [20, 2.0], [35, 4.0]], 35), ([[10, 2.2], [20, 4.0], [35, 2.1]], 40)],
)
def test_no_savepoint_is_gone_back_to_whose_weights_were_bad_already(tell, was, begins):
    """The loss of the run had shown it later than the probe batch did."""
    story = asked(tell, BAD, was=was)

    assert verbs(story)[-1] == "touch" and story.state.incident.breach_step == begins


@pytest.mark.parametrize("loss", [2.0, 8.0])
def test_where_nobody_can_say_the_losses_are_waited_for(tell, loss):
    """A quarter of the steps, once: what is over by then needs no rollback."""
    story = asked(tell, unknown=True)
    first = verbs(story)
    story.frames(loss, times=12)

    assert first == ["check_weights", "snapshot"]
    assert ("touch" in verbs(story)) is (loss == 8.0)
    assert verbs(story).count("touch") <= 1
    reasons = [m["why"] for m in messages(story) if "started" in m["title"]]
    assert all("nothing could judge the weights" in reason for reason in reasons)


def scaled(tell, probe, *rows):
    """A job of 40 healthy steps whose loss is none then, and whose scaler may skip updates."""
    made = {"again": 40, "severity": "SEV0", "for_steps": 2, "healthy": 40}
    story = checked(tell, probe, None, **made, names=(*NAMES, "update_skipped"))
    for loss, skipped in rows:
        story.rows({"train_loss_raw": loss, "grad_global_norm": loss, "update_skipped": skipped})
    return story


@pytest.mark.parametrize(
    ("answer", "skipped", "done"),
    [
        ({"loss": GOOD, "was": WAS}, 1.0, ["check_weights", "snapshot"]),
        ({"loss": BAD, "was": WAS}, 1.0, ["check_weights", "snapshot", "touch"]),
        ({"why": "no loss"}, 1.0, ["check_weights", "snapshot", "touch"]),
        ({"loss": GOOD, "was": WAS}, 0.0, ["snapshot", "touch"]),
    ],
)
def test_what_was_skipped_each_time_is_taken_back_only_where_the_weights_are_bad(
    tell, answer, skipped, done
):
    """A scaler skips every update: the weights are those of before, unless they were bad then."""
    story = scaled(tell, lambda key: answer, *[(NAN, skipped)] * 60)

    assert verbs(story)[:3] == done
    if "touch" not in done:
        (withdrawn,) = [m["next"] for m in messages(story) if "is called off" in m["title"]]
        assert withdrawn.startswith("no update is made any more: each one since step 40 was")
        assert not any("rollback" in m["next"] for m in messages(story))


def test_two_batches_that_were_skipped_stop_no_job_that_trains_again(tell):
    """The answer about the weights comes behind steps that were made."""
    keys = []
    story = scaled(tell, keys.append, *[(NAN, 1.0)] * 2, *[(2.0, 0.0)] * 5)
    story.finish(keys[0], {"loss": GOOD, "was": WAS})

    (withdrawn,) = [m for m in messages(story) if "is called off" in m["title"]]
    assert not any("stop" in withdrawn[part] for part in ("verdict", "next"))


@pytest.mark.parametrize("changes", [{"severity": "SEV0"}, {"job": JobSettings()}])
def test_what_is_worse_than_a_loss_needs_no_second_opinion_nor_is_nobody_asked(tell, changes):
    assert verbs(asked(tell, changes=changes)) == ["snapshot", "touch"]


@pytest.mark.parametrize(("loss", "taken_back"), [(2.2, False), (BAD, True)])
def test_weights_that_were_good_are_the_measure_where_no_older_savepoint_is_left(
    tell, loss, taken_back
):
    answers = iter([{"loss": GOOD, "was": WAS}, {"loss": loss, "was": [[60, 1.9], [85, 1.9]]}])
    story = checked(tell, lambda key: next(answers), 5.0, again=40, healthy=40)
    story.frames(8.0)
    story.frames(4.0, times=40)

    once = ["check_weights", "snapshot"]
    assert verbs(story) == [*once * 2, *["touch"] * taken_back]


@pytest.mark.parametrize("loss", [4.0, 8.0])
@pytest.mark.parametrize(("answers", "sound"), [([GOOD] * 9, True), ([BAD], False)])
def test_the_end_puts_no_checkpoint_in_doubt_whose_weights_were_tested(tell, answers, sound, loss):
    """Nor where the loss stays as high as it was with them, as one with another term does."""
    story = asked(tell, *answers)
    story.frames(loss, times=120)
    story.exit(0)

    (end,) = [m for m in messages(story) if m["title"] == "inc-1: closed"]
    assert ("use no checkpoint" in end["next"]) is not sound
    assert (end["severity"] == "INFO") is sound
    if sound:
        assert "the loss is not back so far: the weights show no damage" in end["verdict"]
        assert end["next"].startswith("the weights are good: find what changed at step 40")


@pytest.mark.parametrize("code", [0, 1])
def test_a_loss_with_another_term_is_one_message_above_info(tell, code):
    """It jumps, stays, and a second rule about it joins; but a job that fails is news."""
    detectors = {
        "spike.high": above("train_loss_raw", 5.0),
        "harm.stays": Threshold("train_loss_raw", gt=5.0, for_=30),
    }
    changes = rules_of(detectors, ("spike.high", "SEV1", "back"), ("harm.stays", "SEV1"))
    story = asked(tell, *[GOOD] * 9, changes=changes)
    story.frames(7.5, times=200)
    story.exit(code)

    assert "harm.stays" in story.kinds("incident", "joined")[0].reason
    texts = [(m["severity"], m["form"]) for m in messages(story)]
    assert texts[:2] == [("SEV1", "RuleFires"), ("INFO", "ActionWithdrawn")]
    assert {severity for severity, _ in texts[2:]} == {"SEV1" if code else "INFO"}


MORE = (*NAMES, "val_loss", "max_attn_logit", "batch_top1_share")


def followed(tell, *later):
    """Messages on a job whose loss jumps, with good weights, 400 rows and code 0 after it.

    Args:
        later: rows from step 41 on, the last one until the end; evaluations only now and then.
    """
    detectors = {"high": above(NAMES[0], 3.0), "attention": above("max_attn_logit", 50.0)}
    rules = rules_of(detectors, ("high", "SEV1", "back"), ("attention", "SEV1"))
    usual = {NAMES[0]: 2.0, NAMES[1]: 1.0, "max_attn_logit": 9.0, "batch_top1_share": 0.05}
    good = {"loss": GOOD, "was": WAS}
    story = checked(tell, lambda key: good, 3.0, again=40, names=MORE, **rules)
    rows = [*[{}] * 40, {NAMES[0]: 4.0}, *later, *[later[-1]] * (400 - len(later))]
    for i, row in enumerate(rows):
        values = usual | {"val_loss": 2.2} | row
        due = (k for k in values if k != "val_loss" or i % 8 == 0)
        story.rows({k: values[k] for k in due if values[k] is not None})
    story.exit(0)
    return [(m["form"], m["severity"]) for m in messages(story) if m["form"] != "JobFinished"]


UP = {NAMES[0]: 4.0}


def test_what_follows_good_weights_is_info_where_only_the_loss_has_moved(tell):
    after = [(form, "INFO") for form in ("ActionWithdrawn", "Diagnosed", "Closed")]

    assert followed(tell, UP) == [("RuleFires", "SEV1"), *after]


@pytest.mark.parametrize(
    "later",
    [
        [UP | {NAMES[1]: 2.0}],
        [UP | {NAMES[1]: 0.1}],
        [UP | {"val_loss": 4.4}],
        [UP, {NAMES[0]: NAN, NAMES[1]: NAN}, UP],
        [UP | {"max_attn_logit": 99.0}],
        [UP | {"batch_top1_share": 1.0}],
        [{NAMES[0]: 4.0 + 0.01 * i + 0.4 * (i % 3)} for i in range(400)],
        [{NAMES[0]: None}],
    ],
    ids=[
        "norms-up",
        "norms-gone",
        "evaluation",
        "nonfinite",
        "attention",
        "one-token",
        "climb",
        "no-loss",
    ],
)
def test_more_than_a_high_loss_is_news_behind_good_weights(tell, later):
    severities = dict(followed(tell, *later))

    assert (severities["Diagnosed"], severities["Closed"]) == ("SEV1", "SEV1")


def test_a_job_may_end_while_evidence_is_taken_of_a_loss_that_did_no_damage(tell):
    def answer(key):
        return {"loss": GOOD, "was": WAS} if "check_weights" in key else None

    story = asked(tell, changes={"answer": answer})
    story.frames(7.5, times=3)
    story.exit(0)

    assert verbs(story) == ["check_weights", "snapshot"]
    assert [m["severity"] for m in messages(story) if m["title"] == "inc-1: closed"] == ["INFO"]


def test_a_second_onset_behind_good_weights_is_news(tell):
    """What began before they were tested is known; what begins later is not."""
    detectors = {
        "spike.high": above("train_loss_raw", 5.0),
        "harm.higher": above("train_loss_raw", 9.0),
    }
    changes = rules_of(detectors, ("spike.high", "SEV1", "back"), ("harm.higher", "SEV1"))
    story = asked(tell, *[GOOD] * 9, changes=changes)
    story.frames(7.5, times=60)
    before = len(messages(story))
    story.frames(12.0)

    joined = messages(story)[before]
    assert (joined["severity"], joined["facts"]["rule"]) == ("SEV1", "harm.higher")


@pytest.mark.parametrize("loss", [GOOD, None], ids=["evidence under way", "unjudged"])
def test_a_rule_that_joins_is_news_where_no_outcome_reports_it(tell, loss):
    detectors = {
        "spike.high": above("train_loss_raw", 5.0),
        "harm.stays": Threshold("train_loss_raw", gt=7.0, for_=25),
    }
    rules = rules_of(detectors, ("spike.high", "SEV1", "back"), ("harm.stays", "SEV1"))

    def answer(key):
        return {"loss": loss, "was": WAS} if "check_weights" in key else None if loss else {}

    story = checked(tell, None, 5.0, again=200, healthy=40, **rules | {"answer": answer})
    story.frames(8.0, *[6.0 if loss else 7.5] * 8)
    story.frames(7.5, times=30)

    joined = [m["severity"] for m in messages(story) if m["facts"].get("rule") == "harm.stays"]
    assert joined == ["SEV1"]


@pytest.mark.parametrize(("loss", "sound"), [(2.0, True), (8.0, False), (None, False)])
def test_weights_are_sound_where_they_gave_the_step_of_the_first_breach_a_usual_loss(
    tell, loss, sound
):
    story = tell(**one_rule(above("grad_global_norm", 5.0), "SEV1"), healthy=40)
    story.frames(loss, grad=9.0)
    story.frames(8.0, grad=9.0)

    found = plan_context(story.state, story.state.incident)
    assert (found.breach_step, found.sound) == (40, sound)


TOKENS = (*NAMES, "batch_token_drift", "batch_top1_share")
USUAL = {"grad_global_norm": 1.0, "batch_top1_share": 0.05}
SAMPLES = "batch_samples_differ"


def learned(tell, *answers, names=TOKENS, usual=2.0, before=None, **more):
    """A job whose tokens are looked at, and whose probe batch answers as the test says."""
    found = iter(answers)

    def probe(key):
        answer = next(found)
        answer = answer if isinstance(answer, dict) else {"loss": answer, "was": WAS}
        story.asked = story.step + 3, key, answer

    story = checked(tell, probe, 1.15 * usual, again=20, for_steps=2, names=names, **more)
    story.asked = None
    feed(story, [usual * (1.0 + 0.01 * (step % 3)) for step in range(40)], **before or {})
    return story


def feed(story, losses, drift=0.08, **more):
    for loss in losses:
        row = {"train_loss_raw": loss, "batch_token_drift": drift + loss / 1e3}
        story.rows({**USUAL, **row, **more})
        if story.asked is not None and story.step >= story.asked[0]:
            (_, key, result), story.asked = story.asked, None
            story.finish(key, result)


def falling(first, last, steps, half_life=5.0):
    return [last + (first - last) * 0.5 ** (step / half_life) for step in range(steps)]


@pytest.mark.parametrize(("half_life", "severity"), [(5.0, "SEV1"), (0.3, "SEV2")])
def test_a_change_of_the_data_is_told_with_the_weights_that_show_no_damage(
    tell, half_life, severity
):
    """The answer came first, and nobody read of the tokens; nor where the loss was back by then."""
    story = learned(tell, GOOD, *[3.6] * 9)
    feed(story, falling(5.5, 2.05, 60, half_life), drift=0.4)
    first = story.kinds("abort", "withdrawn")[0].reason
    told = next(m for m in messages(story) if "is called off" in m["title"])

    assert "the weights show no damage" in first and "; the data changed at step 40: " in first
    assert told["severity"] == severity
    assert "whether the data was meant to change at step 40" in told["next"]


@pytest.mark.parametrize("first", [GOOD, BAD], ids=["asked at once", "asked late"])
def test_other_data_are_learned_and_nothing_is_taken_back(tell, first):
    """The probe batch is of the old data, and gets worse for as long as others are learned."""
    story = learned(tell, first, *[3.6] * 9)
    feed(story, falling(5.5, 2.25, 60), drift=0.4)
    feed(story, [2.27, 2.33] * 30)

    assert "touch" not in verbs(story)
    orders = [d.data["action"]["args"] for d in story.kinds("intent")]
    assert [args.get("renew", False) for args in orders if "within" in args] == [False, True]
    reason = story.kinds("abort", "withdrawn")[-1].reason
    tokens = "distance (KL) of the batch's tokens from those before 0.4"
    assert f"the data changed at step 40: {tokens}" in reason
    assert "the loss fell by itself, from 5.079" in reason


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([GOOD, *[3.6] * 9], "the weights were good"),
        ([BAD, *[{"loss": BAD, "was": [[90, BAD]]}] * 9], "the data had changed"),
    ],
)
def test_a_loss_that_jumps_while_other_data_are_learned_is_new_evidence(tell, answers, why):
    """Where the probe batch was worse nobody said that the weights are good."""
    story = learned(tell, *answers)
    feed(story, falling(5.5, 2.25, 60), drift=0.4)
    feed(story, [6.0] * 20)

    assert verbs(story)[-1] == "touch"
    (started,) = [m for m in messages(story) if "started" in m["title"]]
    assert why in started["why"] and "the loss jumped again, by 3." in started["why"]


@pytest.mark.parametrize(("lasts", "taken_back"), [(6, False), (60, True)])
def test_a_second_jump_is_waited_for_like_the_first_where_nobody_can_judge_the_weights(
    tell, lasts, taken_back
):
    """Steps of full batches spike and heal; going back before the first spike would lose them."""
    story = learned(tell, *[{"why": "no loss"}] * 99)
    for _ in range(4):
        feed(story, [*[4.0] * 6, *[2.02] * 20])
    feed(story, [*[4.0] * lasts, *[2.02] * 20])

    assert ("touch" in verbs(story)) is taken_back


@pytest.mark.parametrize("losses", [falling(4.0, 2.02, 80), [4.0, 4.0, *[2.02] * 78]])
def test_what_heals_by_itself_is_no_new_evidence(tell, losses):
    """As damaged moments and a bad batch do: the probe batch stays a little worse for a while."""
    story = learned(tell, GOOD, *[2.19] * 9)
    feed(story, losses)

    assert "touch" not in verbs(story)


@pytest.mark.parametrize(("lasting", "back"), [(True, False), (False, True)])
def test_one_token_is_nothing_to_learn(tell, lasting, back):
    """Where the loop goes on, a rollback waits until other tokens come in."""
    story = learned(tell, GOOD, *[3.6] * 9)
    feed(story, falling(5.5, 3.5, 30), batch_top1_share=1.0)
    feed(story, [3.5] * 40, batch_top1_share=1.0 if lasting else 0.05)

    assert ("touch" in verbs(story)) is back
    if back:
        (started,) = [m for m in messages(story) if "started" in m["title"]]
        assert "the inputs were one token in" in started["why"]


@pytest.mark.parametrize(("before", "back"), [(1.0, False), (0.0, True)])
def test_samples_that_are_the_same_by_design_keep_no_rollback_back(tell, before, back):
    """Since a step they are nothing to learn, and go on; dummies and masks always are the same."""
    story = learned(tell, GOOD, *[3.6] * 9, names=(*NAMES, SAMPLES), before={SAMPLES: before})
    feed(story, falling(5.5, 3.4, 20, 2.0), **{SAMPLES: 0.0})
    feed(story, [3.4] * 60, **{SAMPLES: 0.0})

    assert ("touch" in verbs(story)) is back


@pytest.mark.parametrize(("loss", "back"), [(2.35, False), (3.4, True)])
def test_without_tokens_the_two_losses_tell_learning_from_damage(tell, loss, back):
    """Damage costs both alike; other data are learned while the probe batch is forgotten."""
    story = learned(tell, GOOD, *[3.6] * 9, names=NAMES)
    feed(story, falling(5.5, loss, 20, 2.0))
    feed(story, [loss] * 60)

    assert ("touch" in verbs(story)) is back


@pytest.mark.parametrize("names", [NAMES, TOKENS], ids=["no tokens", "tokens in another order"])
def test_data_that_the_weights_were_not_trained_on_are_told_from_damage_by_the_probe_batch(
    tell, names
):
    """Of two tasks by turns, the batch of the first one keeps its loss while the other one's is
    high, and is forgotten later. Damaged weights lose as much on both."""
    story = learned(tell, 2.3, 2.35, 2.5, *[3.9] * 9, names=names)
    feed(story, [6.0, 5.9, 5.8, 5.6, *[5.0, 5.05, 4.95] * 40], batch_token_drift=0.08202)

    assert "touch" not in verbs(story) and verbs(story).count("check_weights") > 1
    reason = story.kinds("abort", "withdrawn")[0].reason
    assert "other data come in: their loss is 5, 2.02 was expected" in reason
    (called_off,) = [m for m in messages(story) if "is called off" in m["title"]]
    assert called_off["severity"] == "SEV1"


@pytest.mark.parametrize(
    ("was", "probe", "usual", "losses", "tokens", "back"),
    [
        (0.02, 0.1, 2.0, 5.0, False, False),
        (0.02, 1.5, 2.0, 5.0, False, True),
        (0.001, 0.04, 0.02, 0.5, False, True),
        (2.0, 2.6, 2.0, 5.0, True, True),
        (0.02, 0.1, 2.0, 5.0, True, True),
        (8.0, 9.9, 2.0, 5.0, False, True),
    ],
    ids=[
        *("known by heart", "known by heart, and lost", "all data known by heart, and lost"),
        *("of tokens that stayed", "of tokens that stayed, known by heart", "hard rows"),
    ],
)
def test_what_the_probe_batch_lost_is_judged_beside_what_the_losses_rose(
    tell, was, probe, usual, losses, tokens, back
):
    """Two rows that are known by heart lose far in logs, those of a high loss little."""
    order = {"loss": probe, "was": [[10, was], [25, was], [60, 9.0]]}
    story = learned(tell, *[order] * 9, names=TOKENS if tokens else NAMES, usual=usual)
    feed(story, [losses, losses * 1.01, losses * 0.99] * 8, batch_token_drift=0.08202)
    assert ("touch" in verbs(story)) is back


def test_running_statistics_that_are_broken_are_not_called_good_by_the_probe_batch(tell):
    """It goes by the statistics of the batch, and they come back with a savepoint alone."""
    detectors = {"bad": Nonfinite(NAMES[:1]), "stats": above("running_stats_broken", 0.0)}
    rules = (rule_on(detectors, "bad", "SEV0"), rule_on(detectors, "stats", "SEV1", "back"))
    story = checked(
        tell,
        lambda key: {"loss": GOOD, "was": WAS},
        None,
        again=20,
        detectors=detectors,
        rules=rules,
        names=(*NAMES, "update_skipped", "running_stats_broken"),
    )
    row = {"train_loss_raw": 2.0, "grad_global_norm": 1.0, "update_skipped": 0.0}
    bad = {"train_loss_raw": NAN, "grad_global_norm": NAN, "update_skipped": 1.0}
    story.rows(*[row] * 40, bad, bad, *[row | {"running_stats_broken": 3.0}] * 5)

    assert "touch" in verbs(story) and "check_weights" not in verbs(story)
    assert story.replayed() == story.recorded()


@pytest.mark.parametrize(("later", "back"), [(3.9, False), (2.6, True)])
def test_a_loss_that_falls_by_itself_is_waited_for_until_the_probe_batch_has_moved(
    tell, later, back
):
    """It rises while other data are learned, and falls while damage heals."""
    story = learned(tell, 2.9, *[later] * 9, names=NAMES)
    feed(story, falling(5.5, 2.4, 60, 3.0))
    feed(story, [2.4] * 40)

    assert ("touch" in verbs(story)) is back
    if back:
        (started,) = [m for m in messages(story) if "started" in m["title"]]
        assert "the data may have changed" in started["why"]


def test_damage_that_the_probe_batch_shows_late_is_taken_back(tell):
    """Its rows feel less of it at first; the losses that come in do not fall."""
    story = learned(tell, 2.9, *[7.5] * 9, names=NAMES)
    feed(story, [*[5.0 + 0.5 * step for step in range(12)], *[11.0, 11.1, 10.9] * 40])

    assert "touch" in verbs(story)
    assert "other data come in" in story.kinds("abort", "withdrawn")[0].reason


@pytest.mark.parametrize(
    ("turn", "severities"),
    [
        ([4.9, 4.8, 4.6, *[3.4] * 50], ["SEV1"]),  # as the first one
        ([*[3.9] * 12, 4.8, 4.6, *[3.4] * 50], ["SEV1"]),  # seen late
        ([9.0, 4.8, 4.6, *[3.4] * 50], ["SEV1", "SEV1"]),  # further up
        ([4.9] * 200, ["SEV1", "SEV1"]),  # it stays
    ],
)
def test_tasks_that_take_turns_are_reported_once(tell, turn, severities):
    """What asks for no action is muted where the tasks did the same before."""
    detectors = {"high": above("train_loss_raw", 5.0), "up": above("train_loss_raw", 4.0)}
    high = rule_on(detectors, "high", "SEV1", "back", for_steps=2)
    both = {"detectors": detectors, "rules": (high, rule_on(detectors, "up", "SEV1"))}
    story = learned(tell, 2.3, 2.35, 2.5, *[2.9] * 9, names=NAMES, **both)
    usual = [2.0 + 0.02 * (step % 3) for step in range(60)]
    for losses in ([6.0, 5.9, 5.8, 5.6, 5.2], usual * 2, turn):
        feed(story, losses)

    assert verbs(story) == ["check_weights", "snapshot"]
    assert story.state.context.task_turn.step == 40
    opened = [message for message in messages(story) if message["kind"] == "opened"]
    assert [message["severity"] for message in opened] == severities
    muted = [d.data["suppressed_by"] for d in story.kinds("suppressed") if d.rule == "up"]
    assert any(text.startswith("data:another task") for text in muted) or len(severities) == 2
    assert story.replayed() == story.recorded()


@pytest.mark.parametrize(
    ("before", "since", "is_turn"),
    [
        ([2.0] * 40, [5.8, 5.6, 5.0], True),
        ([2.6] * 40, [5.8, 5.6, 5.0], True),
        ([2.0] * 40, [2.1, 2.0, 2.1], False),  # a rule of something else, as of a gradient norm
        ([2.0] * 40, [9.0, 5.6, 5.0], False),
        ([0.05] * 40, [5.8, 5.6, 5.0], False),  # long after it: what the run has learned is lost
        ([2.0] * 40, [*[5.8] * 10, *[3.5] * 130], False),  # it stays up
    ],
)
def test_a_turn_of_tasks_is_a_loss_that_rose_as_far_from_where_it_was(before, since, is_turn):
    turn = TaskAlternation(step=40, loss_before=2.0, peak=6.0)
    losses = [*enumerate([*before, *since], start=100)]
    assert bool(turn.describe_recurrence(losses, 140)) == is_turn


@pytest.mark.parametrize(("outcome", "severity"), [(({}, "gone"), "SEV0"), (None, "SEV1")])
def test_an_end_is_news_where_what_was_done_could_not_be_taken_back(tell, outcome, severity):
    """Its loss is back by then, and so the stop was called off."""

    def answer(key):
        return outcome if "undo" in key else None if "snapshot" in key else {}

    books = {"end": runbook_of("end", Reach(), Snapshot(), Stop())}
    rule = one_rule(above(NAMES[0], 5.0), "SEV1", "end")
    made = {"runbooks": {**tell().policy.runbooks, **books}, "budgets": {"all": Budget(99)}}
    story = tell(**rule, **made, answer=answer, healthy=40, then=8.0)
    story.frames(2.0, times=30)
    story.finish(story.actions()[-1], {})
    story.frames(2.0, times=60)
    assert verbs(story) == ["reach", "snapshot", "untouch"]
    story.exit(0)

    assert [m["severity"] for m in messages(story) if m["form"] == "Closed"] == [severity]
