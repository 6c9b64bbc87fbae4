"""A shard is a suspect when incidents keep starting in it beyond chance."""

from __future__ import annotations

import math
import random
from copy import deepcopy

import pytest

from supervise.core import ShardAttribution, plan_context
from supervise.core.model import Frame, Ladder

from .conftest import above, one_rule

NAMES = ("train_loss_raw", "batch_shard")


def fed(steps, *, rank=0, attempt=0, blame=None, loss=lambda step: 2.0, first=0, troubles=()):
    """Feed a step for each shard number (None: nobody says); `troubles`: step -> incident."""
    known = blame is not None and rank == 0
    blame = blame or ShardAttribution()
    if not known:
        blame.bind_metrics(rank, NAMES, (100 + rank, 1))
        blame.add_names(rank, {str(n): f"{n}.tar" for n in range(400)})
    for step, number in enumerate(steps, first):
        shard = None if number is None else float(number)
        blame.feed(Frame(0, rank, attempt, step, (loss(step), shard)), calm=True)
        if step in troubles:
            blame.mark_incident(troubles[step], step, attempt)
    return blame


def long(troubles):
    """300 shards of 50 steps each."""
    return fed([step // 50 for step in range(15000)], troubles=troubles)


def test_two_troubles_in_one_shard_of_a_long_run_make_a_suspect():
    """300 shards of 50 steps: share 55 of 15000, p (55/15000)^2, times 300 is below 0.01."""
    assert long({7020: "inc-1"}).suspects() == ()
    blame = long({7020: "inc-1", 7040: "inc-2"})

    assert blame.suspects() == ("140.tar",)
    told = blame.account("140.tar")
    share = 55 / 15000
    assert told.share == pytest.approx(share, abs=1e-6)
    assert (told.blamed, told.troubles) == (2, 2)
    assert told.p == pytest.approx(share**2) and blame.shards == 300
    assert blame.account("7.tar").p == 1.0


def test_the_same_incident_counts_once_an_attempt():
    """Raised to a newer breach it moves; after a rollback it is evidence anew."""
    blame = long({3020: "inc-1", 7020: "inc-1"})
    assert blame.account("60.tar").blamed == 0 and blame.account("140.tar").troubles == 1

    blame = fed([step // 50 for step in range(7000, 7100)], attempt=1, first=7000, blame=blame)
    blame.mark_incident("inc-1", 7030, 1)
    assert blame.account("140.tar").p == pytest.approx((110 / 15100) ** 2)


def test_names_join_what_another_process_and_another_rank_counted():
    """Numbers begin at 0 in each; the name is what is blamed."""
    blame = fed([step // 50 for step in range(7100)], troubles={7020: "inc-1"})
    blame.bind_metrics(0, NAMES, (100, 2))  # an exec keeps the process
    blame.add_names(0, {"0": "140.tar"})
    again = {7030: "inc-2"}
    blame = fed([0] * 50, attempt=1, first=7000, blame=blame, troubles=again)
    blame = fed([200 + step // 50 for step in range(8000)], attempt=1, first=7050, blame=blame)

    assert blame.account("140.tar").blamed == 2
    seen = blame.shards
    other = fed([0] * 10, rank=1, attempt=1, first=15050, blame=blame)
    assert other.shards == seen


def test_a_number_that_no_shard_has_is_none():
    assert fed([0, math.nan, None, math.inf, 1]).shards == 2


def test_of_neighbours_the_one_with_the_high_loss_is_the_suspect():
    """Shards in the same order in every pass: all three meet each trouble, one is to blame."""
    order = [step // 2 % 150 for step in range(1800)]
    bad = {step for step, number in enumerate(order) if number == 70}
    troubles = {step: f"inc-{step}" for step in sorted(bad)[1::2]}
    blame = fed(order, troubles=troubles, loss=lambda s: 9.0 if s in bad else 2.0 + s % 7 / 99)

    assert {blame.account(f"{n}.tar").blamed for n in (68, 69, 70)} == {6}
    assert blame.suspects() == ("70.tar",)


def test_healthy_shards_are_hardly_ever_blamed():
    chance, wrong = random.Random(11), 0
    for run in range(150):
        stretch = (1, 10)[run % 2]
        order = [chance.randrange(40) for _ in range(400)]
        blame = fed([order[step // stretch] for step in range(400)])
        for n in range(12):
            blame.mark_incident(f"inc-{n}", chance.randrange(5, 400), 0)
        wrong += bool(blame.suspects())

    assert wrong <= 1


def test_a_copy_is_independent_and_memory_is_bounded():
    blame = fed([0] * 10)
    blame.mark_incident("inc-1", 9, 0)
    twin = deepcopy(blame)
    most = 16384  # that are counted
    blame.add_names(0, {str(most): "last.tar"})
    for number in range(1, most + 50):
        blame.feed(Frame(0, 0, 0, 9 + number, (2.0, float(number))), calm=False)

    assert blame.shards == most + 50
    assert blame.account("1.tar").share == 0.0 < blame.account("last.tar").share
    assert blame.account("0.tar").blamed == 1
    assert twin.shards == 1 and math.isclose(twin.account("0.tar").share, 1.0)


METRICS = ("train_loss_raw", "grad_global_norm", "batch_shard", "batch_fingerprint")
LENGTH = 10  # steps of a shard


def where(story):
    return plan_context(story.state, story.state.incident)


def blamed(story, name="37.tar"):
    """Return how often a shard is blamed, of how many troubles."""
    told = story.state.context.attribution.account(name)
    return told.blamed, told.troubles


EPOCH = 600  # 60 shards of 10 steps, in the same order each time


def epochs(story, first, last, bad):
    for step in range(first, last):
        story.at_ns += 1_000_000
        loss = 9.0 if step in bad else 1.0 + step % 7 / 99
        values = loss, 1.0, float(step % EPOCH // LENGTH), float(1000 + step)
        story.send(Frame(story.at_ns, 0, story.attempt, step, values))
    story.step = last - 1


@pytest.fixture
def held(tell):
    """A run of 60 shards that is held at the first loss above 5, and stays so."""
    rule = one_rule(above("train_loss_raw", 5.0), "SEV1", "hold")
    story = tell(names=METRICS, **rule, ladder=Ladder(("hold",)))
    names = {str(n): f"{n}.tar" for n in range(60)}
    story.notice("shard", "new shards", 0, 0, {"shards": names})
    return story


def test_each_epoch_of_a_held_incident_is_evidence(held):
    """The same shard three times, in one incident: named with the third, as three incidents do."""
    bad = {373 + EPOCH * n for n in range(3)}
    epochs(held, 0, 2 * EPOCH, bad)
    assert blamed(held) == (2, 2) and where(held).suspects == ()

    epochs(held, 2 * EPOCH, 3 * EPOCH, bad)

    assert held.state.history.opened == 1 and held.state.incident.phase == "held"
    assert where(held).suspects == ("37.tar",)
    (note,) = held.kinds("note", "shard-suspects")
    assert note.step == 1573 and "37.tar (3 of 3" in note.reason
    assert where(held).breach_step == 373, "what is gone back before is as it was"
    assert held.replayed() == held.recorded()


@pytest.mark.parametrize(
    ("bad", "troubles"), [({373, 375, 380, 388, 400, 420}, 1), ({373, 393}, 1), ({373, 394}, 2)]
)
def test_an_onset_of_its_own_comes_behind_twenty_quiet_steps(held, bad, troubles):
    """What flaps within 20 steps, up to the third shard behind, counts once: the first was it."""
    epochs(held, 0, EPOCH, bad)

    assert len(held.kinds("rule", "fired")) == len(bad)
    assert blamed(held) == (1, troubles)
    assert blamed(held, "42.tar")[0] == 0


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
