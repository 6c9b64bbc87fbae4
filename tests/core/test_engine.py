"""The engine, told as stories: frames in, decisions out; and the tables that it is driven by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from supervise.catalog import load_policy
from supervise.core import can_fire
from supervise.core.model import (
    DEFAULT_TRANSITIONS,
    STATES,
    UNKNOWN,
    Budget,
    Gap,
    Ladder,
    Ledger,
    find_flaws,
)
from supervise.detectors import Absence, RobustZ

from .conftest import Touch, one_rule, rule_on, runbook_of


def test_a_spike_is_softened_verified_and_closed(tell):
    story = tell(healthy=50)
    assert [d.kind for d in story.log] == ["state", "state"], "a quiet run decides nothing else"
    story.frames(8.0, times=3)
    story.frames(2.0, times=60)

    (fired,) = story.kinds("rule", "fired")
    numbers = {"code": "BREACH", "value": 8.0, "threshold": 5.0, "metric": "train_loss_raw"}
    assert fired.data["numbers"]["high"].items() >= numbers.items()
    assert "loss 8 (limit 5)" in fired.reason
    assert story.actions() == ["inc-1/1/0-reach"]
    assert [d.data["what"] for d in story.kinds("incident")] == ["opened", "closed"]
    assert story.kinds("incident", "opened")[0].data["band"]["level"] == 2.0
    assert [d.data["what"] for d in story.kinds("verify")] == ["started", "passed"]
    states = [d.data["after"] for d in story.kinds("state")]
    assert states == ["warming", "nominal", "acting", "probation", "nominal"]
    assert story.state.incident is None


def test_a_spent_budget_holds_and_pages(tell):
    budgets = {"touch": Budget(1, per=1000), "all": Budget(9, per=1000)}
    story = tell(budgets=budgets, healthy=50, then=99.0)
    story.frames(2.0, times=40)
    assert story.state.machine == "nominal"
    story.frames(99.0)

    assert story.actions() == ["inc-1/1/0-touch"]
    assert story.state.machine == "holding"
    spent = [d for d in story.kinds("suppressed") if d.data["suppressed_by"] == "budget:touch"]
    assert spent and "1 of 1" in spent[0].reason
    assert "person is needed" in story.kinds("notify_intent")[-1].data["message"]["title"]
    story.say("release")
    story.frames(2.0, times=30)
    story.frames(99.0, times=5)
    assert len(story.actions()) == 1, "a release refunds nothing"


def test_behind_the_last_level_of_a_ladder_a_person_is_asked(tell):
    story = tell(ladder=Ladder(("soften",)), healthy=50)
    story.frames(8.0, times=90)

    assert story.actions() == ["inc-1/1/0-reach", "inc-1/1/undo-untouch"]
    assert story.state.machine == "holding"


def test_holding_stays_until_a_person_releases_it(tell):
    story = tell(ladder=Ladder(("soften", "hold")), healthy=50)
    story.frames(8.0, times=60)
    assert story.state.machine == "holding"
    story.frames(2.0, times=30)
    story.frames(99.0)
    assert story.kinds("suppressed")[-1].data["suppressed_by"] in ("holding", "inhibit:gone")
    story.say("release", "anna")

    assert story.state.machine == "warming"
    assert story.kinds("incident", "closed")[-1].reason.startswith("closed: released by anna")
    acted = len(story.actions())
    story.frames(99.0, times=5)
    assert len(story.actions()) == acted + 1, "a breach that goes on is answered anew"


def test_absent_values_are_unknown_and_long_unknown_is_blind(tell):
    story = tell(blind_after_steps=30, healthy=50)
    story.frames(None, times=40)

    assert not story.kinds("blind")  # judged on ticks, not on frames
    story.tick()
    assert {(d.rule, d.severity) for d in story.kinds("blind")} == {
        ("spike", "SEV1"),
        ("gone", "SEV0"),
    }
    assert story.state.machine == "suspect"
    story.tick()
    assert len(story.kinds("blind")) == 2
    story.frames(2.0, times=40)
    assert (story.state.incident, story.state.machine) == (None, "nominal")


def test_what_is_sampled_never_came_or_is_slow_to_begin_is_not_missing(tell):
    """One sample each 61 steps; a rule without its metric; 64 samples at six seconds a step."""
    sampled, never = tell(blind_after_steps=30), tell(blind_after_steps=30)
    slow = tell(**one_rule(RobustZ("train_loss_raw", gt=6.0), "SEV1"))
    never.announce(0, 1, 1, ("other", "grad_global_norm"))
    for _ in range(4):
        sampled.frames(2.0)
        sampled.frames(None, times=60)
        sampled.tick()
        never.frames(1.0, times=25)
        never.tick()
    for _ in range(60):
        slow.frames(2.0)
        slow.tick(6)

    assert [story.kinds("blind") for story in (sampled, never, slow)] == [[], [], []]


def test_a_metric_that_becomes_rarer_is_not_missing(tell):
    """A collector may stretch its interval while a detector still gathers its samples."""
    story = tell(
        **one_rule(RobustZ("train_loss_raw", gt=6.0), "SEV2"), runbooks={}, blind_after_steps=30
    )
    story.frames(2.0, times=4)
    for _ in range(10):
        story.frames(2.0)
        story.frames(None, times=15)
        story.tick()

    assert story.kinds("blind") == []
    story.frames(None, times=40)
    story.tick()
    assert [d.rule for d in story.kinds("blind")] == ["only"]


def test_a_new_baseline_is_no_recovery(tell):
    """A level that stays up becomes the baseline; its incident ends late, and not as recovered."""
    story = tell(**one_rule(RobustZ("train_loss_raw", gt=6.0), "SEV2"))
    story.frames(2.0, 2.1, 1.9, times=60)
    story.frames(5.0, 5.1, 4.9, times=60)
    assert len(story.kinds("rebaseline")) == 1
    assert not story.kinds("incident", "closed")  # its loss may still come back
    story.frames(5.0, 5.1, 4.9, times=60)

    closed = story.kinds("incident", "closed")
    assert closed
    assert "not recovered" in closed[0].reason


def test_a_level_that_changes_all_the_time_fills_no_record(tell):
    """Its baselines are counted; behind eight records, ever more frames are between two."""
    never = one_rule(RobustZ("train_loss_raw", gt=6.0, freeze=16), "SEV2", for_steps=10**6)
    story = tell(**never)
    story.frames(2.0, 2.1, 1.9, times=60)
    for _ in range(150):
        story.frames(5.0, 5.1, 4.9, times=20)
        story.frames(2.0, 2.1, 1.9, times=20)

    notes = story.kinds("rebaseline")
    assert 8 < len(notes) < 16
    assert sum(note.unrecorded for note in notes) > len(notes)
    assert story.replayed() == story.recorded()


@pytest.mark.parametrize("kind", ["measurement-changed", "collector-off"])
def test_a_metric_that_is_measured_in_another_way_has_a_new_baseline(tell, kind):
    """Of the rank that says so, and of no other metric; one that is not measured is not missing."""

    def spikes(*changed: str) -> list[str]:
        watch = {name: RobustZ(name, gt=6.0) for name in ("train_loss_raw", "grad_global_norm")}
        rules = tuple(rule_on(watch, name, "SEV2") for name in watch)
        story = tell(detectors=watch, rules=rules, inhibit=())
        story.frames(2.0, 2.1, 1.9, times=60)
        if changed:
            data = {"metrics": list(changed)}
            story.notice(kind, "a sample", 0, 180, data)
        story.frames(4.0, grad=2.0, times=5)
        return sorted(d.rule or "" for d in story.kinds("rule", "fired"))

    both = ["grad_global_norm", "train_loss_raw"]
    assert spikes() == spikes("other") == both
    assert spikes("grad_global_norm") == ["train_loss_raw"]


def test_another_measurement_of_a_rank_is_judged_from_its_first_value(tell):
    """Where there is no baseline to learn; the other ranks measure as before."""
    story = tell()
    story.announce(1, 2, 2)
    story.frames(2.0)
    story.rank(1, 2.0)
    monitors = story.state.monitors
    story.notice("measurement-changed", "a sample", 1, 0, {"metrics": ["train_loss_raw"]})
    assert [monitors[rank].codes[0] == UNKNOWN for rank in (0, 1)] == [False, True]
    story.frames(2.0)
    story.rank(1, 2.0)

    assert [monitors[rank].codes[0] == UNKNOWN for rank in (0, 1)] == [False, False]


def hang_story(tell, **changes):
    """A job of 50 steps that is ended when it makes no step for 30 seconds."""
    base = tell().policy
    detectors = {**base.detectors, "hung": Absence("step", {"min": 30.0})}
    rules = (*base.rules, rule_on(detectors, "hung", "SEV0", "end"))
    runbooks = {**base.runbooks, "end": runbook_of("end", Touch())}
    return tell(detectors=detectors, rules=rules, runbooks=runbooks, **changes, healthy=50)


def test_silence_counts_only_while_the_probe_is_known_to_be_there(tell):
    """No beat, a probe that is off, a job that is exiting: nothing is stopped for it."""
    story = hang_story(tell)
    story.tick()
    story.beat(40, "exiting")
    story.notice("probe-off", "it failed", rank=0)
    story.beat(40)

    assert story.actions() == []
    assert story.state.incident is None


def test_a_hang_is_answered_whatever_was_tried_before(tell):
    """A runbook off the ladder runs after a recovery, on probation, and in a hold."""
    for losses, machine in (
        ([8.0, *[2.0] * 60], "nominal"),
        ([8.0, *[2.0] * 8], "probation"),
        ([8.0] * 60, "holding"),
    ):
        story = hang_story(tell, ladder=Ladder(("soften", "hold")))
        story.frames(*losses)
        assert story.state.machine == machine
        story.beat(40)
        assert story.actions()[-1].endswith("0-touch")


def test_a_shadow_rule_does_not_swallow_one_that_acts(tell):
    rules = list(tell().policy.rules)
    rules[2] = replace(rules[2], mode="shadow")
    story = tell(rules=tuple(rules), inhibit=(), healthy=50, then=99.0)

    assert story.actions() == ["inc-1/1/0-reach"]
    assert [d.data["suppressed_by"] for d in story.kinds("suppressed")] == ["mode:shadow"]


def test_ranks_without_rank_0_have_a_pace(tell):
    """A second node sees ranks 8 and 9 only; budgets and probation go on all the same."""
    story = tell()
    for rank in (8, 9):
        story.announce(rank, 16, rank)
    for step in range(50):
        story.step = step
        story.rank(8, 2.0)
        story.rank(9, 2.0)

    assert (story.state.frame_count, story.state.step, story.state.machine) == (50, 49, "nominal")


def test_a_verification_waits_for_the_effect(tell):
    story = tell(answer=lambda key: {"attempt": 1, "step": 40}, healthy=50, then=8.0)
    story.frames(2.0, times=40)

    assert story.kinds("verify", "passed") == []
    assert "effect" in story.kinds("verify", "failed")[0].reason


def test_a_relapse_that_never_cleared_is_seen_on_probation(tell):
    """`keep` holds the rule firing, so there is no edge; the breach itself counts."""
    rules = list(tell().policy.rules)
    rules[0] = replace(rules[0], keep_steps=500)
    story = tell(rules=tuple(rules), healthy=50, then=8.0)
    story.frames(2.0, times=8)
    assert story.state.machine == "probation"
    story.frames(8.0, times=3)

    assert story.actions()[-1].endswith("0-touch")


def test_what_is_worse_than_an_action_under_way_is_answered_when_that_is_over(tell):
    """It may not cut the action; nor may it be forgotten, though it never stops firing."""
    story = tell(answer=lambda key: None, healthy=50, then=8.0)
    (first,) = story.actions()
    story.frames(80.0, times=3)
    assert story.kinds("suppressed")[-1].data["suppressed_by"] == "acting"
    assert story.actions() == [first]

    story.finish(first, {"ack_step": story.step})

    assert len(story.actions()) == 2
    assert story.actions()[1].endswith("0-touch")


def test_steps_without_a_frame_are_told(tell):
    story = tell(healthy=50)
    story.step = 59
    story.frames(2.0, times=20)
    assert [d.reason for d in story.kinds("gap")] == ["rank 0: steps 50 to 59 have no frame"]
    assert not story.kinds("notify_intent")
    story.send(Gap(story.at_ns, 0, 80, 30))
    story.step = 109
    story.frames(2.0, times=20)
    assert len(story.kinds("gap")) == 2
    story.step = 229
    story.frames(2.0, times=2)
    story.step += 1
    story.frames(2.0, times=2)

    told = [d.reason for d in story.kinds("gap")][2:]
    assert told == ["rank 0: steps 130 to 229 have no frame", "rank 0: step 232 has no frame"]
    (message,) = [d.data["message"] for d in story.kinds("notify_intent")]
    assert (message["severity"], message["title"]) == ("SEV2", told[0])


# ── the small parts: state machine, budgets, ladder, headlines, inputs of rules ───────────────────


def test_a_bad_table_is_explained_and_the_default_one_has_no_flaw():
    bad = {"launching": {"first_frame": "warming"}, "warming": {"redy": "nominl"}}
    trap = {"launching": {"first_frame": "warming"}}

    assert find_flaws(DEFAULT_TRANSITIONS) == []
    assert {(s, e) for s, e, _ in find_flaws(bad)} == {("warming", "redy")}
    assert any("can never be reached" in text for _, _, text in find_flaws(trap))
    assert any("can never reach 'halted'" in text for _, _, text in find_flaws(trap))


def test_a_budget_counts_at_its_edges():
    budgets = {"rollback": Budget(2, per=100), "all": Budget(3, per=60.0)}
    ledger = Ledger()
    for frame_count in (0, 50):
        assert ledger.exhausted(budgets, "rollback", frame_count, 0) is None
        ledger.spend("rollback", frame_count, 0)

    assert ledger.exhausted(budgets, "rollback", 99, 0)[0] == "rollback"
    assert ledger.exhausted(budgets, "rollback", 100, 0) is None
    ledger.spend("rollback", 100, 0)
    assert ledger.exhausted(budgets, "lr_scale", 101, 0)[0] == "all"
    assert ledger.exhausted(budgets, "lr_scale", 101, int(60e9)) is None
    assert ledger.usage(budgets, 149, int(60e9)) == {"rollback": "2/2", "all": "0/3"}


def test_the_drawing_in_the_readme_is_the_table():
    table = DEFAULT_TRANSITIONS
    moves = [(state, *move) for state in STATES for move in table.get(state, {}).items()]
    notes = [f"note right of {to}: from any state on {e!r}" for e, to in table["any"].items()]
    lines = ["[*] --> launching", *(f"{s} --> {to}: {e}" for s, e, to in moves if to != s)]
    diagram = "\n    ".join(["stateDiagram-v2", *lines, *notes, "halted --> [*]"])
    readme = Path(__file__).parents[2] / "supervisor" / "README.md"
    drawn = readme.read_text().partition("<!-- machine -->\n")[2].partition("<!-- /machine -->")[0]

    assert drawn == f"```mermaid\n{diagram}\n```\n"


POLICY = """\
version: supervise/v1
mode: observe
detectors:
  a: {kind: threshold, metric: a, gt: 1.0}
  b: {kind: threshold, metric: b, gt: 1.0}
  either: {kind: join, any: [a, b], within: 2}
  both: {kind: join, all: [a, b], within: 2}
  chain: {kind: sequence, steps: [a, b], within: 2}
  bad: {kind: nonfinite, metrics: [a, b]}
  same: {kind: equal, metric: a, with: b}
  hang: {kind: absence, signal: step, after: {min: 60s}}
rules:
  - {id: or, when: a or b, sev: SEV2}
  - {id: and, when: a and b, sev: SEV2}
  - {id: but, when: a and not b, sev: SEV2}
  - {id: either, when: either, sev: SEV2}
  - {id: both, when: both, sev: SEV2}
  - {id: chain, when: chain, sev: SEV2}
  - {id: bad, when: bad, sev: SEV2}
  - {id: same, when: same, sev: SEV2}
  - {id: hang, when: hang, sev: SEV2}
"""
CAN = {
    (): {"hang"},
    ("a",): {"or", "either", "bad", "hang"},
    ("b",): {"or", "either", "bad", "hang"},
    ("a", "b"): {"or", "and", "but", "either", "both", "chain", "bad", "same", "hang"},
}


@pytest.mark.parametrize("there", CAN, ids=str)
def test_a_rule_can_fire_if_some_readings_of_what_is_there_make_it_true(there, tmp_path):
    (tmp_path / "p.yaml").write_text(POLICY)
    policy = load_policy(tmp_path / "p.yaml")

    found = {r.id for r in policy.rules if can_fire(policy, r, there.__contains__)}

    assert found == CAN[there]
