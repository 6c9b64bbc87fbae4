"""The directory of segments: found, replaced and given up without a word too many."""

import itertools
import os
import shutil
import subprocess
import sys
import time

import pytest

from supervise import system
from supervise.core.model import Announced, Frame, Notice
from supervise.runtime import Segments
from supervise_probe import wire
from supervise_probe.ipc.segment import Writer


@pytest.fixture
def shm(tmp_path):
    """The directory that the supervisor makes for the run."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def marks(tmp_path):
    """The directory of the probe's marks."""
    (tmp_path / "probe").mkdir()
    return tmp_path / "probe"


@pytest.fixture
def segments(shm, marks):
    """The run's segments, with a clock that ticks once a second."""
    times = itertools.count(10**9, 10**9)
    segments = Segments(shm, marks, lambda: next(times))
    yield segments
    segments.close()


@pytest.fixture
def rank(shm):
    """A function that makes the writer of a rank, with one frame per value given."""
    writers = []

    def make(number: int, *values: float) -> Writer:
        writer = Writer.create(str(shm), "run", number, 2, slots=8, capacity=4)
        writers.append(writer)
        writer.announce(["loss"])
        for step, value in enumerate(values):
            writer.publish(step, 0, [value], 10**6 * (step + 1))
        return writer

    yield make
    for writer in writers:
        writer.close()


def steps(events: list[object]) -> list[tuple[int, float | None]]:
    return [(event.rank, event.values[0]) for event in events if isinstance(event, Frame)]


def test_ranks_are_found_as_they_come_and_read_in_order(segments, rank):
    rank(1, 1.5)
    first = segments.poll()
    rank(0, 0.5, 0.75)
    second = segments.poll()

    assert steps(first) == [(1, 1.5)]
    assert steps(second) == [(0, 0.5), (0, 0.75)]
    assert sorted(segments.ranks) == [0, 1]
    assert segments.poll() == []


def test_nothing_there_yet_is_nothing_new(tmp_path):
    segments = Segments(tmp_path / "no-shm", tmp_path / "no-marks", system.monotonic_ns)

    assert segments.poll() == []
    assert segments.interval_s() == 0.25


def test_a_bad_segment_is_reported_once_and_the_others_go_on(segments, shm, rank):
    (shm / "rank-3.31.seg").write_bytes(b"%PDF-1.7" + bytes(4096))
    (shm / "rank-4.41.seg").write_bytes(wire.MAGIC + b"\7\0\0\0" + bytes(4096))
    os.mkfifo(shm / "rank-5.51.seg")
    (shm / ".rank-6.61.new").write_bytes(b"")
    (shm / "something-else").write_bytes(b"")
    rank(0, 0.5)

    events = segments.poll()
    again = segments.poll() + segments.poll()

    faults = [event for event in events if isinstance(event, Notice)]
    assert [(fault.kind, fault.rank, fault.data) for fault in faults] == [
        ("segment-fault", 3, {"pid": 31}),
        ("segment-fault", 4, {"pid": 41}),
        ("segment-fault", 5, {"pid": 51}),
    ]
    assert "same installation" in faults[1].message
    assert steps(events) == [(0, 0.5)]
    assert again == []


def test_a_segment_that_breaks_later_is_reported_once(segments, rank):
    broken, sound = rank(0, 0.5), rank(1, 1.5)
    segments.poll()
    os.truncate(broken.path, 5000)
    sound.publish(1, 0, [1.75], 20)

    events = segments.poll()

    assert [type(event) for event in events] == [Notice, Frame]
    assert events[0].rank == 0
    assert "was cut short: 5000 of" in events[0].message
    assert sorted(segments.ranks) == [1]
    assert segments.poll() == []


def test_a_segment_under_another_ranks_name_is_not_believed(segments, shm, rank):
    shutil.copy(rank(0, 0.5).path, shm / "rank-1.77.seg")

    events = segments.poll()

    (fault,) = [event for event in events if isinstance(event, Notice)]
    assert (fault.kind, fault.rank) == ("segment-fault", 1)
    assert f"is that of rank 0 of process {os.getpid()}" in fault.message
    assert steps(events) == [(0, 0.5)]


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, True), (None, True)])
def test_a_relaunched_rank_replaces_the_one_before(segments, shm, rank, code, again):
    old = rank(0, 0.5)
    segments.poll()
    old.publish(1, 0, [0.75], 20)
    old.last_words(code, "")
    source = (
        "import sys; from supervise_probe.ipc.segment import Writer;"
        "w = Writer.create(sys.argv[1], 'run', 0, 2, slots=8, capacity=4);"
        "w.announce(['loss']); w.publish(0, 0, [9.5], 30)"
    )
    subprocess.run([sys.executable, "-c", source, str(shm)], check=True)

    events = segments.poll()
    old.publish(2, 0, [99.0], 40)

    assert steps(events) == [(0, 0.75), (0, 9.5)]
    assert isinstance(events[1], Announced) and events[1].again is again
    assert segments.ranks[0].pid == events[1].pid != os.getpid()
    assert segments.poll() == []


def test_what_the_dead_left_is_removed_before_the_job_starts_again(segments, shm, rank):
    dead = rank(0, 0.5)
    rank(1, 1.5)
    segments.poll()
    dead.last_words(0, "")

    segments.forget()

    assert list(segments.ranks) == [1]
    assert [path.name.split(".")[0] for path in shm.iterdir()] == ["rank-1"]
    rank(0, 0.25)
    assert steps(segments.poll()) == [(0, 0.25)]


def test_a_program_that_replaced_itself_is_read_on(segments, rank):
    old = rank(0, 0.5)
    segments.poll()
    new = rank(0, 9.5)

    assert old.path.endswith(f".{os.getpid()}.seg") and new.path.endswith(f".{os.getpid()}.1.seg")
    announced, frame = segments.poll()
    assert steps([frame]) == [(0, 9.5)]
    assert isinstance(announced, Announced) and not announced.again
    assert str(segments.ranks[0].path) == new.path


def test_a_second_process_of_a_rank_waits_for_the_first(segments, shm, rank):
    """A child that trains a model of its own must not push its parent out; it is said once."""
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from supervise_probe.ipc.segment import Writer;"
            "w = Writer.create(sys.argv[1], 'run', 0, 2, slots=8, capacity=4);"
            "w.announce(['loss']); w.publish(0, 0, [9.5], 30); input()",
            str(shm),
        ],
        stdin=subprocess.PIPE,
    )
    first: list[object] = []
    while not first:
        first = segments.poll()
        time.sleep(0.01)
    mine = rank(0, 0.5)
    second = segments.poll() + segments.poll()
    child.communicate(b"\n")
    third = segments.poll()
    mine.publish(1, 0, [0.75], 40)

    assert steps(first) == [(0, 9.5)]
    (note,) = second
    assert isinstance(note, Notice) and note.kind == "note" and note.data == {"pid": os.getpid()}
    assert f"process {child.pid} is read until it ends" in note.message
    assert steps(third) == [(0, 0.5)]
    assert steps(segments.poll()) == [(0, 0.75)]


def test_a_probe_that_gave_up_is_heard_once(segments, marks):
    (marks / "boot.7").touch()
    (marks / "armed.7").touch()
    (marks / "off.7").write_text("no space left on /dev/shm:\n 4.7 MB are needed\n")

    (event,) = segments.poll()

    assert (event.kind, event.data) == ("probe-off", {"pid": 7})
    assert event.message == "no space left on /dev/shm: 4.7 MB are needed"
    assert segments.poll() == []


def test_an_empty_mark_is_given_time(segments, marks):
    (marks / "off.7").touch()
    (marks / "off.8").touch()
    assert segments.poll() == []
    (marks / "off.7").write_text("torch is too old")

    events = [event for _ in range(4) for event in segments.poll()]

    assert {event.data["pid"]: event.message for event in events} == {
        7: "torch is too old",
        8: "the probe is off, and could not write down why",
    }


@pytest.mark.parametrize(
    ("step_ms", "interval_s"), [(1, 0.020), (200, 0.050), (400, 0.100), (9000, 0.250)]
)
def test_polling_follows_the_step_time(segments, rank, step_ms, interval_s):
    """A quarter of the median step, between 20 and 250 ms; one slow step does not move it."""
    writer = rank(0)
    at_ns = 0
    for step in range(40):
        at_ns += (step_ms if step != 20 else 60_000) * 10**6
        writer.publish(step, 0, [0.5], at_ns)
        segments.poll()

    assert segments.interval_s() == pytest.approx(interval_s)
