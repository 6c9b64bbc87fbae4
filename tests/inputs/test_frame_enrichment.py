"""Frames are completed by what their rank cannot know, and nothing else of them changes."""

import math
import random
from dataclasses import replace
from itertools import combinations
from statistics import stdev

import numpy as np
import pytest

from supervise.core.model import THREAD_FAILURE, Announced, Beat, Failure, Frame
from supervise.runtime import FrameEnricher

from .conftest import Company, join_ranks

S = 1_000_000_000


def announced(rank=0, world=1, names=("train_loss_raw",)):
    return Announced(5, rank, world, 100 + rank, names)


def enriched(first=None, **machine):
    """Return an enricher behind an announcement, and the values of its machine, to be changed."""
    enricher = FrameEnricher(lambda pid, leads: dict(machine) if leads else {})
    enricher.complete(first or announced())
    return enricher, machine


def test_a_new_column_is_announced_in_front_of_its_frame_and_absent_once_it_is_unknown():
    enricher, machine = enriched()
    machine["disk_free"] = 40.0
    assert enricher.complete(Frame(6, 0, 0, 1, (2.0,))) == [
        Announced(6, 0, 1, 100, ("train_loss_raw", "disk_free")),
        Frame(6, 0, 0, 1, (2.0, 40.0)),
    ]

    machine.clear()
    assert enricher.complete(Frame(7, 0, 0, 2, (2.0,))) == [Frame(7, 0, 0, 2, (2.0, None))]


def test_names_that_the_probe_announces_late_move_no_column():
    enricher, _ = enriched(disk_free=40.0)
    enricher.complete(Frame(6, 0, 0, 1, (2.0,)))

    (news,) = enricher.complete(announced(names=("train_loss_raw", "my_score")))
    (short,) = enricher.complete(Frame(8, 0, 0, 3, (2.0,)))
    (whole,) = enricher.complete(Frame(9, 0, 0, 4, (2.0, 7.0)))

    assert news.names == ("train_loss_raw", "disk_free", "my_score")
    assert short.values == (2.0, 40.0, None)
    assert whole.values == (2.0, 40.0, 7.0)


def test_a_program_that_replaced_itself_starts_from_nothing():
    before = Announced(5, 0, 1, 7, ("train_loss_raw", "probe_self_time"), segment=1)
    enricher, _ = enriched(before, disk_free=40.0)
    enricher.complete(Frame(6, 0, 0, 9, (2.0, 0.1)))

    after = Announced(8, 0, 1, 7, ("train_loss_raw",), segment=2)
    assert enricher.complete(after) == [after]
    news, frame = enricher.complete(Frame(9, 0, 0, 0, (3.0,)))
    assert news.names == ("train_loss_raw", "disk_free") and news.segment == 2
    assert frame.values == (3.0, 40.0)


def test_steps_of_a_program_that_is_over_complete_none_of_the_next():
    company = Company(("train_loss_raw",), 2)
    company.number = 3
    company.frame(1, {"train_loss_raw": 100.0})  # rank 0 never came so far
    for rank in (0, 1):
        company.announce(rank)

    company.number = 3
    assert company.frame(0, {"train_loss_raw": 2.0}) == {}
    assert company.frame(1, {"train_loss_raw": 2.0}) == {}
    found = company.frame(0, {"train_loss_raw": 2.0})  # the next one of the leader
    assert (found["job_loss"], found["loss_dispersion"]) == (2.0, 0.0)
    assert company.frame(0, {"train_loss_raw": 2.0}) == {}


def test_a_job_that_reports_a_metric_itself_is_believed():
    enricher, _ = enriched(announced(names=("disk_free",)), disk_free=40.0)

    assert enricher.complete(Frame(6, 0, 0, 1, (7.0,))) == [Frame(6, 0, 0, 1, (7.0,))]


def test_columns_stay_where_a_supervisor_before_this_one_put_them():
    before = announced(names=("train_loss_raw", "disk_free", "loss_scale"))
    enricher = FrameEnricher(lambda pid, leads: {"cpu_share": 0.5})
    enricher.recall(before)

    (again,) = enricher.complete(announced(names=("train_loss_raw", "loss_scale")))
    news, frame = enricher.complete(Frame(6, 0, 0, 1, (2.0, 8.0)))

    assert again == before
    assert news.names == (*before.names, "cpu_share")
    assert frame.values == (2.0, None, 8.0, 0.5)

    other = FrameEnricher(lambda pid, leads: {})
    other.recall(before)
    assert other.complete(replace(announced(), segment=9)) == [replace(announced(), segment=9)]


class Run(Company):
    """A run at a time of its own, in seconds."""

    def __init__(self, world=1):
        self.at_s, self.suspended_s = 1000.0, 0.0
        super().__init__((), world, lambda: (int(self.at_s * S), int(self.suspended_s * S)))

    def read(self, rank=0, *, ago_s=0.0):
        self.number += 1
        return self.frame(rank, {}, at_ns=int((self.at_s - ago_s) * S))

    def hear(self, *beats, failures=()):
        now_ns = int(self.at_s * S)
        seen = [Beat(rank, now_ns - int(s * S), phase) for rank, (s, phase) in enumerate(beats)]
        self.enricher.on_beats(seen, failures, now_ns)

    def missing(self, *beats):
        """Return how many ranks are missed with these signs of life."""
        self.hear(*beats)
        return self.read()["heartbeat_missing"]


def test_a_frame_is_as_old_as_it_is_when_it_is_read():
    """One from before a takeover or a suspension is not late: nobody was to read it then."""
    run = Run()
    assert run.read(ago_s=600.0) == {}
    run.at_s += 200
    assert run.read() == {"metrics_ingest_lag": 0.0}
    assert run.read(ago_s=130.0) == {"metrics_ingest_lag": 130.0}
    run.at_s, run.suspended_s = run.at_s + 500.0, 400.0
    assert run.read(ago_s=450.0) == {}
    run.at_s += 10.0
    assert run.read(ago_s=5.0) == {"metrics_ingest_lag": 5.0}


def test_restarts_of_the_last_hour_are_counted_whoever_starts_the_job():
    run = Run(2)
    assert "restart_rate" not in run.read()
    for rank in (0, 1, 0, 1):
        run.announce(rank, at_ns=int(run.at_s * S), again=True)
    run.announce(0)  # the next program of a sweep
    run.at_s += 1800.0
    run.enricher.on_relaunch([])

    rates = []
    for later_s in (0.0, 1801.0, 1801.0):
        run.at_s += later_s
        rates.append(run.read()["restart_rate"])
    assert rates == [3 * 24.0, 24.0, 0.0]


def test_errors_are_counted_by_class_one_a_minute():
    """Of ranks and threads: not what follows from another end, or that of an expected program."""
    run = Run()
    at_ns = int(run.at_s * S)
    oom = Failure(cls="cuda-oom", leading=True, pid=1, at_ns=at_ns)
    peers = [replace(oom, pid=2, at_ns=at_ns + S), replace(oom, pid=3, secondary=True)]
    helper = Failure(cls="import", pid=4, at_ns=at_ns)
    thread = Failure(kind=THREAD_FAILURE, pid=5, at_ns=at_ns)
    run.hear(failures=[oom, *peers, helper])
    run.hear(failures=[oom, *peers, helper, thread])

    counts = {"error_event_rate.cuda-oom": 1.0, "error_event_rate.other": 1.0}
    assert run.read() == {"metrics_ingest_lag": 0.0, "error_event_rate": 2.0, **counts}
    run.at_s += 3601.0
    assert run.read()["error_event_rate"] == 0.0


def test_a_rank_that_runs_no_hook_for_half_a_minute_is_missed_in_the_frames_of_all():
    """Or for eight of its longest steps; what evaluates, saves, is stopped or dead is judged
    elsewhere."""
    run = Run(2)
    assert run.read()["heartbeat_missing"] == 0.0
    assert run.missing((0.0, "step"), (30.0, "step")) == 0.0
    assert run.missing((31.0, "step"), (0.0, "step")) == 1.0
    assert run.read(1) == {"heartbeat_missing": 1.0}
    assert "heartbeat_missing" not in Run().read()

    for _ in range(3):
        run.read(1)
        run.at_s += 10.0
    assert run.missing((0.0, "step"), (79.0, "step")) == 0.0
    assert run.missing((90.0, "eval"), (81.0, "step")) == 1.0
    assert run.missing((900.0, "dead"), (900.0, "suspended")) == 0.0


# ── metrics of several ranks together, against a plain computation over all pairs ─────────────────


NAN = float("nan")


def test_dispersion_is_the_deviation_over_ranks_and_names_the_odd_one():
    found = join_ranks(*({"train_loss_raw": x} for x in (2.0, 2.1, 9.0, 2.2)))

    assert found["loss_dispersion"] == pytest.approx(stdev([2.0, 2.1, 9.0, 2.2]), rel=1e-12)
    assert found["loss_outlier_rank"] == 2
    two = [{"train_loss_raw": x, "batch_token_entropy": e} for x, e in ((2.0, 3.0), (3.4, 5.4))]
    found = join_ranks(*two)
    assert found["loss_outlier_rank"] == 1, "between two, the one with the higher loss"
    assert found["batch_dispersion"] == pytest.approx(2.4 / 2**0.5)
    found = join_ranks(two[0], {"train_loss_raw": NAN})  # what one rank lacks is known of none
    assert not found.keys() & {"loss_dispersion", "batch_dispersion"}


def test_the_loss_of_the_job_weighs_each_rank_by_its_targets():
    ranks = [{"train_loss_raw": 2.0, "tokens_per_update": 30.0, "batch_copies": 2.0}]
    ranks += [{"train_loss_raw": 4.0, "tokens_per_update": 10.0, "batch_copies": 1.0}]

    found = join_ranks(*ranks, ranks[0])  # two ranks of one replica read the same batch
    assert (found["job_loss"], found["job_tokens"]) == (pytest.approx(160 / 70), 40.0)
    assert join_ranks(*ranks, {})["job_loss"] == pytest.approx(2.5)
    found = join_ranks({"train_loss_raw": 2.0}, {"train_loss_raw": 3.0})
    assert found["job_loss"] == 2.5 and not found.keys() & {"job_tokens", "job_grad_norm"}


def test_the_norm_of_the_job_is_that_of_all_shards_or_the_one_that_replicas_agree_on():
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


def test_a_skip_is_not_lost_where_several_steps_of_a_rank_are_read_at_once():
    company = Company(("grad_global_norm", "update_skipped"), 2)
    usual = {"grad_global_norm": 0.7, "update_skipped": 0.0}
    company.step(usual, usual)
    before = company.number
    for rank in range(2):
        for step in range(3):
            company.number = before + 1 + step
            company.frame(rank, usual | {"update_skipped": float((rank, step) == (1, 1))})
    company.number += 1

    values = company.frame(0, usual)

    assert (values["skip_mismatch"], values["skip_mismatch_rank"]) == (1.0, 1.0)
    assert company.step(usual, usual)["skip_mismatch"] == 0.0


TIMES = ("step_time", "other_time", "input_time", "forward_time", "backward_time")


def spent(step, **parts):
    return {"step_time": step, "other_time": 0.0, **parts}


@pytest.mark.parametrize(("slow", "part"), [("input_time", 0), ("other_time", 2)])
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


def test_the_spike_score_is_the_share_of_points_seven_deviations_above_the_thousand_before():
    """As OLMo 2 defines it, written out; a spike of several points is counted once."""
    rng = random.Random(3)
    losses = [3.0 - 0.0005 * i + rng.gauss(0.0, 0.02) for i in range(2600)]
    for step, rise in ((1500, 9.0), (1502, 9.0), (1800, 5.0), (2200, 0.05), (2300, 9.0)):
        losses[step] += rise
    company = Company(["train_loss_raw"])
    found = [company.step({"train_loss_raw": loss}) for loss in losses]

    pasts = ((i, np.array(losses[max(0, i - 1000) : i])) for i in range(100, len(losses)))
    far = [i for i, past in pasts if losses[i] - past.mean() >= 7.0 * past.std()]
    assert far == [1500, 1502, 1800, 2300]
    assert [i for i, row in enumerate(found) if row] == [*range(1099, 2600)]
    for i in range(1099, 2600):
        near = sum(i - 1000 < step <= i for step in far)
        assert found[i]["spike_score"] == pytest.approx(near / 10), i
    assert (found[1499]["spike_count"], found[-1]["spike_count"]) == (0.0, 3.0)


def test_a_loss_that_is_no_number_is_no_point_of_the_spike_score():
    company = Company(["train_loss_raw"])
    rows = [company.step({"train_loss_raw": value}) for value in [2.0, math.nan, None] * 1100]

    assert rows[-1] == {} and [row["spike_score"] for row in rows if row] == [0.0]
