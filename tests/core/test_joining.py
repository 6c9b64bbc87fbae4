"""Another kind of trouble in an open incident: told, with its own onset; and a crash in one."""

from __future__ import annotations

import pytest

from supervise.core import plan_context, wiring_faults
from supervise.core.model import CLEARED, Ladder, Lead, RuleFired, SpikeClass, decision_record
from supervise.detectors import Nonfinite, Threshold
from supervise.report import Record, records_of
from tests.support.recorded_run import shipped_policy

from .conftest import AGAIN, NAN, Story, above, crashing, messages, relaunched, rules_of, save

NAMES = ("train_loss_raw", "grad_global_norm", "update_norm", "step_time", "update_skipped")
DETECTORS = {
    "throughput.drift": Threshold("step_time", gt=1.5, for_=20),
    "throughput.worse": above("step_time", 5.0),
    "gradients.large": above("grad_global_norm", 9.0),
    "loss_spike.extreme": above("train_loss_raw", 5.0),
    "loss_spike.gone": above("train_loss_raw", 50.0),
    "update_scale.ratio": above("update_norm", 0.3),
    "update_scale.large": above("update_norm", 0.5),
    "nonfinite.contained": Nonfinite(("train_loss_raw",)),
    "nonfinite.repeated": Nonfinite(("train_loss_raw", "update_skipped"), m_of_n=(3, 128)),
}


def row(loss=2.0, **others):
    made = {"train_loss_raw": loss, "grad_global_norm": 1.0, "update_norm": 0.1, "step_time": 1.0}
    return made | {"update_skipped": 0.0} | others


def skipped(loss):
    return row(loss, grad_global_norm=NAN, update_norm=0.0, update_skipped=1.0, step_time=2.0)


def slow(tell, **changes):
    """A job whose host became slow at step 100, which is told 20 steps later; a checkpoint of 150.

    Its loss fell by then, as that of a young run does.
    """
    rules = rules_of(
        DETECTORS,
        ("throughput.drift", "SEV2"),
        ("throughput.worse", "SEV2"),
        ("gradients.large", "SEV2"),
        ("loss_spike.extreme", "SEV1", "again"),
        ("nonfinite.contained", "SEV2"),
    )
    ladder = Ladder(("again", "hold"))
    story = crashing(tell, **rules, names=NAMES, ladder=ladder, **changes)
    story.rows(*[row(9.0 - 0.07 * i if i < 50 else 2.0) for i in range(story.step + 1, 100)])
    story.rows(*[row(step_time=2.0)] * 100)
    (opened,) = story.kinds("incident", "opened")
    assert opened.reason.startswith("SEV2 throughput.drift")
    save(story, "ckpt-2", 150)
    return story


def test_a_slow_host_does_not_stand_between_a_crash_and_its_checkpoint(tell):
    story = slow(tell)
    story.exit(137)
    last = story.kinds("intent")[-1].data["action"]
    assert last["verb"] == "relaunch" and last["args"]["checkpoint"] == "ckpt-2"
    (raised,) = story.kinds("incident", "raised")
    assert raised.reason == "raised to SEV1 by a crash: the job ended with code 137 at step 199"
    assert raised.data["breach_step"] == 200
    assert not story.state.checkpoints.suspects()
    assert messages(story)[-1]["severity"] == "SEV1"

    relaunched(story, 150)
    story.rows(*[row(step_time=2.0)] * 30)
    assert story.kinds("verify", "passed")[0].step < 200, "no rule began it, as in any crash"
    assert story.replayed() == story.recorded()


@pytest.mark.parametrize("worse", [{"grad_global_norm": 99.0}, {"train_loss_raw": 9.0}])
def test_what_speaks_against_the_weights_moves_the_aim_to_where_that_began(tell, worse):
    story = slow(tell)
    story.rows(row(**worse), *[row()] * 3)
    story.exit(137)

    assert story.actions()[-1].endswith("relaunch")
    assert plan_context(story.state, story.state.incident).breach_step == 200


def test_a_fault_of_the_training_is_no_part_of_an_incident_about_speed(tell):
    story = slow(tell)
    before = len(messages(story))
    story.rows(row(step_time=9.0))
    assert len(messages(story)) == before

    story.rows(skipped(NAN), *[row(step_time=2.0)] * 3, skipped(NAN), row(step_time=2.0))
    closed, told = messages(story)[before:]
    assert (closed["title"], closed["severity"]) == ("inc-1: closed", "INFO")
    title = "inc-2: loss is NaN or Inf at step 201"
    assert (told["title"], told["severity"]) == (title, "SEV2")
    assert "NaN or Inf" in told["verdict"]
    assert story.state.incident.breach_step == 201
    assert story.state.incident.rules == ["nonfinite.contained"]
    (over,) = story.kinds("incident", "closed")
    assert over.data["superseded_by"] == "nonfinite.contained"
    assert "spike" not in over.data, "it says nothing about a loss"
    assert story.replayed() == story.recorded()

    # Each step is one event here.
    head = {"actor": "engine", "mono_ns": 0}
    records = [
        Record.decode({**decision_record(d), **head, "seq": n, "event": d.step})
        for n, d in enumerate(story.log)
    ]
    found = [record.decision for record in records_of(records, "inc-2")]
    assert {d.rule for d in found if isinstance(d, RuleFired)} == {"nonfinite.contained"}

    story.rows(*[row(step_time=2.0)] * 30)  # the training is well again, the host is not
    assert [d.incident for d in story.kinds("incident", "closed")] == ["inc-1", "inc-2"]
    assert story.state.incident.rules == ["throughput.drift"]


def test_what_is_slow_during_an_incident_of_the_training_is_told_by_itself_once(tell):
    story = watched(tell, ("loss_spike.extreme", "SEV1"), ("throughput.worse", "SEV2"))
    story.rows(*[row(9.0)] * 3)
    before = len(messages(story))
    story.rows(*[row(9.0, step_time=9.0), row(9.0)] * 2, *[row(9.0, step_time=9.0)] * 13)

    (told,) = messages(story)[before:]
    assert told["facts"]["rule"] == "throughput.worse" and told["kind"] == "watcher"
    assert "step time 9 s" in told["verdict"]
    assert story.state.incident.rules == ["loss_spike.extreme"]
    fired = [d for d in story.kinds("rule", "fired") if d.rule == "throughput.worse"]
    assert {(d.incident, d.data["alongside"]) for d in fired} == {(None, "inc-1")}

    story.rows(*[row(step_time=9.0)] * 30)  # the loss is back, the host is not
    assert [d.incident for d in story.kinds("incident", "closed")] == ["inc-1"]
    assert story.state.incident.rules == ["throughput.worse"]
    assert story.replayed() == story.recorded()


def test_what_the_model_is_given_is_told_beside_the_loss_that_it_explains(tell):
    detectors = DETECTORS | {"data.batch": above("batch_top1_share", 0.9)}
    rules = ("loss_spike.extreme", "SEV1"), ("gradients.large", "SEV2"), ("data.batch", "SEV2")
    story = tell(names=(*NAMES, "batch_top1_share"), **rules_of(detectors, *rules))
    usual = {"batch_top1_share": 0.1}
    story.rows(*[row(**usual)] * 30, row(9.0, **usual))
    story.rows(*[row(9.0, grad_global_norm=99.0, batch_top1_share=1.0)] * 3)

    assert titles(story) == [("SEV1", "loss_spike.extreme"), ("SEV2", "data.batch")]
    assert story.replayed() == story.recorded()


def test_a_fault_of_the_wiring_is_told_once_by_names_and_opens_no_incident(tell):
    metric, other = "tensors_without_gradient", "modules_in_eval"
    detectors = {
        "wiring.gradient": above(metric, 0.0),
        "wiring.eval_mode": above(other, 0.0),
        "loss_spike.extreme": DETECTORS["loss_spike.extreme"],
    }
    rules = rules_of(detectors, *((name, "SEV2") for name in detectors), unknown="ignore")
    story = tell(names=(*NAMES, metric, other), **rules)
    facts = {"metric": metric, "names": ["a", "b"], "count": 8, "total": 10, "made": "t.py:7"}
    story.rows(*[row()] * 5)
    story.notice("wiring", "8 of 10", rank=0, step=5, data=facts)
    story.rows(row(**{metric: 8.0, other: 1.0}), *[row()] * 10, row(**{metric: 8.0}))

    told, second = messages(story)
    assert second["next"].startswith("call model.train()")
    assert told["title"].endswith(
        "8 of 10 tensors of the optimizer never had a gradient: a, b, 6 more"
    )
    assert told["next"].endswith("the optimizer is made at t.py:7")
    assert story.state.incident is None
    assert not story.kinds("incident", "opened")

    story.rows(row(9.0, **{metric: 8.0}), *[row(**{metric: 8.0})] * 40)
    assert [d.incident for d in story.kinds("incident", "closed")] == ["inc-1"]
    assert story.replayed() == story.recorded()


def test_a_fault_of_the_wiring_is_a_possible_cause_of_the_incidents_behind_it(tell):
    metric, spike = "tensors_with_stale_gradient", "loss_spike.extreme"
    detectors = {"wiring.uncleared": above(metric, 0.0), spike: DETECTORS[spike]}
    rules = rules_of(detectors, *((name, "SEV2") for name in detectors), unknown="hold")
    story = tell(names=(*NAMES, metric), **rules)
    story.rows(*[row()] * 5)
    facts = {"metric": metric, "names": ["a", "b"], "count": 4, "total": 9, "made": "t.py:7"}
    story.notice("wiring", "4 of 9", rank=0, step=5, data=facts)
    story.rows(row(**{metric: 4.0}), *[row()] * 60, row(9.0), *[row()] * 40)

    [closed] = story.kinds("incident", "closed")
    [fault] = wiring_faults(closed.spike)
    assert (fault.rule, fault.tensors, fault.step) == ("wiring.uncleared", ("a", "b"), 5)
    last = messages(story)[-1]
    assert last["severity"] == "INFO"
    assert (last["lead"], "wiring.uncleared" in last["next"]) == (Lead.LATER, True)
    assert "(a, b, 2 more)" in last["next"]
    assert story.replayed() == story.recorded()


def test_what_is_not_wired_wrongly_any_more_or_was_silenced_is_no_cause(tell):
    metric, spike = "tensors_without_gradient", "loss_spike.extreme"
    detectors = {"wiring.gradient": above(metric, 0.0), spike: DETECTORS[spike]}
    rules = rules_of(detectors, *((name, "SEV2") for name in detectors), unknown="hold")
    mended = tell(names=(*NAMES, metric), **rules)
    mended.rows(row(**{metric: 4.0}), *[row()] * 30, row(**{metric: 0.0}), *[row()] * 60)
    meant = tell(names=(*NAMES, metric), **rules)
    meant.rows(row(**{metric: 4.0}), *[row()] * 90)
    meant.say("silence", rule="wiring.gradient", **{"for": 1000})
    for story in (mended, meant):
        story.rows(row(9.0), *[row()] * 40)

        [closed] = story.kinds("incident", "closed")
        assert not wiring_faults(closed.spike)
        assert messages(story)[-1]["lead"] == Lead.NOTHING


def test_a_step_that_was_kept_from_the_weights_has_not_damaged_them(tell):
    story = slow(tell)
    order = {"order": "skip_nonfinite"}
    text = "skip_nonfinite kept step 200 from the weights: the loss is nan"
    story.notice("safeguard", text, rank=0, step=200, data=order)
    story.rows(skipped(NAN), *[row()] * 60)
    story.exit(0)
    found = story.kinds("incident", "closed")[-1].data["spike"]

    assert found["class"] == "contained numeric fault"
    assert "no rollback is needed: step 200 changed no weight" in messages(story)[-2]["next"]
    assert found["questions"]["rejoined"]["rejoined_step"] == 201
    assert text in found["questions"]["else_happened"]["text"]


@pytest.mark.parametrize(
    "bad", [row(NAN), row(grad_global_norm=NAN), row(NAN, update_norm=NAN, update_skipped=1.0)]
)
def test_what_was_applied_may_have_damaged_them(tell, bad):
    story = slow(tell)
    story.rows(skipped(NAN), bad, *[row()] * 60)
    story.exit(0)
    found = story.kinds("incident", "closed")[-1].data["spike"]

    assert found["class"] == "numeric fault"
    assert messages(story)[-2]["steps"][0]["text"] == "the weights may be damaged"


# ── what is told of rules that join, flap or grow ────────────────────────────────────────────────


def watched(tell, *rules, **changes):
    """A calm job under rules `(detector, severity)`; nobody acts."""
    story = tell(names=NAMES, **(rules_of(DETECTORS, *rules) | changes))
    story.rows(*[row()] * 30)
    return story


def titles(story):
    return [(m["severity"], m["facts"].get("rule", "")) for m in messages(story)]


def test_one_spike_is_one_or_two_messages_and_a_page_that_joins_it_later_another(tell):
    rules = (
        ("gradients.large", "SEV2"),
        ("loss_spike.extreme", "SEV1"),
        ("update_scale.large", "SEV1"),
        ("update_scale.ratio", "SEV2"),
    )
    story, later = watched(tell, *rules), watched(tell, *rules)
    big = {"grad_global_norm": 99.0, "update_norm": 0.4}
    story.rows(row(**big), row(9.0, **big), *[row(9.0, **big | {"update_norm": 0.9})] * 5)
    later.rows(*[row(9.0)] * 40, *[row(9.0, update_norm=0.9), row(9.0)] * 3)

    assert len(story.state.incident.rules) == 4
    assert titles(story) == [("SEV2", "gradients.large"), ("SEV1", "loss_spike.extreme")]
    assert titles(later) == [("SEV1", "loss_spike.extreme"), ("SEV1", "update_scale.large")]
    assert later.replayed() == later.recorded()


def test_a_page_is_told_at_once_where_only_a_notice_of_its_pack_was(tell):
    """No later frame would ask again, so it would be told to nobody."""
    story = watched(
        tell,
        ("update_scale.large", "SEV1"),
        ("nonfinite.contained", "SEV2"),
        ("nonfinite.repeated", "SEV1"),
    )
    story.rows(row(update_norm=0.9), *[row(NAN)] * 60)

    assert titles(story) == [("SEV1", "update_scale.large"), ("SEV1", "nonfinite.repeated")]


def test_a_sev0_has_a_message_of_its_own_unless_one_has_just_said_it(tell):
    rules = ("loss_spike.extreme", "loss_spike.gone", "gradients.large")
    story = watched(tell, *((rule, "SEV0") for rule in rules))
    story.rows(row(9.0), row(90.0), row(90.0, grad_global_norm=99.0))

    assert titles(story) == [("SEV0", "loss_spike.extreme"), ("SEV0", "gradients.large")]


def test_a_notice_within_something_worse_is_on_record_only(tell):
    """It joins later, flaps and grows; what to do is said by the first message all the while."""
    story = watched(tell, ("loss_spike.extreme", "SEV1"), ("update_scale.large", "SEV2"))
    story.rows(*[row(9.0)] * 40, *[row(9.0, update_norm=0.6), row(9.0)] * 30)
    story.rows(*[row(9.0, update_norm=9.0)] * 40)

    assert titles(story) == [("SEV1", "loss_spike.extreme")]
    assert "update_scale.large" in story.state.incident.rules
    assert len(story.kinds("note", "flapping")) == 1
    assert story.replayed() == story.recorded()


def test_memory_that_grows_is_told_with_the_time_that_is_left():
    names = ("train_loss_raw", "host_mem_used", "host_mem_growth")
    story = Story(shipped_policy("nano"), names)
    for n in range(200):
        growth = {} if n < 100 else {"host_mem_growth": 2e11}
        story.rows({"train_loss_raw": 4.0, "host_mem_used": 10.0 + 0.1 * n, **growth})
    (told,) = messages(story)

    assert [step["text"] for step in told["steps"]] == [
        "at this rate the memory of the machine is full in about 13 min",
        "to look closer",
    ]
    assert "200 GB/h" in told["verdict"]
    assert "bytes" not in told["verdict"]


def test_a_sum_whose_tokens_double_is_one_story(tell):
    """Its loss doubles with them: neither is it out of its range, nor did anything not recover."""
    names = ("train_loss_raw", "grad_global_norm", "tokens_per_update")
    story, wave = Story(shipped_policy("nano"), names), (0.0, 6.0, -4.0, 9.0, -7.0, 2.0)
    for n in range(400):
        factor = 1.0 if n < 120 else 2.0
        loss = (600.0 - 0.5 * min(n, 300)) * factor + wave[n % 6]
        values = {"train_loss_raw": loss, "grad_global_norm": 9.0 * factor + 0.05 * wave[n % 6]}
        story.rows(values | {"tokens_per_update": 256.0 * factor})
    [closed] = story.kinds("incident", "closed")

    assert closed.rules == ("data.larger",)
    assert (closed.outcome, closed.spike.kind) == (CLEARED, SpikeClass.NO_EXCURSION)
    assert closed.spike.questions.rejoined.is_sum is True
    assert messages(story)[-1]["verdict"].endswith("of as many tokens was normal throughout")
    assert messages(story)[-1]["lead"] == Lead.NOTHING


def test_a_sum_that_is_higher_for_its_tokens_is_not_back(tell):
    names = ("train_loss_raw", "grad_global_norm", "tokens_per_update")
    story, wave = Story(shipped_policy("nano"), names), (0.0, 6.0, -4.0, 9.0, -7.0, 2.0)
    for n in range(400):
        factor, higher = (1.0, 1.0) if n < 120 else (2.0, 1.0 if n < 160 else 1.6)
        loss = (600.0 - 0.5 * min(n, 300)) * factor * higher + wave[n % 6]
        values = {"train_loss_raw": loss, "grad_global_norm": 9.0 * factor}
        story.rows(values | {"tokens_per_update": 256.0 * factor})
    story.exit(0)

    spikes = [
        closed.spike.questions.rejoined.answer for closed in story.kinds("incident", "closed")
    ]
    assert "no" in spikes


def test_a_sampled_metric_that_ends_is_no_drift_nor_are_losses_that_are_nan_blindness():
    names = ("train_loss_raw", "grad_global_norm", "batch_token_entropy")
    story = Story(shipped_policy("nano"), names)
    good = {"train_loss_raw": 4.0, "grad_global_norm": 1.0}
    for entropy in ({"batch_token_entropy": 3.0}, {}):
        story.rows(*[good | entropy] * 300)
        story.tick()
    assert not story.kinds("blind")

    story.rows(*[{"train_loss_raw": NAN, "grad_global_norm": NAN}] * 300)
    story.tick()
    assert story.kinds("blind")
    assert not any("is blind" in message["title"] for message in messages(story))


@pytest.mark.parametrize(
    ("update", "skipped", "told"), [(0.0, 1.0, [0, 1, 1]), (NAN, 0.0, [0, 0, 1])]
)
def test_what_has_no_part_in_gradients_that_are_nan_is_blindness(update, skipped, told):
    """At once where the weights were kept, else once they are good again."""
    stall = "dataloader_stall_frac"
    names = ("train_loss_raw", "grad_global_norm", "update_norm", "update_skipped", stall)
    good = dict.fromkeys(names, 1.0) | {"update_skipped": 0.0, stall: 0.1}
    bad = {"grad_global_norm": NAN, "update_norm": update, "update_skipped": skipped}
    story, counts = Story(shipped_policy("nano"), names), []
    for row in (good, good | bad | {stall: NAN}, good | {stall: NAN}):
        story.rows(*[row] * 300)
        story.tick()
        said = [message["title"] for message in messages(story)]
        counts.append(sum("throughput.stall is blind" in text for text in said))
    assert counts == told


def test_what_flaps_is_told_again_when_it_has_grown(tell):
    story = watched(tell, ("loss_spike.extreme", "SEV1"))
    story.rows(*[row(6.0), row()] * 30)
    assert "is flapping" in messages(story)[-1]["title"]
    before = len(messages(story))
    story.rows(*[row(8.5), row()] * 30)
    assert len(messages(story)) == before, "not half as much again"

    story.rows(row(90.0), *[row(8.0), row()] * 30)
    (told,) = messages(story)[before:]
    assert (told["title"], told["severity"]) == ("inc-1: worse than before at step 150", "SEV1")
    assert told["verdict"].startswith("loss 90")
    assert story.replayed() == story.recorded()


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 13.0], ["SEV1"]),  # once
        ([6.0, 7.0, 8.0, 9.0, 10.0, 11.9], []),  # not twice as far
        ([6.0, 7.0, 8.0, 7.5, 12.0, 13.0, 14.0, 15.0], []),  # it was better in between
    ],
)
def test_a_notice_that_is_worse_each_time_is_one_sev1(tell, losses, told):
    story = watched(tell, ("loss_spike.extreme", "SEV2"))
    for loss in losses:
        story.rows(*[row(loss)] * 2, *[row()] * 180)

    opened = [d.severity for d in story.kinds("incident", "opened")]
    assert [severity for severity in opened if severity == "SEV1"] == told
    assert any("each time further off" in m["verdict"] for m in messages(story)) == bool(told)
    assert story.replayed() == story.recorded()


def test_weights_that_are_lost_for_good_are_paged_once_while_updates_are_skipped_now_and_then():
    """Each skipped update clears the rule of the applied ones, which then fires again."""
    names = ("train_loss_raw", "grad_global_norm", "update_norm", "update_skipped", "skip_reason")
    good, lost, kept = (2.0, 1.0, 0.1, 0, 0), (NAN, NAN, NAN, 0, 0), (NAN, NAN, 0.0, 1, 2)
    story = Story(shipped_policy("nano"), names)
    rows = [*[good] * 100, *[kept if i % 30 == 29 else lost for i in range(500)]]
    story.rows(*(dict(zip(names, values, strict=True)) for values in rows))
    assert story.state.machine == "holding"
    pages = [m["title"] for m in messages(story) if m["severity"] == "SEV0"]

    assert len(pages) <= 6, pages
    assert story.replayed() == story.recorded()


def test_another_rollback_is_not_recommended_by_the_first_frame_behind_one_that_did_not_help():
    names = ("train_loss_raw", "grad_global_norm", "update_norm", "update_skipped", "skip_reason")
    good, lost = ((2.0, 1.0, update, 0.0, 0.0) for update in (0.1, NAN))
    story = Story(shipped_policy("nano"), names, answer=lambda key: None if "rollb" in key else {})
    story.rows(*(dict(zip(names, row, strict=True)) for row in [*[good] * 100, *[lost] * 4]))
    story.attempt += 1
    story.finish(story.actions()[-1], {"step": 75, "attempt": story.attempt})
    story.rows(dict(zip(names, lost, strict=True)))
    message = messages(story)[-1]

    assert "a person is needed" in message["title"]
    assert message["next"].startswith("recommended: supervise stop RUN; then list")
    assert "; and look at what the model is given" in message["next"]


def test_a_rate_of_events_is_told_as_a_count_of_steps():
    names = ("train_loss_raw", "overflow", "skip_reason")
    story = Story(shipped_policy("nano"), names)
    rows = [*[(2.0, 0.0, 0.0)] * 200, *[(2.0, 1.0, 1.0)] * 30]
    story.rows(*(dict(zip(names, values, strict=True)) for values in rows))
    verdicts = {m["facts"].get("rule", ""): m["verdict"] for m in messages(story)}

    assert verdicts["amp.no_updates"] == "overflow in 20 of the newest 20 steps"


@pytest.mark.parametrize(("severity", "book"), [("SEV0", None), ("SEV2", "again")])
def test_a_rule_that_acts_or_is_sev0_never_flaps(tell, severity, book):
    rule = ("loss_spike.extreme", severity, book)
    story = watched(tell, rule, mode="observe", runbooks={"again": AGAIN})
    story.rows(*[row(6.0), row()] * 30)

    assert not story.kinds("note", "flapping")


def test_inputs_that_became_one_token_are_told_once_whatever_they_do_to_the_model():
    """The loss, then its cause; norms and activations, and a diagnosis of the same, are no news."""
    names = ("train_loss_raw", "batch_top1_share", "update_norm", "learning_rate", "residual_rms")
    losses = [2.8 - 0.004 * i + 0.02 * (i % 3) for i in range(200)]
    good = [(loss, 0.05, 0.1 + 0.001 * (i % 5), 1e-3, 1.5) for i, loss in enumerate(losses)]
    dark = [(5.6, 1.0, 0.002 if i % 24 < 12 else 0.1, 1e-3, 1.5 + 0.03 * i) for i in range(420)]
    story = Story(shipped_policy("nano"), names, answer=lambda key: None)
    story.rows(*(dict(zip(names, values, strict=True)) for values in [*good, *dark]))
    told = messages(story)

    joined = {d.rule for d in story.kinds("incident")}
    assert {"update_scale.small", "activations.growing"} <= joined
    assert story.kinds("incident", "classified")
    assert [message["step"] for message in told] == [200, 201]
    assert "The inputs are one token" in told[1]["verdict"]
