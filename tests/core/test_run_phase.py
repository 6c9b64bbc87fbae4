"""Early, steady, late: what a rule counts for in a phase of the run."""

from __future__ import annotations

import math

import pytest

from supervise.core import RunPhase, start_engine, step_engine
from supervise.core.model import Decision

from .conftest import Story, above, messages, one_rule, policy

NAMES = ("train_loss_raw", "lr_phase", "learning_rate")
LR = 1e-3


def phases(rows, warmup=10, first=0):
    """Return the phase after each `(lr_phase, rate)`, of steps from `first` on."""
    phase, found = RunPhase(), []
    for seen, (lr_phase, rate) in enumerate(rows, 1):
        phase.follow(first + seen - 1, lr_phase, rate, frames_seen=seen, warmup=warmup)
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
    """`early` at first and never again."""
    found = phases(rows)

    assert set(found[:steady]) == {"early"} and "early" not in found[steady:]
    assert (found.index("late") if "late" in found else None) == late


def test_what_begins_beyond_the_warmup_has_its_start_behind_it():
    """A log from step 7000 on, or a supervisor that joins a run: only the rate can be early."""
    assert phases([(None, None)] * 2, first=10) == ["steady", "steady"]
    assert phases([(None, None)] * 2, first=9) == ["early", "early"]
    assert phases([(0.5, LR), (1.0, LR)], first=10) == ["early", "steady"]


def test_a_restart_of_the_schedule_ends_what_was_late():
    assert phases(cosine(100, 20) + [(2.0, LR)] * 20)[-1] == "steady"


def tell(severity: str, phases: dict[str, str], runbook: str | None = None) -> Story:
    """Start a run that warms up for 50 frames, whose loss is above 5 from frame 20 on."""
    rule = one_rule(above("train_loss_raw", 5.0), severity, runbook, phases=phases)
    story = Story(policy(**rule), NAMES)
    for step in range(80):
        loss, lr_phase = 9.0 if step >= 20 else 2.0, 0.5 if step < 50 else 1.0
        story.rows({"train_loss_raw": loss, "lr_phase": lr_phase, "learning_rate": LR})
    return story


def opened(story: Story) -> list[tuple[int, str | None, str | None]]:
    """Return the incidents: step, what, severity."""
    kinds = ("opened", "raised", "joined")
    return [
        (d.step, d.data["what"], d.severity)
        for d in story.kinds("incident")
        if d.data["what"] in kinds
    ]


def test_a_rule_that_is_off_is_recorded_and_told_when_its_phase_is_over():
    """With the runbook that it then runs."""
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


def test_a_copy_of_the_state_goes_on_in_the_same_way():
    """The phase is of the frames alone: cut anywhere, the decisions are the same."""
    story = tell("SEV2", {"late": "SEV1", "early": "off"})
    for cut in (10, 40, 60):
        state, log = start_engine(story.policy), list[Decision]()
        for number, event in enumerate(story.events):
            state, made = step_engine(story.policy, state.copy() if number == cut else state, event)
            log += made
        assert log == story.log


def test_a_rule_that_may_become_a_sev0_cannot_be_silenced():
    story = tell("SEV1", {"late": "SEV0"})

    assert "SEV0 and cannot be silenced" in story.say("silence", rule="only").reason
