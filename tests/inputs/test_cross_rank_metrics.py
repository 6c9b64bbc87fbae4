"""What several ranks together tell, against a plain computation over all pairs."""

from __future__ import annotations

import math
import random
from itertools import combinations
from statistics import stdev

import pytest

from supervise.runtime import OWN_STEPS, OwnTimes, Ranks, job_numbers, join_ranks, skips_apart

NAN = float("nan")


def test_dispersion_is_the_deviation_over_ranks_and_names_the_odd_one():
    found = join_ranks([{"train_loss_raw": x} for x in (2.0, 2.1, 9.0, 2.2)])

    assert found["loss_dispersion"] == pytest.approx(stdev([2.0, 2.1, 9.0, 2.2]), rel=1e-12)
    assert found["loss_outlier_rank"] == 2
    two = [{"train_loss_raw": x, "batch_token_entropy": e} for x, e in ((2.0, 3.0), (3.4, 5.4))]
    found = join_ranks(two)
    assert found["loss_outlier_rank"] == 1, "between two, the one with the higher loss"
    assert found["batch_dispersion"] == pytest.approx(2.4 / 2**0.5)
    assert "batch_dispersion" not in join_ranks([two[0], {"train_loss_raw": 3.4}])


def test_the_loss_of_the_job_weighs_each_rank_by_its_targets():
    ranks = [{"train_loss_raw": 2.0, "tokens_per_update": 30.0, "batch_copies": 2.0}]
    ranks += [{"train_loss_raw": 4.0, "tokens_per_update": 10.0, "batch_copies": 1.0}]

    found = job_numbers([*ranks, ranks[0]])  # two ranks of one replica read the same batch
    assert (found["job_loss"], found["job_tokens"]) == (pytest.approx(160 / 70), 40.0)
    found = job_numbers([*ranks, {"train_loss_raw": None, "tokens_per_update": None}])
    assert found["job_loss"] == pytest.approx(2.5)
    assert job_numbers([{"train_loss_raw": 2.0}, {"train_loss_raw": 3.0}]) == {"job_loss": 2.5}


def test_the_norm_of_the_job_is_that_of_all_shards_or_the_one_that_replicas_agree_on():
    """With shares of 3 and 4 the whole is 5, whatever each rank's own norm is."""
    shards = [{"grad_global_norm": 9.0, "grad_norm_share": share} for share in (3.0, 4.0)]
    assert job_numbers(shards)["job_grad_norm"] == 5.0
    assert job_numbers([{"grad_global_norm": 7.0}] * 2)["job_grad_norm"] == 7.0
    assert "job_grad_norm" not in job_numbers([{"grad_global_norm": n} for n in (7.0, 7.1)])
    assert "job_grad_norm" not in job_numbers([shards[0], {}])


@pytest.mark.parametrize(
    ("skipped", "found"),
    [((0, 0, 0), (0, None)), ((0, 1, 0), (1, 1)), ((1, 0, 1), (1, 1)), ((1, 1, 1), (0, None))],
)
def test_a_rank_that_skips_alone_is_named_where_all_hold_the_same(skipped, found):
    seen = skips_apart([{"update_skipped": float(s)} for s in skipped])
    assert (seen["skip_mismatch"], seen.get("skip_mismatch_rank")) == found
    assert skips_apart([{"update_skipped": 0.0}, {}]) == {}


def test_ranks_hold_the_same_where_their_gradients_were_the_same_to_the_bit():
    """The step that one skips alone has a norm of NaN there: those before it tell."""
    ranks = Ranks()

    def mismatch(step, norms, skipped=(0, 0)):
        for rank, (norm, skip) in enumerate(zip(norms, skipped, strict=True)):
            values = {"grad_global_norm": norm, "update_skipped": float(skip)}
            ranks.add(0, step, rank, 2, values)
        return ranks.newest().get("skip_mismatch")

    assert mismatch(0, (0.7, 0.7), (0, 1)) is None  # nothing is known of them yet
    assert mismatch(1, (NAN, NAN), (1, 1)) == 0.0
    assert mismatch(2, (0.7, NAN), (0, 1)) == 1.0
    assert mismatch(3, (0.0, 0.0)) == 0.0
    assert mismatch(4, (0.7, 0.7 + 1e-9)) == 0.0
    assert mismatch(5, (0.7, NAN), (0, 1)) is None  # shards, or stages of a pipeline
    assert mismatch(6, (0.7, 0.7)) is None
    ranks.forget(1)
    assert mismatch(7, (0.7, NAN), (0, 1)) is None


def spent(step, **parts):
    return {"step_time": step, "other_time": 0.0, **parts}


@pytest.mark.parametrize(
    ("slow", "part"), [("input_time", 0), ("forward_time", 1), ("other_time", 2)]
)
def test_the_straggler_is_the_rank_that_takes_longest_by_itself(slow, part):
    """A step of 0.5 s would take 0.4 s without its 0.1 s; the others wait in their backward."""
    others = spent(0.5, forward_time=0.09, backward_time=0.41)
    times = OwnTimes()

    for _ in range(OWN_STEPS):
        found = times.add([others, {**others, slow: others.get(slow, 0.0) + 0.1}, others])

    assert found["straggler_ratio"] == pytest.approx(0.5 / 0.4)
    assert (found["straggler_rank"], found["straggler_part"]) == (1, part)


def test_ranks_that_are_late_by_turns_are_no_stragglers():
    times = OwnTimes()
    for step in range(40):
        found = times.add([spent(0.3, forward_time=0.2 + 0.1 * (step % 4 == r)) for r in range(4)])
    assert found["straggler_ratio"] == pytest.approx(1.0)
    assert times.add([spent(0.3), {"step_time": 0.3}]) == {}


def test_replicas_with_another_checksum_are_counted():
    """Run 1 differs; a rank that has none, as under another scheme, ends the comparison."""
    same = {"param_digest.0": 5.0, "param_digest.1": 7.0}
    assert join_ranks([same, same, same])["param_digest_mismatch"] == 0.0
    found = join_ranks([same, {**same, "param_digest.1": 8.0}, same])
    assert (found["param_digest_mismatch"], found["param_digest_rank"]) == (1.0, 1.0)
    assert "param_digest_rank" not in join_ranks([same, same])
    assert "param_digest_mismatch" not in join_ranks([same, {}])


def test_the_consistency_is_the_mean_cosine_over_all_pairs():
    chance = random.Random(3)
    sketches = [[chance.gauss(0.2, 1.0) for _ in range(32)] for _ in range(5)]

    def cosine(a, b):
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    pairs = [cosine(a, b) for a, b in combinations(sketches, 2)]
    found = join_ranks([{f"grad_sketch.{i}": x for i, x in enumerate(s)} for s in sketches])

    assert found["grad_direction_consistency"] == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


@pytest.mark.parametrize("other", [{}, {"train_loss_raw": None}, {"train_loss_raw": NAN}])
def test_what_one_rank_lacks_is_known_of_none(other):
    assert "loss_dispersion" not in join_ranks([{"train_loss_raw": 2.0}, other])


def test_a_step_counts_when_all_ranks_have_published_it_and_once():
    ranks = Ranks()
    ranks.add(0, 7, 1, 2, {"train_loss_raw": 1.0})
    assert ranks.newest() == {}
    ranks.add(0, 7, 0, 2, {"train_loss_raw": 3.0})
    assert ranks.newest()["loss_outlier_rank"] in (0, 1)
    assert ranks.newest() == {}


def test_one_rank_has_nobody_to_compare_with():
    ranks = Ranks()
    ranks.add(0, 1, 0, 1, {"train_loss_raw": 1.0})

    assert ranks.newest() == {}
