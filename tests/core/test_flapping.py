"""Rules that change too often, and a rule that more than one rank fires."""

from __future__ import annotations

from supervise.core.model.events import Announced
from supervise.core.model.policy import Inhibit, Rule, Runbook
from supervise.detectors.threshold import Threshold

from .conftest import NAMES, Reach, index_of


def alone(severity: str, runbook: str | None = None) -> tuple[Rule, ...]:
    return (Rule("cap", index_of("cap", ["cap"]), "cap", ("cap",), severity, runbook),)


def test_one_that_flaps_and_then_stays_in_breach_is_told(tell):
    """What fires without a change for as long as it takes to flap is no noise."""
    story = tell(
        detectors={"cap": Threshold("train_loss_raw", gt=5.0)}, rules=alone("SEV2"), healthy=20
    )
    story.frames(*[4.9, 5.1] * 100)
    before = len(story.kinds("notify_intent"))
    story.frames(6.0, times=900)

    assert len(story.kinds("note", "settled")) == 1
    told = [d.data["message"]["title"] for d in story.kinds("notify_intent")[before:]]
    assert any("no longer flaps" in title for title in told)
    assert not story.state.rules.flapping


def test_an_advisory_rule_that_mutes_another_clears_as_it_would(tell):
    muting = (Inhibit(mute=("gone",), by_rule="grad"),)
    story = tell(inhibit=muting, healthy=20)
    for _ in range(20):
        story.frames(2.0, grad=20.0)
        story.frames(2.0, grad=1.0)
    story.frames(99.0)

    assert "grad" in story.state.rules.flapping
    assert [d.rule for d in story.kinds("rule", "fired")][-1] == "gone"
    assert not [d for d in story.kinds("suppressed") if d.rule == "gone"]


def two_ranks(story):
    story.send(Announced(story.at_ns, 1, 2, 2, NAMES))
    return story


def test_one_trouble_seen_by_two_ranks_is_answered_once(tell):
    """The other rank's firing neither climbs the ladder nor runs the runbook again."""
    story = two_ranks(tell(runbooks=only_reach(), rules=spike(50)))
    story.frames(2.0, times=20)
    story.rank(1, *[2.0] * 20)
    story.frames(8.0)
    story.rank(1, 8.0)

    assert len(story.actions()) == 1
    assert [d.data["suppressed_by"] for d in story.kinds("suppressed")] == ["answered"]
    assert story.state.machine != "holding"


def spike(cooldown: int) -> tuple[Rule, ...]:
    when = index_of("high", ["high", "wild", "huge"])
    return (Rule("spike", when, "high", ("high",), "SEV1", "soften", cooldown_steps=cooldown),)


def only_reach() -> dict[str, Runbook]:
    steps = (Reach(),)
    return {name: Runbook(name, steps, ("reach",)) for name in ("soften", "back")}
