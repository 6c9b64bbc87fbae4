"""What only the supervisor can tell of a run, as columns of frames."""

from __future__ import annotations

from dataclasses import replace

from supervise.core.model import THREAD_FAILURE, Announced, Beat, Failure, Frame
from supervise.runtime import (
    LOG_ERRORS,
    RANK_LAG,
    RANKS_MISSING,
    RESTARTS,
    FrameEnricher,
    RunMetrics,
)

S = 1_000_000_000


class Run:
    """A run at a time of its own, in seconds."""

    def __init__(self) -> None:
        self.at_s, self.suspended_s = 1000.0, 0.0
        self.metrics = RunMetrics(self.now)
        self.step = 0

    def now(self) -> tuple[int, int]:
        return int(self.at_s * S), int(self.suspended_s * S)

    def read(self, rank: int = 0, *, ago_s: float = 0.0, world: int = 1) -> dict[str, float]:
        """Read a frame that was published a while ago."""
        self.step += 1
        frame = Frame(int((self.at_s - ago_s) * S), rank, 0, self.step, ())
        return self.metrics.of_frame(frame, world, leads=rank == 0)

    def replaced(self, rank: int, *, again: bool = True) -> None:
        self.metrics.on_announced(
            Announced(int(self.at_s * S), rank, 2, 100 + self.step, (), again=again)
        )

    def beats(self, *beats: tuple[float, str]) -> None:
        """Rank by rank: for how long it ran no hook, and its phase."""
        now_ns = int(self.at_s * S)
        seen = [Beat(rank, now_ns - int(s * S), phase) for rank, (s, phase) in enumerate(beats)]
        self.metrics.on_beats(seen, now_ns)


def test_a_frame_is_as_old_as_it_is_when_it_is_read():
    run = Run()
    run.at_s += 200

    assert run.read() == {RANK_LAG: 0.0}
    assert run.read(ago_s=130.0) == {RANK_LAG: 130.0}


def test_frames_from_before_a_takeover_or_a_suspension_are_not_late():
    """Nobody was to read them then."""
    run = Run()
    assert run.read(ago_s=600.0) == {}
    run.at_s, run.suspended_s = run.at_s + 500.0, 400.0

    assert run.read(ago_s=450.0) == {}
    run.at_s += 10.0
    assert run.read(ago_s=5.0) == {RANK_LAG: 5.0}


def test_restarts_of_the_last_hour_are_counted_whoever_starts_the_job():
    """A launcher that replaces all ranks restarts the job once; the policy may do so, too."""
    run = Run()
    assert RESTARTS not in run.read()
    for _ in range(2):
        run.replaced(0)
        run.replaced(1)
    run.replaced(0, again=False)  # the next program of a sweep
    run.at_s += 1800.0
    run.metrics.on_relaunch()

    assert run.read()[RESTARTS] == 3 * 24.0
    run.at_s += 1801.0
    assert run.read()[RESTARTS] == 24.0
    run.at_s += 1801.0
    assert run.read()[RESTARTS] == 0.0


def test_errors_are_counted_by_class_one_a_minute():
    """Of ranks and threads: not what follows from another end, or that of an expected program."""
    run = Run()
    at_ns = int(run.at_s * S)
    oom = Failure(cls="cuda-oom", leading=True, pid=1, at_ns=at_ns)
    peers = [replace(oom, pid=2, at_ns=at_ns + S), replace(oom, pid=3, secondary=True)]
    helper = Failure(cls="import", pid=4, at_ns=at_ns)
    thread = Failure(kind=THREAD_FAILURE, pid=5, at_ns=at_ns)
    run.metrics.on_failures([oom, *peers, helper])
    run.metrics.on_failures([oom, *peers, helper, thread])

    assert run.read() == {
        RANK_LAG: 0.0,
        LOG_ERRORS: 2.0,
        f"{LOG_ERRORS}.cuda-oom": 1.0,
        f"{LOG_ERRORS}.other": 1.0,
    }
    run.at_s += 3601.0
    assert run.read()[LOG_ERRORS] == 0.0


def test_a_rank_that_runs_no_hook_for_half_a_minute_is_missed_in_the_frames_of_all():
    run = Run()
    assert run.read(0, world=2)[RANKS_MISSING] == 0.0
    run.beats((0.0, "step"), (30.0, "step"))
    assert run.read(0, world=2)[RANKS_MISSING] == 0.0
    run.beats((31.0, "step"), (0.0, "step"))

    assert run.read(1, world=2) == {RANKS_MISSING: 1.0}
    assert RANKS_MISSING not in run.read(0)


def test_long_steps_and_other_phases_have_their_time():
    """Eight of its longest steps; what evaluates, saves, is stopped or dead is judged elsewhere."""
    run = Run()
    for _ in range(3):
        run.read(1, world=2)
        run.at_s += 10.0
    run.beats((0.0, "step"), (79.0, "step"))
    assert run.read(0, world=2)[RANKS_MISSING] == 0.0
    run.beats((90.0, "eval"), (81.0, "step"))
    assert run.read(0, world=2)[RANKS_MISSING] == 1.0
    run.beats((900.0, "dead"), (900.0, "suspended"))
    assert run.read(0, world=2)[RANKS_MISSING] == 0.0


def test_the_columns_join_the_frames():
    run = Run()
    enricher = FrameEnricher(lambda pid, leads: {}, run.now)
    enricher.complete(Announced(5, 0, 1, 100, ("train_loss_raw",)))
    run.at_s += 2.0

    news, frame = enricher.complete(Frame(int(1001.5 * S), 0, 0, 1, (2.0,)))

    assert (news.names, frame.values) == (("train_loss_raw", RANK_LAG), (2.0, 0.5))
