"""A second reader goes on exactly where the journal of the first one ends."""

import os

import pytest

from supervise.core.model import Announced, Frame, Gap, Notice
from supervise.runtime import ReadCursor, Segments, recorded_end, start_ticks
from supervise_probe import wire
from supervise_probe.ipc.segment import Mailbox, Writer


@pytest.fixture
def shm(tmp_path):
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def rank(shm):
    """A function that makes the writer of a rank with a ring of eight frames."""
    writers = []

    def make(number: int = 0) -> Writer:
        writers.append(Writer.create(str(shm), "run", number, 1, slots=8, capacity=4))
        writers[-1].announce(["loss"])
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()


@pytest.fixture
def reader(shm, tmp_path):
    """A function that opens the segments behind the events given, and polls once."""
    opened = []

    def read(*journal) -> tuple[Segments, list]:
        taken = ReadCursor()
        for event in journal:
            taken.take(event)
        opened.append(Segments(shm, tmp_path / "probe", lambda: 77, taken))
        return opened[-1], opened[-1].poll()

    yield read
    for segments in opened:
        segments.close()


def publish(writer: Writer, *steps: int) -> None:
    for step in steps:
        writer.publish(step, 0, [1.0], 1000 + step)


def steps(events) -> list[int]:
    return [event.step for event in events if isinstance(event, Frame)]


def notices(events) -> list[str]:
    return [event.message for event in events if isinstance(event, Notice)]


@pytest.mark.parametrize("known", range(6))
def test_the_first_reader_may_die_after_any_event(rank, reader, known):
    writer = rank()
    mailbox = Mailbox(writer)
    publish(writer, 0, 1)
    mailbox.notice("note", "first", 1)
    mailbox.notice("note", "second", 1)
    _, seen = reader()
    assert [type(event).__name__ for event in seen] == [
        "Announced",
        "Frame",
        "Frame",
        "Notice",
        "Notice",
    ]
    publish(writer, 2)
    mailbox.notice("note", "third", 2)

    _, rest = reader(*seen[:known])

    assert steps(seen[:known]) + steps(rest) == [0, 1, 2]
    assert notices(seen[:known]) + notices(rest) == ["first", "second", "third"]
    assert isinstance(rest[0], Announced)


def test_what_was_overwritten_meanwhile_is_a_gap(rank, reader):
    writer = rank()
    publish(writer, 0, 1)
    _, seen = reader()
    publish(writer, *range(2, 20))

    _, rest = reader(*seen)
    assert [event for event in rest if isinstance(event, Gap)] == [Gap(77, 0, 2, 10)]
    assert steps(rest) == list(range(12, 20))
    assert steps(reader(*seen, *rest)[1]) == []


def test_an_answer_is_read_again_and_notices_around_it_are_not(rank, reader):
    """Whoever asked may have died before the answer was written down."""
    writer = rank()
    mailbox = Mailbox(writer)
    first, _ = reader()
    first.ranks[0].send("inc-1/0-pause", "pause", {})
    (command,) = mailbox.poll()
    mailbox.ack(command, 5, True, {"paused_step": 5})
    mailbox.notice("note", "paused", 5)
    seen = first.poll()
    assert notices(seen) == ["paused"]

    second, rest = reader(*seen)

    assert notices(rest) == []
    assert [ack.key for ack in second.ranks[0].acks()] == ["inc-1/0-pause"]


def test_letters_lost_meanwhile_are_told_once(rank, reader):
    writer = rank()
    mailbox = Mailbox(writer)
    mailbox.notice("note", "heard", 0)
    _, seen = reader()
    for number in range(wire.LETTER_SLOTS + 3):
        mailbox.notice("note", f"later {number}", 0)

    second, rest = reader(*seen)
    assert "3 letters from the probe of rank 0 were lost or unreadable" in notices(rest)
    while more := second.poll():
        rest += more
    assert len(notices(rest)) == wire.LETTER_SLOTS + 1
    assert notices(reader(*seen, *rest)[1]) == []


def test_a_segment_that_was_replaced_is_not_read_again(rank, reader):
    """A program that replaced itself keeps its pid; the segment of the one before stays there."""
    old = rank()
    publish(old, 0, 1, 2)
    first, seen = reader()
    new = rank()
    publish(new, 0)
    seen += first.poll()
    publish(new, 1)

    second, rest = reader(*seen)

    assert steps(seen) == [0, 1, 2, 0]
    assert steps(rest) == [1]
    assert second.ranks[0].path == first.ranks[0].path


def test_a_probe_that_is_off_is_told_once(reader, tmp_path):
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "off.4711").write_text("no torch")
    _, seen = reader()

    assert notices(seen) == ["no torch"]
    assert reader(*seen)[1] == []


@pytest.mark.parametrize(
    ("codes", "leader", "told"),
    [((3,), True, 3), ((None,), True, None), ((0, 0), False, 0), ((0, 1), False, None)],
)
def test_the_end_is_as_the_first_process_or_all_ranks_recorded_it(rank, shm, codes, leader, told):
    """A launcher records nothing; its ranks speak for it while they agree."""
    for number, code in enumerate(codes):
        writer = rank(number)
        if code is not None:
            writer.last_words(code, "")
    pid = os.getpid() if leader else 1

    assert recorded_end(shm, pid, 0) == told
    assert recorded_end(shm, pid, (start_ticks(os.getpid()) or 0) + 1) is None
