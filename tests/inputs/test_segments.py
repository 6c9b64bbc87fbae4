"""The directory of segments: found, replaced and given up without a word too many."""

import itertools
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from supervise.core.model import Announced, Frame, Gap, Notice
from supervise.errors import SegmentError
from supervise.runtime import ReadCursor, Segments, recorded_returncode, start_ticks
from supervise_probe import wire
from supervise_probe.ipc.segment import Mailbox
from tests.support.waiting import wait_until

SECOND = 10**9


@pytest.fixture
def marks(tmp_path):
    (tmp_path / "probe").mkdir()
    return tmp_path / "probe"


@pytest.fixture
def segments(shm, marks):
    times = itertools.count(SECOND, SECOND)
    segments = Segments(shm, marks, lambda: next(times))
    yield segments
    segments.close()


def steps(events):
    return [(event.rank, event.values[0]) for event in events if isinstance(event, Frame)]


def test_nothing_there_yet_is_nothing_new(tmp_path):
    segments = Segments(tmp_path / "no-shm", tmp_path / "no-marks", lambda: 0)

    assert (segments.poll(), segments.interval_s()) == ([], 0.25)


def test_ranks_are_found_as_they_come_and_read_in_order(segments, rank):
    first = rank(1, 1.5)
    assert steps(segments.poll()) == [(1, 1.5)]
    segments.defer_job_signals(7)
    assert first.signals_deferred_until_ns() == 7
    rank(0, 0.5, 0.75)
    assert steps(segments.poll()) == [(0, 0.5), (0, 0.75)]
    assert sorted(segments.ranks) == [0, 1]
    assert segments.poll() == []


def test_what_ranks_have_in_one_poll_comes_in_the_order_of_its_steps(segments, rank):
    """Else what is compared between the ranks of a step would be that of the newest one only."""
    writers = rank(0), rank(1)
    segments.poll()
    for step in range(3):
        for number, writer in enumerate(writers):
            writer.publish(step, 0, [number + step / 10], 100 * (step + 1) + 7 * number)

    assert steps(segments.poll()) == [(0, 0), (1, 1), (0, 0.1), (1, 1.1), (0, 0.2), (1, 1.2)]


def test_a_bad_segment_is_reported_once_and_the_others_go_on(segments, shm, rank):
    sound, broken = rank(0, 0.5), rank(1, 1.5)
    (shm / "rank-3.31.seg").write_bytes(b"%PDF-1.7" + bytes(4096))
    (shm / "rank-4.41.seg").write_bytes(wire.MAGIC + b"\7\0\0\0" + bytes(4096))
    os.mkfifo(shm / "rank-5.51.seg")
    shutil.copy(sound.path, shm / "rank-6.61.seg")
    for name in (".rank-6.62.new", "something-else"):
        (shm / name).write_bytes(b"")

    events = segments.poll()

    assert steps(events) == [(0, 0.5), (1, 1.5)]
    faults = [event for event in events if isinstance(event, Notice)]
    assert [(fault.kind, fault.rank, fault.data) for fault in faults] == [
        ("segment-fault", rank, {"pid": 10 * rank + 1}) for rank in (3, 4, 5, 6)
    ]
    assert "same installation" in faults[1].message
    assert f"is that of rank 0 of process {os.getpid()}" in faults[3].message
    os.truncate(broken.path, 5000)
    sound.publish(1, 0, [0.75], 20)

    frame, fault, *others = segments.poll() + segments.poll()

    assert (fault.kind, fault.rank, others) == ("segment-fault", 1, [])
    assert "was cut short: 5000 of" in fault.message
    assert steps([frame]) == [(0, 0.75)] and sorted(segments.ranks) == [0]


OTHER = """import sys; from supervise_probe.ipc.segment import Writer
writer = Writer.create(sys.argv[1], "run", 0, 2, slots=8, capacity=4)
writer.announce(["loss"]); writer.publish(0, 0, [9.5], 30)
"""


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, True), (None, True)])
def test_a_relaunched_rank_replaces_the_one_before(segments, shm, rank, code, again):
    old = rank(0, 0.5)
    segments.poll()
    old.publish(1, 0, [0.75], 20)
    old.write_end(code, "")
    subprocess.run([sys.executable, "-c", OTHER, str(shm)], check=True)

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
    dead.write_end(0, "")

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
    argv = [sys.executable, "-c", f"{OTHER}input()", str(shm)]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE)
    first = wait_until(segments.poll, "the segment of the child")
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


@pytest.mark.parametrize(
    ("code", "is_dead"), [("None", True), ("-11", True), ("1", True), ("0", False), ("-15", False)]
)
def test_a_rank_is_dead_whose_process_ended_otherwise_than_it_or_somebody_meant(
    segments, shm, rank, code, is_dead
):
    """What was never seen alive may live in another container."""
    argv = [sys.executable, "-c", f"{OTHER}input()\nwriter.write_end({code}, '')", str(shm)]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE)
    wait_until(segments.poll, "the segment of the child")
    rank(1, 0.5)
    segments.poll()
    assert segments.dead_ranks() == set()
    if code == "None":
        child.kill()
    child.communicate(b"\n")

    assert segments.dead_ranks() == ({0} if is_dead else set())


def test_a_probe_that_gave_up_is_heard_once_and_an_empty_mark_is_given_time(segments, marks):
    for name in ("boot.7", "armed.7", "off.7", "off.8"):
        (marks / name).touch()
    assert segments.poll() == []
    (marks / "off.7").write_text("no space left on /dev/shm:\n 4.7 MB are needed\n")

    events = [event for _ in range(4) for event in segments.poll()]

    assert {event.kind for event in events} == {"probe-off"}
    assert {event.data["pid"]: event.message for event in events} == {
        7: "no space left on /dev/shm: 4.7 MB are needed",
        8: "the probe is off, and could not write down why",
    }


@pytest.mark.parametrize(("step_ms", "interval_s"), [(1, 0.050), (240, 0.120), (9000, 0.500)])
def test_polling_follows_the_step_time(segments, rank, step_ms, interval_s):
    writer = rank(0)
    at_ns = 0
    for step in range(40):
        at_ns += (step_ms if step != 20 else 60_000) * 10**6
        writer.publish(step, 0, [0.5], at_ns)
        segments.poll()

    assert segments.interval_s() == pytest.approx(interval_s)


def test_words_reach_the_probe_and_change_no_other_word(segment, writer):
    segment.write_heartbeat(5)
    segment.lease(6)
    assert (writer.dense_sampling_until_ns(), writer.savepoint_retention_bound(0)) == (0, 0)
    segment.sample_densely(7)
    segment.retain_savepoint_before(80, 1000)
    assert (writer.savepoint_retention_bound(999), writer.savepoint_retention_bound(1000)) == (
        80,
        0,
    )
    assert writer.commands_head() == 0
    segment.send("key", "pause", {})
    words = (writer.commands_head(), writer.lease_until_ns(), writer.dense_sampling_until_ns())
    assert (*words, writer.savepoint_retention_bound(999)) == (1, 6, 7, 80)
    segment.retain_savepoint_before(0, 2000)
    assert writer.savepoint_retention_bound(999) == 0


def test_denser_samples_are_told_when_they_begin_and_end_and_renewed_meanwhile(tmp_path):
    segments, wishes = Segments(tmp_path, tmp_path, lambda: 0), []
    segments.ranks = {n: SimpleNamespace(sample_densely=wishes.append) for n in (0, 1)}
    states = ((False, 10), (True, 20), (True, 30), (False, 40), (False, 50))
    messages = [segments.sample_densely(dense, at_ns) for dense, at_ns in states]

    began = "samples are taken more densely while there is an incident"
    ended = "samples are taken as usual again, 30 seconds from now"
    assert messages == [None, began, None, ended, None]
    assert wishes == [20 + 30 * SECOND] * 2 + [30 + 30 * SECOND] * 2


def test_a_savepoint_to_be_retained_is_written_at_once_and_again_once_a_second(tmp_path):
    """Every round asks; a rank whose segment is broken does not keep the others from it."""
    segments, wishes = Segments(tmp_path, tmp_path, lambda: 0), []

    def broken(*wish):
        raise SegmentError("it is short")

    ways = enumerate((broken, lambda *wish: wishes.append(wish)))
    segments.ranks = {n: SimpleNamespace(retain_savepoint_before=way) for n, way in ways}
    for step, at_s in ((0, 0), (80, 1), (80, 1.9), (70, 2), (70, 3), (0, 3.1), (0, 9)):
        segments.retain_savepoint_before(step, int(at_s * SECOND))

    written = ((80, 1), (70, 2), (70, 3), (0, 3.1))
    assert wishes == [(step, int((at_s + 300) * SECOND)) for step, at_s in written]


# ── a second reader goes on where the journal of the first one ends ──────────────────────────────


@pytest.fixture
def reader(shm, tmp_path):
    opened = []

    def read(*journal):
        taken = ReadCursor()
        for event in journal:
            taken.advance_past(event)
        opened.append(Segments(shm, tmp_path / "probe", lambda: 77, taken))
        return opened[-1], opened[-1].poll()

    yield read
    for segments in opened:
        segments.close()


def publish(writer, *steps):
    for step in steps:
        writer.publish(step, 0, [1.0], 1000 + step)


def numbers(events):
    return [event.step for event in events if isinstance(event, Frame)]


def notices(events):
    return [event.message for event in events if isinstance(event, Notice)]


def test_the_first_reader_may_die_after_any_event(rank, reader):
    writer = rank()
    mailbox = Mailbox(writer)
    publish(writer, 0, 1)
    mailbox.send_notice("note", "first", 1)
    mailbox.send_notice("note", "second", 1)
    _, seen = reader()
    assert [type(event) for event in seen] == [Announced, Frame, Frame, Notice, Notice]
    publish(writer, 2)
    mailbox.send_notice("note", "third", 2)
    for known in range(6):
        _, rest = reader(*seen[:known])

        assert numbers(seen[:known]) + numbers(rest) == [0, 1, 2]
        assert notices(seen[:known]) + notices(rest) == ["first", "second", "third"]
        assert isinstance(rest[0], Announced)


def test_what_was_overwritten_meanwhile_is_a_gap(rank, reader):
    writer = rank()
    publish(writer, 0, 1)
    _, seen = reader()
    publish(writer, *range(2, 20))

    _, rest = reader(*seen)
    assert [event for event in rest if isinstance(event, Gap)] == [Gap(77, 0, 2, 10)]
    assert numbers(rest) == list(range(12, 20))
    assert numbers(reader(*seen, *rest)[1]) == []


def test_a_notice_from_within_a_gap_stands_before_it(rank, reader):
    """The gap ends where frames are left; what was done meanwhile is judged at its own step."""
    writer = rank()
    mailbox = Mailbox(writer)
    publish(writer, 0, 1)
    mailbox.send_notice("note", "early", 1)
    publish(writer, *range(2, 20))
    mailbox.send_notice("note", "late", 19)
    _, seen = reader()

    assert [type(event) for event in seen] == [Announced, Notice, Gap, *[Frame] * 8, Notice]
    assert seen[2] == Gap(77, 0, 0, 12) and notices(seen) == ["early", "late"]


def test_an_answer_is_read_again_and_notices_around_it_are_not(rank, reader):
    writer = rank()
    mailbox = Mailbox(writer)
    first, _ = reader()
    first.ranks[0].send("inc-1/0-pause", "pause", {})
    (command,) = mailbox.poll()
    mailbox.ack(command, 5, True, {"paused_step": 5})
    mailbox.send_notice("note", "paused", 5)
    seen = first.poll()
    assert notices(seen) == ["paused"]

    second, rest = reader(*seen)

    assert notices(rest) == []
    assert [ack.key for ack in second.ranks[0].acks()] == ["inc-1/0-pause"]


def test_letters_lost_meanwhile_are_told_once(rank, reader):
    writer = rank()
    mailbox = Mailbox(writer)
    mailbox.send_notice("note", "heard", 0)
    _, seen = reader()
    for number in range(wire.LETTER_SLOTS + 3):
        mailbox.send_notice("note", f"later {number}", 0)

    second, rest = reader(*seen)
    assert "3 letters from the probe of rank 0 were lost or unreadable" in notices(rest)
    while more := second.poll():
        rest += more
    assert len(notices(rest)) == wire.LETTER_SLOTS + 1
    assert notices(reader(*seen, *rest)[1]) == []


def test_a_segment_that_was_replaced_is_not_read_again(rank, reader):
    old = rank()
    publish(old, 0, 1, 2)
    first, seen = reader()
    new = rank()
    publish(new, 0)
    seen += first.poll()
    publish(new, 1)

    second, rest = reader(*seen)

    assert numbers(seen) == [0, 1, 2, 0]
    assert numbers(rest) == [1]
    assert second.ranks[0].path == first.ranks[0].path


def test_a_probe_that_is_off_is_reported_to_one_reader_only(reader, marks):
    (marks / "off.4711").write_text("no torch")
    _, seen = reader()

    assert notices(seen) == ["no torch"]
    assert reader(*seen)[1] == []


@pytest.mark.parametrize(
    ("codes", "leader", "told"),
    [((3,), True, 3), ((None,), True, None), ((0, 0), False, 0), ((0, 1), False, None)],
)
def test_the_end_is_as_the_first_process_or_all_ranks_recorded_it(rank, shm, codes, leader, told):
    for number, code in enumerate(codes):
        writer = rank(number)
        if code is not None:
            writer.write_end(code, "")
    pid = os.getpid() if leader else 1

    assert recorded_returncode(shm, pid, 0) == told
    assert recorded_returncode(shm, pid, (start_ticks(os.getpid()) or 0) + 1) is None


def test_where_ranks_end_otherwise_the_first_process_knows_the_end(rank, shm):
    rank(0).write_end(3, "")
    child = OTHER.replace('"run", 0', '"run", 1') + "writer.write_end(0, '')"
    subprocess.run([sys.executable, "-c", child, str(shm)], check=True)

    assert recorded_returncode(shm, os.getpid(), 0) == 3
    assert recorded_returncode(shm, 1, 0) is None
