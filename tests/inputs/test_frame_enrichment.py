"""Frames are completed by what their rank cannot know, and nothing else of them changes."""

from __future__ import annotations

from dataclasses import replace

from supervise.core.model import Announced, Frame
from supervise.runtime import FrameEnricher


class Machine:
    """A machine whose values a test sets."""

    def __init__(self, **values: float) -> None:
        self.values = values

    def __call__(self, pid: int, leads: bool) -> dict[str, float]:
        return dict(self.values) if leads else {}


def announced(rank: int = 0, world: int = 1, names: tuple[str, ...] = ("train_loss_raw",)):
    return Announced(5, rank, world, 100 + rank, names)


def test_a_new_column_is_announced_in_front_of_the_frame_that_has_it():
    company = FrameEnricher(machine := Machine())
    company.complete(announced())
    machine.values["disk_free"] = 40.0

    news, frame = company.complete(Frame(6, 0, 0, 1, (2.0,)))

    assert news == Announced(6, 0, 1, 100, ("train_loss_raw", "disk_free"))
    assert frame == Frame(6, 0, 0, 1, (2.0, 40.0))


def test_what_is_not_known_any_more_is_absent():
    company = FrameEnricher(machine := Machine(disk_free=40.0))
    company.complete(announced())
    company.complete(Frame(6, 0, 0, 1, (2.0,)))
    machine.values.clear()

    assert company.complete(Frame(7, 0, 0, 2, (2.0,))) == [Frame(7, 0, 0, 2, (2.0, None))]


def test_names_that_the_probe_announces_late_move_no_column():
    company = FrameEnricher(Machine(disk_free=40.0))
    company.complete(announced())
    company.complete(Frame(6, 0, 0, 1, (2.0,)))

    (news,) = company.complete(announced(names=("train_loss_raw", "my_score")))
    (short,) = company.complete(Frame(8, 0, 0, 3, (2.0,)))
    (whole,) = company.complete(Frame(9, 0, 0, 4, (2.0, 7.0)))

    assert news.names == ("train_loss_raw", "disk_free", "my_score")
    assert short.values == (2.0, 40.0, None)
    assert whole.values == (2.0, 40.0, 7.0)


def test_another_process_of_the_rank_starts_from_nothing():
    company = FrameEnricher(machine := Machine(disk_free=40.0))
    company.complete(announced())
    company.complete(Frame(6, 0, 0, 1, (2.0,)))
    machine.values.clear()
    other = Announced(9, 0, 1, 777, ("train_loss_raw",))

    assert company.complete(other) == [other]
    assert company.complete(Frame(10, 0, 0, 0, (2.0,))) == [Frame(10, 0, 0, 0, (2.0,))]


def test_a_program_that_replaced_itself_starts_from_nothing():
    """After an exec the process is the same, and may announce less than before."""
    company = FrameEnricher(Machine(disk_free=40.0))
    company.complete(Announced(5, 0, 1, 7, ("train_loss_raw", "probe_self_time"), segment=1))
    company.complete(Frame(6, 0, 0, 9, (2.0, 0.1)))

    after = Announced(8, 0, 1, 7, ("train_loss_raw",), segment=2)
    assert company.complete(after) == [after]
    news, frame = company.complete(Frame(9, 0, 0, 0, (3.0,)))
    assert news.names == ("train_loss_raw", "disk_free") and news.segment == 2
    assert frame.values == (3.0, 40.0)


def test_steps_of_a_program_that_is_over_complete_none_of_the_next():
    """Two ranks replaced themselves: a step counts when both have said it since."""
    company = FrameEnricher(Machine())
    for rank in (0, 1):
        company.complete(Announced(5, rank, 2, 7 + rank, ("train_loss_raw",), segment=1))
    company.complete(Frame(6, 1, 0, 3, (100.0,)))  # rank 0 never came so far
    for rank in (0, 1):
        company.complete(Announced(7, rank, 2, 7 + rank, ("train_loss_raw",), segment=2))

    company.complete(Frame(8, 0, 0, 3, (2.0,)))
    assert company.complete(Frame(9, 0, 0, 4, (2.0,))) == [Frame(9, 0, 0, 4, (2.0,))]
    company.complete(Frame(10, 1, 0, 3, (2.0,)))
    *_, frame = company.complete(Frame(11, 0, 0, 5, (2.0,)))
    assert frame.values[1:3] == (2.0, 0.0)  # job_loss and loss_dispersion


def test_a_job_that_reports_a_metric_itself_is_believed():
    company = FrameEnricher(Machine(disk_free=40.0))
    company.complete(announced(names=("disk_free",)))

    assert company.complete(Frame(6, 0, 0, 1, (7.0,))) == [Frame(6, 0, 0, 1, (7.0,))]


def test_what_ranks_tell_together_stands_in_the_next_frame_of_the_leader():
    company = FrameEnricher(Machine())
    for rank in (0, 1):
        company.complete(announced(rank, 2))
    company.complete(Frame(6, 0, 0, 0, (2.0,)))
    assert company.complete(Frame(7, 1, 0, 0, (4.0,))) == [Frame(7, 1, 0, 0, (4.0,))]

    news, frame = company.complete(Frame(8, 0, 0, 1, (2.0,)))

    values = dict(zip(news.names, frame.values, strict=True))
    assert values["loss_dispersion"] == 2.0**0.5


def test_columns_stay_where_a_supervisor_before_this_one_put_them():
    """Of the same segment only: another process starts from nothing."""
    before = announced(names=("train_loss_raw", "disk_free", "loss_scale"))
    company = FrameEnricher(Machine(cpu_share=0.5))
    company.recall(before)

    (again,) = company.complete(announced(names=("train_loss_raw", "loss_scale")))
    news, frame = company.complete(Frame(6, 0, 0, 1, (2.0, 8.0)))

    assert again == before
    assert news.names == (*before.names, "cpu_share")
    assert frame.values == (2.0, None, 8.0, 0.5)

    other = FrameEnricher(Machine())
    other.recall(before)
    assert other.complete(replace(announced(), segment=9)) == [replace(announced(), segment=9)]
