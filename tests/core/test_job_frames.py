"""The frame of the job, against sums that are written out, in every order of arrival."""

from __future__ import annotations

import math
from itertools import permutations

import pytest

from supervise.core import JobFrames, combine_rank_values
from supervise.core.model import Frame, Gap

from .conftest import NAN, SECOND, above, one_rule

NAMES = ("train_loss_raw", "tokens_per_update", "grad_global_norm", "grad_norm_share")
HOLD_NS = 5_000_000_000
RANKS = {0: (2.0, 30.0, 3.0, 3.0), 1: (4.0, 10.0, 4.0, 4.0), 2: (1.0, 0.0, 12.0, 12.0)}


def frame(rank, step=7, at_ns=1, **changes):
    values = dict(zip(NAMES, RANKS[rank], strict=True)) | changes
    return Frame(at_ns, rank, 0, step, tuple(values.values()))


def gathered(ranks=3):
    frames = JobFrames()
    for rank in range(ranks):
        frames.announce(rank, NAMES)
    return frames


def job_of(made):
    return dict(zip(("job_ranks", "nonfinite_rank", *NAMES), made.values, strict=True))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_one_frame_of_the_job_stands_behind_those_of_all_ranks(order):
    frames, made = gathered(), []
    for rank in (*order, 0):
        made += frames.add(frame(rank, 7 + (len(made) > 2)), 1, 3)

    assert sorted(each.rank for each in made) == [0, 1, 2]
    job = job_of(next(each for each in made if each.rank == 0))
    assert job["train_loss_raw"] == pytest.approx((2.0 * 30 + 4.0 * 10) / 40)
    assert job["tokens_per_update"] == 40.0 and job["job_ranks"] == 3.0
    assert job["grad_global_norm"] == pytest.approx(13.0)
    assert job["nonfinite_rank"] is None


def test_replicas_count_once_and_ranks_out_of_sight_as_those_in_sight():
    same = {"grad_global_norm": 3.0, "grad_norm_share": 1.5, "batch_copies": 2.0}
    rows = {rank: {**same, "tokens_per_update": 8.0} for rank in range(2)}
    unknown = {rank: {"grad_global_norm": 3.0 + rank} for rank in range(2)}

    found = combine_rank_values(rows, 0, ["grad_global_norm", "tokens_per_update"], 4)
    assert found == {"grad_global_norm": 3.0, "tokens_per_update": 16.0}
    alone = combine_rank_values(unknown, 0, ["grad_global_norm"], 2)
    assert alone == {"grad_global_norm": 3.0}, "the leader's own, as of a stage of a pipeline"


def test_what_is_not_finite_on_one_rank_is_so_of_the_job_and_names_it():
    frames = gathered(2)
    frames.add(frame(0), 1, 2)
    job = job_of(frames.add(frame(1, train_loss_raw=NAN), 1, 2)[-1])
    assert math.isnan(job["train_loss_raw"]) and job["nonfinite_rank"] == 1.0


def test_a_rank_that_is_missing_is_waited_for_and_then_left_out():
    frames = gathered(2)
    frames.add(frame(0), 1, 2)
    assert frames.release_overdue(HOLD_NS, 2) == []
    (made,) = frames.release_overdue(HOLD_NS + 2, 2)
    job = job_of(made)
    assert (job["job_ranks"], job["train_loss_raw"]) == (1.0, 2.0)
    assert job["grad_global_norm"] is None and job["tokens_per_update"] is None

    for step in range(8, 7 + 8):
        frames.add(frame(0, step), step * HOLD_NS, 2)
        frames.flush(2)
    (alone,) = frames.add(frame(0, 90), 90, 2)
    assert job_of(alone)["tokens_per_update"] == 60.0  # as if the other had as many
    frames.add(frame(1, 91), 91, 2)  # it is back
    assert job_of(frames.add(frame(0, 91), 91, 2)[0])["job_ranks"] == 2.0


def test_the_loss_of_the_last_stage_of_a_pipeline_is_judged_where_it_is(tell):
    story = tell(**one_rule(above("train_loss_raw", 5.0), "SEV1"))
    story.announce(0, 2, 1, ("step_time",))
    story.announce(1, 2, 2)
    for step in range(60):
        story.send(Frame(step, 0, 0, step, (0.1,)))
        story.send(Frame(step, 1, 0, step, (2.0 if step < 50 else 9.0, 1.0)))

    assert [d.data["rank"] for d in story.kinds("rule", "fired")] == [1]


def test_a_rank_that_an_elastic_restart_leaves_out_is_judged_no_more(tell):
    """As after `torchrun --nnodes 1:2` with one node less: the same launch, a smaller world."""
    names = ("train_loss_raw", "fan_speed")
    story = tell(**one_rule(above("fan_speed", 9.0), "SEV1"), names=names)
    story.announce(0, 2, 1, segment=1)
    story.announce(1, 2, 2, segment=2)
    for step in range(60):
        for rank in range(2):
            fan = 20.0 if rank and step == 59 else 1.0
            story.send(Frame(step * SECOND, rank, 0, step, (2.0, fan)))
    assert story.state.firing(story.policy) == ["only"]
    story.announce(0, 1, 3, segment=3, again=True)
    (cleared,) = story.kinds("rule", "cleared")
    assert (cleared.data["rank"], list(story.state.monitors)) == (1, [0])
    story.send(Frame(60 * SECOND, 1, 0, 60, (2.0, 20.0)))  # read late
    story.send(Gap(60 * SECOND, 1, 61, 3))  # as well
    assert list(story.state.monitors) == [0]
    for step in range(60, 60 + 1000):
        story.send(Frame(step * SECOND, 0, 0, step, (2.0, 1.0)))

    assert story.state.incident is None and story.kinds("incident", "closed")
    assert not story.state.firing(story.policy)
    assert story.replayed() == story.recorded()


def test_no_step_waits_for_a_rank_that_is_gone():
    frames = gathered(3)
    frames.remove(2)
    frames.add(frame(0), 1, 2)
    job = job_of(frames.add(frame(1), 1, 2)[-1])
    assert job["job_ranks"] == 2.0


def test_the_ranks_of_a_restarted_program_are_put_together_from_their_first_step(tell):
    """As after `torchrun --max-restarts`: the same launch, other programs, and step 0 again."""
    story = tell(**one_rule(above("train_loss_raw", 5.0), "SEV1"))
    for program in (1, 11):
        for rank in (0, 1):
            story.announce(rank, 2, program + rank)
        for step in range(60):
            loss = 2.0 if program == 1 or step < 50 else 9.0
            story.send(Frame(step, 0, 0, step, (loss, 1.0)))
            if program == 11 or step < 59:  # the last frame of the first program waits for rank 1
                story.send(Frame(step, 1, 0, step, (loss, 1.0)))

    assert story.state.monitors[0].value("job_ranks") == 2.0
    assert [d.data["rank"] for d in story.kinds("rule", "fired")] == [0]
    assert story.state.monitors[0].value("train_loss_raw") == 9.0
    assert story.state.frame_count == 120
