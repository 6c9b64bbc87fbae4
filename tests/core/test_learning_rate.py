"""The learning rate: the phases of its schedule, and a rate that was tested as the cause."""

from __future__ import annotations

import math

import pytest

from supervise.actions import HoldRate, Rollback
from supervise.core import RunPhase, find_rate_cause, find_rate_growth
from supervise.core.model import Budget, Ladder
from supervise.detectors import RateGuard

from .conftest import Story, Verify, above, messages, one_rule, policy, runbook_of

NAMES = ("train_loss_raw", "lr_phase", "learning_rate")
LR = 1e-3


def phases(rows, warmup=10, first=0):
    """Return the phase after each `(lr_phase, rate)`, of steps from `first` on."""
    phase, found = RunPhase(), []
    for seen, (lr_phase, rate) in enumerate(rows, 1):
        phase.advance_phase(first + seen - 1, lr_phase, rate, frames_seen=seen, warmup=warmup)
        found.append(phase.name)
    return found


def cosine(steps, warm):
    """Rows of a linear warm-up and a cosine to 0."""
    rows = [(0.5, LR * (i + 1) / warm) for i in range(warm)]
    span = steps - warm
    return rows + [(2.0, LR * (1 + math.cos(math.pi * i / span)) / 2) for i in range(span)]


@pytest.mark.parametrize(
    ("rows", "steady", "late"),
    [
        (cosine(500, 100), 100, 300),
        ([(None, None)] * 300, 9, None),  # nothing is known: the policy's `warmup`, then steady
        ([(None, LR)] * 4 + [(1.0, LR)] * 296, 9, None),
        ([(2.0, LR * (1 - i / 200)) for i in range(200)], 9, 100),  # linear, without a warm-up
        ([(1.0, LR)] * 200 + [(2.0, LR / 10)] * 50, 9, 200),  # a staircase
        ([(1.0, LR)] * 200 + [(2.9, LR * 0.6)] * 50, 9, None),  # a decay that has only begun
        (cosine(100, 20) + [(2.0, LR)] * 20, 20, 60),  # a warm restart is neither early nor late
        ([(1.0, LR)] * 50 + [(3.5, LR / 10)] * 50, 9, None),  # our own ramp after a rollback
    ],
)
def test_a_schedule_has_its_phases(rows, steady, late):
    found = phases(rows)

    assert set(found[:steady]) == {"early"} and "early" not in found[steady:]
    assert (found.index("late") if "late" in found else None) == late
    assert (found[-1] == "late") == (late is not None and rows[-1][1] < LR)


def test_what_begins_beyond_the_warmup_has_its_start_behind_it():
    assert phases([(None, None)] * 2, first=10) == ["steady", "steady"]
    assert phases([(None, None)] * 2, first=9) == ["early", "early"]
    assert phases([(0.5, LR), (1.0, LR)], first=10) == ["early", "steady"]


def tell(severity: str, phases: dict[str, str], runbook: str | None = None) -> Story:
    """Start a run that warms up for 50 frames, whose loss is above 5 from frame 20 on."""
    rule = one_rule(above("train_loss_raw", 5.0), severity, runbook, phases=phases)
    story = Story(policy(**rule), NAMES)
    for step in range(80):
        loss, lr_phase = 9.0 if step >= 20 else 2.0, 0.5 if step < 50 else 1.0
        story.rows({"train_loss_raw": loss, "lr_phase": lr_phase, "learning_rate": LR})
    return story


def opened(story: Story) -> list[tuple[int, str | None, str | None]]:
    """Return step, change and severity where an incident opened or rose."""
    kinds = ("opened", "raised", "joined")
    return [
        (d.step, d.data["what"], d.severity)
        for d in story.kinds("incident")
        if d.data["what"] in kinds
    ]


def test_a_rule_that_is_off_is_recorded_and_told_when_its_phase_is_over():
    story = tell("SEV1", {"early": "off"}, "soften")

    (muted,) = [d for d in story.kinds("suppressed") if d.data["suppressed_by"] == "phase:early"]
    assert (muted.step, muted.reason) == (20, "only is muted by the phase early of the run")
    assert opened(story) == [(50, "opened", "SEV1")]
    assert story.kinds("intent")[0].step == 50


def test_what_counts_for_more_in_the_next_phase_is_told_again():
    story = tell("SEV1", {"early": "SEV2"})

    assert opened(story) == [(20, "opened", "SEV2"), (50, "raised", "SEV1")]
    assert [m["severity"] for m in messages(story)][:2] == ["SEV2", "SEV1"]
    assert story.kinds("rule", "fired")[0].data["phase"] == "early"


def test_what_counts_for_less_in_the_next_phase_is_not():
    assert opened(tell("SEV1", {"steady": "SEV2"})) == [(20, "opened", "SEV1")]


# ── a learning rate that was tested as the cause binds the remedy; one that was not does not ──────


CLIMB = [(step, max(0.002, 0.002 + 0.0005 * (step - 150))) for step in range(380)]


def updates(rates, times=50.0):
    return [(step, times * rate) for step, rate in rates if step % 4 == 0]


def weigh(rates=CLIMB, norms=None, onset=372, highest=0.002, warms_up=False):
    norms = updates(rates) if norms is None else norms
    return find_rate_cause(rates, norms, onset, highest, warms_up=warms_up)


def test_a_rate_is_tested_by_lower_ones_that_were_good_and_by_updates_that_grew_with_it():
    found = weigh()
    assert not found.cleared
    assert found.used == pytest.approx(0.113)
    assert 0.02 < found.limit < 0.05
    assert weigh([]) is None, "a job without a rate"


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        (CLIMB, "the learning rate grew 3.5 times since step 150, to 0.007"),
        ([(step, 0.01 if step > 150 else 0.001) for step in range(170)], "10 times since step 150"),
        ([(step, 0.002 - 1e-6 * step) for step in range(300)], ""),
        ([(step, 0.002 + 1e-6 * step) for step in range(300)], ""),
        ([], ""),
    ],
)
def test_the_growth_of_a_rate_is_said_with_its_begin(rates, text):
    growth = find_rate_growth(rates, 160)

    assert text in ("" if growth is None else growth.text)
    assert bool(text) == (growth is not None)


@pytest.mark.parametrize(
    ("times", "phase", "loss", "shown"),
    [
        (1.0, 1.0, 60, False),
        (2.0, 1.0, 60, False),
        (6.0, 1.0, 60, True),
        (6.0, 0.0, 60, True),  # rates that rise, and nobody knows until when
        (6.0, 0.8, 60, False),  # a warm-up of a known length
        (6.0, 1.0, 85, True),
        (6.0, 1.0, 100, False),  # long behind the growth
    ],
)
def test_a_loss_that_is_high_behind_a_rate_that_grew_far_is_reported_with_it(
    times, phase, loss, shown
):
    rule = one_rule(above("train_loss_raw", 5.0), "SEV1", None)
    story = Story(policy(**rule), (*NAMES, "lr_phase"))
    for step in range(120):  # behind a warm-up, which has ended long before
        rate = LR * min(1.0, 0.2 * (step + 1)) * times ** (min(20, max(0, step - 40)) / 20)
        high = {"train_loss_raw": 9.0 if step >= loss else 2.0}
        story.rows({**high, "learning_rate": rate, "lr_phase": phase})
    text = "the learning rate grew 6 times since step 40, to 0.006"
    (verdict,) = [m["verdict"] for m in messages(story) if f"step {loss}" in m["title"]]
    assert ("the learning rate grew" in verdict) is shown
    assert (text in verdict) is shown


@pytest.mark.parametrize(
    "untested",
    [
        {"norms": [(step, 0.1) for step, _ in CLIMB]},  # it moved first, and that is all
        {"norms": []},
        {"warms_up": True},
        {"highest": 0.113},  # the run had it long before
        {"rates": [(step, 0.002) for step in range(370)] + [(370, 0.0025), (371, 0.0025)]},
        {"rates": CLIMB[300:]},  # too few steps were seen
    ],
)
def test_a_rate_that_merely_moved_first_is_not_tested(untested):
    found = weigh(**untested)
    assert found.limit is None and not found.cleared


@pytest.mark.parametrize(
    "rates",
    [
        [(step, 0.01 - 0.00002 * step) for step in range(380)],
        [(step, 0.002 * (1 - step % 100 / 100)) for step in range(380)],
    ],
)
def test_a_rate_that_the_run_had_for_long_is_cleared(rates):
    assert weigh(rates, onset=370).cleared


# ── a rate that ran away is no new level while its incident is open ───────────────────────────────


def runaway(severity="SEV1", runbook=None, mode="enforce", names=("learning_rate",)):
    """A job whose rate is thirty times as high from step 200 on."""
    rule = one_rule(RateGuard(("learning_rate",), over=2.5), severity, runbook)
    story = Story(policy(mode, **rule), names)
    story.rows(*[{"learning_rate": 1e-3, "train_loss_raw": 2.0}] * 200)
    return story


def at_thirty_times(story, steps, loss=2.0):
    story.rows(*[{"learning_rate": 0.03, "train_loss_raw": loss}] * steps)


def test_a_rate_that_ran_away_is_still_one_after_a_thousand_steps():
    story = runaway()
    at_thirty_times(story, 1000)

    assert story.state.firing(story.policy) == ["only"]
    assert story.state.incident.id == "inc-1" and not story.kinds("rebaseline")
    story.rows(*[{"learning_rate": 1e-3}] * 21)
    assert story.state.incident is None
    assert story.kinds("incident", "closed")[0].data["outcome"] == "cleared"
    assert story.replayed() == story.recorded()


@pytest.mark.parametrize("after", [100, 600])
@pytest.mark.parametrize("word", ["ack", "deny"])
def test_a_rate_that_a_person_lets_be_is_the_level(after, word):
    """After 512 steps, or at once where they are over."""
    story = runaway(runbook="soften", mode="approve")
    at_thirty_times(story, after)
    assert story.say(word, **({"id": "ask-1"} if word == "deny" else {})).data["ok"]
    at_thirty_times(story, 520 - 100)

    (note,) = story.kinds("rebaseline")
    assert note.step == max(200 + 511, 200 + after + 1)
    assert not story.state.firing(story.policy)
    assert story.replayed() == story.recorded()


def test_no_answer_in_time_does_not_make_it_the_level():
    story = runaway(runbook="soften", mode="approve")
    at_thirty_times(story, 1)
    story.tick(7200)
    at_thirty_times(story, 900)

    assert story.state.incident.phase == "held"
    assert not story.kinds("rebaseline")


def test_a_hold_that_ends_asks_again_about_the_same_rate():
    story = runaway(runbook="soften", mode="approve")
    at_thirty_times(story, 1)
    story.tick(7200)
    at_thirty_times(story, 600)
    assert story.say("release").data["ok"]
    at_thirty_times(story, 600)

    assert [d.step for d in story.kinds("rule", "fired")] == [200, 801]
    assert story.state.incident.id == "inc-2" and not story.kinds("rebaseline")


def test_a_rate_that_is_known_to_do_no_harm_is_the_level():
    """The loss that the request was about came back without it."""
    story = runaway(runbook="soften", mode="approve", names=("train_loss_raw", "learning_rate"))
    at_thirty_times(story, 60, loss=8.0)
    at_thirty_times(story, 460)

    assert story.state.approvals.pending.unneeded
    assert [d.step for d in story.kinds("rebaseline")] == [711]


def test_what_is_only_told_is_the_level_after_512_steps():
    story = runaway("SEV2")
    at_thirty_times(story, 600)

    assert [d.step for d in story.kinds("rebaseline")] == [711]
    assert story.state.incident is None


def run(tell, rollbacks=2):
    """A job at a rate of 0.01 whose loss is too high at step 100; each rollback keeps the loop."""
    attempts = iter(range(1, 9))

    def answer(key):
        result = {"attempt": next(attempts), "step": 75}
        return result if "rollback" in key else {"groups": 1}

    steps = (HoldRate(tested=True), Rollback(), Verify(within=200, clear_for=20))
    story = tell(
        **one_rule(above("train_loss_raw", 5.0), "SEV1", "back"),
        runbooks={"back": runbook_of("back", *steps)},
        ladder=Ladder(("back", "hold")),
        budgets={"rollback": Budget(rollbacks), "all": Budget(9)},
        names=("train_loss_raw", "learning_rate", "update_norm"),
        answer=answer,
    )
    feed(story, 2.0, 100)
    feed(story, 8.0, 1)
    return story


def feed(story, loss, times):
    incident = story.state.incident
    limits = [] if incident is None else incident.recovery.rate_limits
    ordered = 0 if incident is None else incident.recovery.rolled_back_to
    story.attempt = max(story.attempt, story.state.attempt, ordered)
    rate = min([0.01, *limits])
    row = {"train_loss_raw": loss, "learning_rate": rate, "update_norm": 50 * rate}
    story.rows(*[row] * times)


def plans(story, verb):
    intents = [d.data["action"] for d in story.kinds("intent")]
    return [one["args"] for one in intents if one["verb"] == verb]


def test_a_trouble_that_comes_back_at_its_rate_is_answered_at_half_of_it_then_given_up(tell):
    story = run(tell)
    feed(story, 2.0, 30)
    assert "at a lower learning rate" in messages(story)[-1]["next"]
    feed(story, 8.0, 1)
    assert [args["limit"] for args in plans(story, "hold_rate")] == [0.005]
    assert plans(story, "rollback")[1]["before_step"] == story.step - 10
    assert plans(story, "rollback")[1]["rewarm"] is not None
    assert messages(story)[-1]["next"].endswith(
        "; once its schedule is mended, to give the job its own learning rate back (1.0 is a "
        "factor, not a rate): supervise lr RUN 1.0"
    )

    feed(story, 2.0, 30)
    assert messages(story)[-1]["next"].startswith(
        "nothing to do; learning rate 0.005; once its schedule is mended, to lift a cap of the "
        "learning rate that may still hold (1.0 is a factor, not a rate): supervise lr RUN 1.0; if"
    )
    feed(story, 8.0, 1)
    assert len(plans(story, "rollback")) == 2, "the budget is spent"
    assert story.state.machine == "holding"
    assert plans(story, "hold_rate")[1:] == [], "the limit stands"


def test_a_trouble_that_comes_back_at_a_quarter_too_was_not_the_rate_s(tell):
    story = run(tell, rollbacks=3)
    for _ in range(3):
        feed(story, 2.0, 30)
        feed(story, 8.0, 1)
    limits = [args.get("limit") for args in plans(story, "hold_rate")]
    assert limits == [0.005, 0.0025, None]
    assert plans(story, "hold_rate")[-1] == {"lift": True}
    assert story.state.machine == "holding"


def test_a_loss_that_a_rollback_never_mended_tells_nothing_of_the_rate_and_is_reported_soon(tell):
    story = run(tell)
    feed(story, 8.0, 39)
    assert story.state.machine == "acting"
    feed(story, 8.0, 2)
    assert story.state.machine == "holding"
    assert len(plans(story, "rollback")) == 1
    assert plans(story, "hold_rate") == []
    assert "did not help" in messages(story)[-1]["verdict"]
