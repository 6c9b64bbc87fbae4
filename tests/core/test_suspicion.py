"""From frames and notices to suspects in the aim of an action, and in the audit log."""

from __future__ import annotations

import pytest

from supervise.core import aiming
from supervise.core.state import Turn
from supervise.core.values import Frame, Noticed

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
    """A run whose shards have names, with rules that do not act."""
    made = tell(mode="observe", names=NAMES)
    for first in range(0, SHARDS, 6):
        names = {str(n): f"{n}.tar" for n in range(first, first + 6)}
        made.send(Noticed(0, "shard", "new shards", 0, first, {"shards": names}))
    return made


def where(story):
    return aiming.aim(Turn(story.policy, story.state, None), story.state.incident)


def test_one_trouble_makes_no_suspect(story):
    """Nor do the steps of it that are in breach."""
    feed(story, 0, 9604, bad=range(9600, 9604))

    assert where(story).suspects == () and where(story).shards == 961
    assert where(story).batches == tuple(range(1000 + 9595, 1000 + 9601))
    assert story.kinds("note", "blame") == []


def test_two_troubles_in_a_shard_make_it_a_suspect(story):
    """In the same shard, in an attempt each: named in the aim and, with its numbers, in the log."""
    feed(story, 0, 10060, bad=(9606,))
    story.attempt = 1
    feed(story, 9580, 9607, bad=(9606,))

    assert story.state.incident.id == "inc-2"
    assert where(story).suspects == ("960.tar",)
    (note,) = story.kinds("note", "blame")
    told = note.data["suspects"]["960.tar"]
    assert (told["blamed"], told["troubles"]) == (2, 2) and told["p"] < 0.01 / 1000
    assert "960.tar (2 of 2" in note.reason


def test_two_troubles_in_two_shards_make_none(story):
    """Different data each time."""
    feed(story, 0, 10060, bad=(5005, 9606))

    assert story.state.incidents == 2
    assert story.state.blame.suspects() == ()


def test_a_state_that_was_copied_blames_the_same(story):
    """As a replay that goes on in the middle."""
    feed(story, 0, 10060, bad=(9606,))
    kept = story.state.copy()
    story.attempt = 1
    feed(story, 9580, 9607, bad=(9606,))
    before = story.state.blame.account("960.tar")
    story.state = kept
    feed(story, 9580, 9607, bad=(9606,))

    assert story.state.blame.account("960.tar") == before
