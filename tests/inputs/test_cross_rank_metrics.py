"""Metrics of several ranks together, against a plain computation over all pairs."""

import math
import random
from itertools import combinations
from statistics import stdev

import pytest

from .conftest import Company, join_ranks

NAN = float("nan")


def test_dispersion_is_the_deviation_over_ranks_and_names_the_odd_one():
    found = join_ranks(*({"train_loss_raw": x} for x in (2.0, 2.1, 9.0, 2.2)))

    assert found["loss_dispersion"] == pytest.approx(stdev([2.0, 2.1, 9.0, 2.2]), rel=1e-12)
    assert found["loss_outlier_rank"] == 2
    two = [{"train_loss_raw": x, "batch_token_entropy": e} for x, e in ((2.0, 3.0), (3.4, 5.4))]
    found = join_ranks(*two)
    assert found["loss_outlier_rank"] == 1, "between two, the one with the higher loss"
    assert found["batch_dispersion"] == pytest.approx(2.4 / 2**0.5)
    assert "batch_dispersion" not in join_ranks(two[0], {"train_loss_raw": 3.4})


@pytest.mark.parametrize("other", [None, NAN])
def test_what_one_rank_lacks_is_known_of_none(other):
    assert "loss_dispersion" not in join_ranks({"train_loss_raw": 2.0}, {"train_loss_raw": other})


def test_the_loss_of_the_job_weighs_each_rank_by_its_targets():
    ranks = [{"train_loss_raw": 2.0, "tokens_per_update": 30.0, "batch_copies": 2.0}]
    ranks += [{"train_loss_raw": 4.0, "tokens_per_update": 10.0, "batch_copies": 1.0}]

    found = join_ranks(*ranks, ranks[0])  # two ranks of one replica read the same batch
    assert (found["job_loss"], found["job_tokens"]) == (pytest.approx(160 / 70), 40.0)
    assert join_ranks(*ranks, {})["job_loss"] == pytest.approx(2.5)
    found = join_ranks({"train_loss_raw": 2.0}, {"train_loss_raw": 3.0})
    assert found["job_loss"] == 2.5 and not found.keys() & {"job_tokens", "job_grad_norm"}


def test_the_norm_of_the_job_is_that_of_all_shards_or_the_one_that_replicas_agree_on():
    """With shares of 3 and 4 the whole is 5, whatever each rank's own norm is."""
    shards = [{"grad_global_norm": 9.0, "grad_norm_share": share} for share in (3.0, 4.0)]
    assert join_ranks(*shards)["job_grad_norm"] == 5.0
    assert join_ranks(*[{"grad_global_norm": 7.0}] * 2)["job_grad_norm"] == 7.0
    assert "job_grad_norm" not in join_ranks(*({"grad_global_norm": n} for n in (7.0, 7.1)))
    assert "job_grad_norm" not in join_ranks(shards[0], {})


def skips(company, norms, skipped):
    """Return how many ranks skipped alone in a step, and the first of them."""
    rows = zip(norms, skipped, strict=True)
    found = company.step(*({"grad_global_norm": n, "update_skipped": skip} for n, skip in rows))
    return found.get("skip_mismatch"), found.get("skip_mismatch_rank")


@pytest.mark.parametrize(
    ("skipped", "found"),
    [
        ((0, 0, 0), (0, None)),
        ((0, 1, 0), (1, 1)),
        ((1, 0, 1), (1, 1)),
        ((1, 1, 1), (0, None)),
        ((0, None, 0), (None, None)),
    ],
)
def test_a_rank_that_skips_alone_is_named_where_all_hold_the_same(skipped, found):
    company = Company(("grad_global_norm", "update_skipped"), 3)
    skips(company, (0.7,) * 3, (0,) * 3)
    assert skips(company, (0.7,) * 3, skipped) == found


def test_ranks_hold_the_same_where_their_gradients_were_the_same_to_the_bit():
    """The step that one skips alone has a norm of NaN there: those before it tell."""
    company = Company(("grad_global_norm", "update_skipped"), 2)

    def mismatch(norms, skipped=(0, 0)):
        return skips(company, norms, skipped)[0]

    assert mismatch((0.7, 0.7), (0, 1)) is None  # nothing is known of them yet
    assert mismatch((NAN, NAN), (1, 1)) == 0.0
    assert mismatch((0.7, NAN), (0, 1)) == 1.0
    assert mismatch((0.0, 0.0)) == 0.0
    assert mismatch((0.7, 0.7 + 1e-9)) == 0.0
    assert mismatch((0.7, NAN), (0, 1)) is None  # shards, or stages of a pipeline
    assert mismatch((0.7, 0.7)) is None
    company.announce(1)
    assert mismatch((0.7, NAN), (0, 1)) is None


TIMES = ("step_time", "other_time", "input_time", "forward_time", "backward_time")


def spent(step, **parts):
    return {"step_time": step, "other_time": 0.0, **parts}


@pytest.mark.parametrize(
    ("slow", "part"), [("input_time", 0), ("forward_time", 1), ("other_time", 2)]
)
def test_the_straggler_is_the_rank_that_takes_longest_by_itself(slow, part):
    """A step of 0.5 s would take 0.4 s without its 0.1 s; the others wait in their backward."""
    others = spent(0.5, forward_time=0.09, backward_time=0.41)
    company = Company(TIMES, 3)

    for _ in range(16):
        found = company.step(others, {**others, slow: others.get(slow, 0.0) + 0.1}, others)

    assert found["straggler_ratio"] == pytest.approx(0.5 / 0.4)
    assert (found["straggler_rank"], found["straggler_part"]) == (1, part)


def test_ranks_that_are_late_by_turns_are_no_stragglers():
    company = Company(TIMES, 4)
    for step in range(40):
        late = (spent(0.3, forward_time=0.2 + 0.1 * (step % 4 == rank)) for rank in range(4))
        found = company.step(*late)
    assert found["straggler_ratio"] == pytest.approx(1.0)
    assert company.step(*[spent(0.3)] * 3, {"step_time": 0.3}) == {}


def test_replicas_with_another_checksum_are_counted():
    """Run 1 differs; a rank that has none, as under another scheme, ends the comparison."""
    same = {"param_digest.0": 5.0, "param_digest.1": 7.0}
    assert join_ranks(same, same, same) == {"param_digest_mismatch": 0.0}
    found = join_ranks(same, {**same, "param_digest.1": 8.0}, same)
    assert (found["param_digest_mismatch"], found["param_digest_rank"]) == (1.0, 1.0)
    assert join_ranks(same, {}) == {}


def test_the_consistency_is_the_mean_cosine_over_all_pairs():
    chance = random.Random(3)
    sketches = [[chance.gauss(0.2, 1.0) for _ in range(32)] for _ in range(5)]

    def cosine(a, b):
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    pairs = [cosine(a, b) for a, b in combinations(sketches, 2)]
    found = join_ranks(*({f"grad_sketch.{i}": x for i, x in enumerate(s)} for s in sketches))

    assert found["grad_direction_consistency"] == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
