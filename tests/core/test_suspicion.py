"""From frames and notices to suspects in the aim of an action, and in the audit log."""

from __future__ import annotations

import pytest

from supervise.core.incidents import action_planning
from supervise.core.model.events import Frame, Notice
from supervise.core.model.policy import Ladder
from supervise.core.replay import decisions, record

from .conftest import Above, rule_on

NAMES = ("train_loss_raw", "grad_global_norm", "batch_shard", "batch_fingerprint")
LENGTH, SHARDS = 10, 1100  # steps of a shard


def feed(story, first, last, bad=(), shard=lambda step: step // LENGTH):
    for step in range(first, last):
        story.at_ns += 1_000_000
        loss = 9.0 if step in bad else 1.0
        values = (loss, 1.0, float(shard(step)), float(1000 + step))
        story.send(Frame(story.at_ns, 0, story.attempt, step, values))
    story.step = last - 1


@pytest.fixture
def story(tell):
    made = tell(mode="observe", names=NAMES)
    for first in range(0, SHARDS, 6):
        names = {str(n): f"{n}.tar" for n in range(first, first + 6)}
        made.send(Notice(0, "shard", "new shards", 0, first, {"shards": names}))
    return made


def where(story):
    return action_planning.plan_context(story.state, story.state.incident)


def test_two_troubles_in_a_shard_make_it_a_suspect(story):
    """In the same shard, in an attempt each: named in the aim and, with its numbers, in the log."""
    feed(story, 0, 10060, bad=(9606,))
    story.attempt = 1
    feed(story, 9580, 9607, bad=(9606,))

    assert story.state.incident.id == "inc-2"
    assert where(story).suspects == ("960.tar",)
    (note,) = story.kinds("note", "shard-suspects")
    told = note.data["suspects"]["960.tar"]
    assert (told["blamed"], told["troubles"]) == (2, 2) and told["p"] < 0.01 / 1000
    assert "960.tar (2 of 2" in note.reason


def test_two_troubles_in_two_shards_make_none(story):
    feed(story, 0, 10060, bad=(5005, 9606))

    assert story.state.history.opened == 2
    assert story.state.context.attribution.suspects() == ()


# ── onsets of one incident ────────────────────────────────────────────────────────────────────────

EPOCH = 600  # 60 shards of 10 steps, in the same order each time


def epochs(story, first, last, bad):
    for step in range(first, last):
        story.at_ns += 1_000_000
        loss = 9.0 if step in bad else 1.0 + step % 7 / 99
        values = loss, 1.0, float(step % EPOCH // LENGTH), float(1000 + step)
        story.send(Frame(story.at_ns, 0, story.attempt, step, values))
    story.step = last - 1


def told_of(story, name="37.tar"):
    told = story.state.context.attribution.account(name)
    return told["blamed"], told["troubles"]


def begin(tell, high, runbook="hold", **changes):
    """A run of 60 shards, with a rule that acts and an advisory one."""
    detectors = {"high": high, "wild": Above("grad_global_norm", 9.0)}
    rules = rule_on(detectors, "high", "SEV1", runbook), rule_on(detectors, "wild", "SEV2")
    made = tell(names=NAMES, detectors=detectors, rules=rules, inhibit=(), **changes)
    for first in range(0, 60, 6):
        names = {str(n): f"{n}.tar" for n in range(first, first + 6)}
        made.send(Notice(0, "shard", "new shards", 0, first, {"shards": names}))
    return made


@pytest.fixture
def held(tell):
    """A run that is held at the first loss above 5, and stays so."""
    return begin(tell, Above("train_loss_raw", 5.0), ladder=Ladder(("hold",)))


def test_each_epoch_of_a_held_incident_is_evidence(held):
    """The same shard three times, in one incident: named with the third, as three incidents do."""
    bad = {373 + EPOCH * n for n in range(3)}
    epochs(held, 0, 2 * EPOCH, bad)
    assert told_of(held) == (2, 2) and where(held).suspects == ()

    epochs(held, 2 * EPOCH, 3 * EPOCH, bad)

    assert held.state.history.opened == 1 and held.state.incident.phase == "held"
    assert where(held).suspects == ("37.tar",)
    (note,) = held.kinds("note", "shard-suspects")
    assert note.step == 1573 and "37.tar (3 of 3" in note.reason
    assert where(held).breach_step == 373, "what is gone back before is as it was"


def test_what_flaps_around_an_onset_counts_once(held):
    """Each time within 20 steps of the last, up to the third shard behind: the first was it."""
    epochs(held, 0, EPOCH, {373, 375, 380, 388, 400, 420})

    assert len([d for d in held.kinds("rule", "fired") if d.rule == "high"]) == 6
    assert told_of(held) == (1, 1)
    assert told_of(held, "42.tar")[0] == 0


@pytest.mark.parametrize(("again", "troubles"), [(393, 1), (394, 2)])
def test_an_onset_of_its_own_comes_behind_twenty_quiet_steps(held, again, troubles):
    """As many as an incident that nobody acts on is quiet before it is over."""
    epochs(held, 0, EPOCH, {373, again})

    assert told_of(held) == (1, troubles)


def test_replay_finds_the_same_suspects(held):
    kept, events = None, len(held.events)
    bad = {373 + EPOCH * n + k for n in range(4) for k in (0, 9, 40)}
    epochs(held, 0, 985, bad)
    kept, events = held.state.copy(), len(held.events)
    done = len(held.log)
    epochs(held, 985, 4 * EPOCH, bad)

    whole = [record(d) for d in held.log]
    assert held.kinds("note", "shard-suspects")
    assert [d for _, d in decisions(held.policy, enumerate(held.events))] == whole
    rest = decisions(held.policy, enumerate(held.events[events:]), kept)
    assert [d for _, d in rest] == whole[done:]


# ── the batches of a trouble ──────────────────────────────────────────────────────────────────────


def steps_of(batches):
    return [int(batch) - 1000 for batch in batches]


def test_the_batches_reach_to_the_newest_step_in_breach(held):
    """As far as is known, with a gap in it, and never on to the healthy ones behind."""
    epochs(held, 0, 371, {370, 371, 372, 375})
    assert steps_of(where(held).batches) == [*range(365, 371)]
    epochs(held, 371, 374, {370, 371, 372, 375})
    assert steps_of(where(held).batches) == [*range(365, 373)]
    epochs(held, 374, 384, {370, 371, 372, 375, 383})
    assert steps_of(where(held).batches) == [*range(365, 376), 383]

    epochs(held, 384, 420, {})
    assert steps_of(where(held).batches) == [*range(365, 376), 383]


def test_the_batches_of_one_trouble_are_bounded(held):
    epochs(held, 0, EPOCH, range(100, 300))

    assert steps_of(where(held).batches) == [*range(95, 95 + 64)]
