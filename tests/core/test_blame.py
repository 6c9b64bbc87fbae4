"""A shard is a suspect when incidents keep starting in it beyond chance, and never after one."""

from __future__ import annotations

import math
import random

import pytest

from supervise.core.analysis import shard_attribution as subject
from supervise.core.analysis.shard_attribution import ShardAttribution
from supervise.core.analysis.significance import binomial_tail, normal_tail, survivors
from supervise.core.model.events import Frame

NAMES = ("train_loss_raw", "batch_shard")


def fed(steps, *, rank=0, attempt=0, blame=None, loss=lambda step: 2.0, first=0, troubles=()):
    """Feed a step for each shard number (None: nobody says); `troubles`: step -> incident."""
    blame = blame or ShardAttribution()
    if rank not in blame._lives:
        blame.announced(rank, NAMES, (100 + rank, 1))
        blame.named(rank, {str(n): f"{n}.tar" for n in range(400)})
    for step, number in enumerate(steps, first):
        shard = None if number is None else float(number)
        blame.feed(Frame(0, rank, attempt, step, (loss(step), shard)), calm=True)
        if step in troubles:
            blame.incident(troubles[step], step, attempt)
    return blame


def long(troubles):
    """300 shards of 50 steps each."""
    return fed([step // 50 for step in range(15000)], troubles=troubles)


@pytest.mark.parametrize(
    ("hits", "tries", "share", "expected"),
    [(0, 3, 0.2, 1.0), (2, 2, 0.1, 0.01), (2, 3, 0.5, 0.5), (3, 3, 0.2, 0.008), (1, 2, 0.0, 0.0)],
)
def test_the_tail_is_exact(hits, tries, share, expected):
    """By hand: 2 of 3 at one half is 4 of 8 outcomes."""
    assert binomial_tail(hits, tries, share) == pytest.approx(expected, abs=1e-12)


def test_the_correction_steps_down():
    """By hand for m = 4 at 0.04: limits 0.01, 0.0133, 0.02, 0.04; the first miss ends it."""
    assert survivors({"a": 0.01, "b": 0.013, "c": 0.03, "d": 0.035}, 4, 0.04) == ["a", "b"]
    assert survivors({"a": 0.02}, 2, 0.04) == ["a"] and survivors({"a": 0.02}, 3, 0.04) == []
    assert normal_tail(0.0) == 0.5 and normal_tail(1.6448536) == pytest.approx(0.05, abs=1e-6)


def test_two_troubles_in_one_shard_of_a_long_run_make_a_suspect():
    """300 shards of 50 steps: share 55 of 15000, p (55/15000)^2, times 300 is below 0.01."""
    assert long({7020: "inc-1"}).suspects() == ()
    blame = long({7020: "inc-1", 7040: "inc-2"})

    assert blame.suspects() == ("140.tar",)
    told = blame.account("140.tar")
    share = 55 / 15000
    assert told["share"] == pytest.approx(share, abs=1e-6)
    assert (told["blamed"], told["troubles"]) == (2, 2)
    assert told["p"] == pytest.approx(share**2) and blame.shards == 300
    assert blame.account("7.tar")["p"] == 1.0


def test_a_shard_that_is_everywhere_is_not_blamed():
    """Ten troubles, all with it: where it always is, that says nothing."""
    blame = fed([step % 3 for step in range(3000)])
    for n in range(10):
        blame.incident(f"inc-{n}", 100 + 200 * n, 0)

    assert blame.suspects() == () and blame.account("1.tar")["share"] == 1.0


def test_the_same_incident_counts_once_an_attempt():
    """Raised to a newer breach it moves; after a rollback it is evidence anew."""
    blame = long({3020: "inc-1", 7020: "inc-1"})
    assert blame.account("60.tar")["blamed"] == 0 and blame.account("140.tar")["troubles"] == 1

    blame = fed([step // 50 for step in range(7000, 7100)], attempt=1, first=7000, blame=blame)
    blame.incident("inc-1", 7030, 1)
    assert blame.account("140.tar")["p"] == pytest.approx((110 / 15100) ** 2)


def test_names_join_what_another_process_and_another_rank_counted():
    """Numbers begin at 0 in each; the name is what is blamed."""
    blame = fed([step // 50 for step in range(7100)], troubles={7020: "inc-1"})
    blame.announced(0, NAMES, (100, 2))  # an exec keeps the process
    blame.named(0, {"0": "140.tar"})
    again = {7030: "inc-2"}
    blame = fed([0] * 50, attempt=1, first=7000, blame=blame, troubles=again)
    blame = fed([200 + step // 50 for step in range(8000)], attempt=1, first=7050, blame=blame)

    assert blame.account("140.tar")["blamed"] == 2
    seen = blame.shards
    other = fed([0] * 10, rank=1, attempt=1, first=15050, blame=blame)
    assert other.shards == seen


def test_a_hard_shard_stands_out_and_is_no_suspect():
    """Its loss is higher for good: told beside the verdict, and no verdict."""
    noise = random.Random(5)
    numbers = [noise.randrange(20) for _ in range(4000)]
    blame = fed(numbers, loss=lambda s: 2.0 + noise.gauss(0, 0.1) + 0.2 * (numbers[s] == 7))

    hard, other = blame.account("7.tar"), blame.account("8.tar")
    assert hard["loss_stands_out"] and hard["loss_z"] > 8.0
    assert not other["loss_stands_out"] and abs(other["loss_z"]) < 4.0
    assert blame.suspects() == ()


def test_of_neighbours_the_one_with_the_high_loss_is_the_suspect():
    """Shards in the same order in every pass: all three meet each trouble, one is to blame."""
    order = [step // 2 % 150 for step in range(1800)]
    bad = {step for step, number in enumerate(order) if number == 70}
    troubles = {step: f"inc-{step}" for step in sorted(bad)[1::2]}
    blame = fed(order, troubles=troubles, loss=lambda s: 9.0 if s in bad else 2.0 + s % 7 / 99)

    assert {blame.account(f"{n}.tar")["blamed"] for n in (68, 69, 70)} == {6}
    assert blame.suspects() == ("70.tar",)


def test_healthy_shards_are_hardly_ever_blamed():
    """300 runs of random shards and random troubles: at most 1 % of them blame any shard."""
    chance, wrong = random.Random(11), 0
    for run in range(300):
        stretch = (1, 10)[run % 2]
        order = [chance.randrange(40) for _ in range(400)]
        blame = fed([order[step // stretch] for step in range(400)])
        for n in range(12):
            blame.incident(f"inc-{n}", chance.randrange(5, 400), 0)
        wrong += bool(blame.suspects())

    assert wrong <= 3


def test_a_copy_is_independent_and_memory_is_bounded():
    """Endless shards: the first give way, those that were blamed stay, the number is kept."""
    blame = fed([0] * 10)
    blame.incident("inc-1", 9, 0)
    twin = blame.copy()
    for number in range(1, subject.SHARDS + 50):
        blame.feed(Frame(0, 0, 0, 9 + number, (2.0, float(number))), calm=False)

    assert len(blame._seen) <= subject.SHARDS and blame.shards == subject.SHARDS + 50
    assert blame.account("0.tar")["blamed"] == 1
    assert twin.shards == 1 and math.isclose(twin.account("0.tar")["share"], 1.0)
