"""Real writers and readers over one file: what is read is true, what is lost is counted."""

import itertools
import math
import os
import random
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from supervise.core.model import Announced, Beat, Event, Frame, Gap
from supervise.errors import SegmentError
from supervise.runtime import Segment
from supervise_probe import wire
from supervise_probe.ipc.segment import Mailbox

from .conftest import poke, publish

pytestmark = pytest.mark.slow

# Publishes frames whose every value is the step, as fast as it can; a chatty one also writes
# everything else that a probe does.
TRAINER = """
    import sys
    from supervise_probe.ipc.segment import Mailbox, Writer
    directory, slots, steps, chatty = sys.argv[1:]
    writer = Writer.create(directory, "run", 0, 1, slots=int(slots), capacity=64)
    mailbox = Mailbox(writer)
    names = [f"m{i}" for i in range(8)]
    writer.announce(names)
    print(writer.path, flush=True)
    for step in range(int(steps)):
        if chatty == "chatty" and step % 20 == 10:
            if len(names) < 60:
                names.append(f"late{step}")
                writer.announce(names)
            writer.write_status({"step": step, "again": step, "pad": "x" * (step % 3000)})
            mailbox.notice("note", f"step {step}", step, {"again": step})
            writer.write_end(step, f"step {step}")
        writer.publish(step, 0, [float(step)] * len(names), step + 1)
        writer.write_heartbeat((step + 1) * 8, 1)
"""


@pytest.fixture
def trainer(tmp_path):
    with ExitStack() as ends:

        def start(*, slots, steps=10**9, chatty=False):
            command = [sys.executable, "-c", textwrap.dedent(TRAINER), str(tmp_path), str(slots)]
            command += [str(steps), "chatty" if chatty else "quiet"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            ends.enter_context(process)
            ends.callback(process.kill)
            segment = Segment.open(process.stdout.readline().strip(), lambda: 77)
            ends.callback(segment.close)
            return process, segment

        yield start


class Account:
    """Checks events as they come: frames are whole, and each number is seen or counted once."""

    def __init__(self) -> None:
        self.next = self.frames = self.lost = 0

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Frame):
                assert event.step == self.next, "out of order, twice, or lost without a gap"
                assert {value for value in event.values if value is not None} == {float(self.next)}
                assert event.at_ns == self.next + 1
                self.next += 1
                self.frames += 1
            elif isinstance(event, Gap):
                assert event.first_seq == self.next
                assert event.count > 0
                self.next += event.count
                self.lost += event.count


def test_a_frame_arrives_as_it_was_published(writer, segment):
    writer.announce(["loss", "norm", "lr"])
    writer.publish(7, 1, [1.5, None, math.inf], 10)
    writer.publish(8, 1, [math.nan, -0.0, None], 20)

    announced, first, second = segment.poll()

    names = ("loss", "norm", "lr")
    assert announced == Announced(77, 2, 4, os.getpid(), names, segment.created_ns)
    assert first == Frame(10, 2, 1, 7, (1.5, None, math.inf))
    assert repr(second.values) == "(nan, -0.0, None)"
    assert segment.poll() == []


def test_late_names_are_announced_before_the_frame_that_needs_them(writer, segment):
    writer.announce(["loss"])
    writer.publish(0, 0, [1.0], 10)
    first = segment.poll()
    writer.publish(1, 0, [2.0], 20)
    writer.announce(["loss", "norm"])
    writer.publish(2, 0, [3.0, 4.0], 30)

    second = segment.poll()

    assert [type(event) for event in first] == [Announced, Frame]
    assert [type(event) for event in second] == [Announced, Frame, Frame]
    assert [event.values for event in second[1:]] == [(2.0, None), (3.0, 4.0)]


def test_heartbeat_lease_and_stamp_cross(writer, segment):
    started = segment.beat()
    writer.write_heartbeat(8_000_000, wire.PHASES.index("checkpoint"))
    segment.write_heartbeat(123)
    segment.lease((1 << 63) + 5)

    assert (started.rank, started.phase) == (2, "startup")
    assert 0 < started.seen_ns <= time.monotonic_ns()
    assert segment.beat() == Beat(2, 8_000_000, "checkpoint")
    assert writer.lease_until_ns() == (1 << 63) + 5
    assert wire.read_checked_word(Path(writer.path).read_bytes(), wire.SUPERVISOR_AT) == 123


def test_a_torn_lease_is_the_one_before(writer, segment):
    segment.lease(1000)
    before = writer.lease_until_ns()
    poke(writer.path, (wire.LEASE_AT, 7))

    assert (before, writer.lease_until_ns()) == (1000, 1000)


def test_any_number_may_read_at_once_and_none_changes_a_byte(writer):
    writer.announce(["a", "b", "c"])
    publish(writer, *range(9))
    writer.write_status({"tier": "T1"})
    Mailbox(writer).send_notice("note", "hello", 3)
    writer.write_end(0, "done")
    before = Path(writer.path).read_bytes()
    readers = [Segment.open(writer.path, lambda: 77) for _ in range(2)]

    seen = [[r.poll(limit=2) + r.poll() + r.poll()] for r in readers]
    others = [(r.beat(), r.status(), r.end(), r.acks()) for r in readers]
    for reader in readers:
        reader.close()

    assert seen[0] == seen[1]
    assert others[0] == others[1]
    assert Path(writer.path).read_bytes() == before


def test_after_close_there_is_one_clear_error(segment):
    segment.close()
    segment.close()

    for call in (segment.poll, segment.beat, segment.status, segment.end):
        with pytest.raises(SegmentError, match="cannot be read"):
            call()
    with pytest.raises(SegmentError, match="cannot be"):
        segment.write_heartbeat(1)


def test_a_live_overrun_is_counted_exactly(trainer):
    process, segment = trainer(slots=4, steps=150_000)
    account = Account()

    while process.poll() is None:
        account.take(segment.poll())
    for _ in range(10):
        account.take(segment.poll())

    assert account.next == account.frames + account.lost == 150_000
    assert account.lost > 0


@pytest.mark.parametrize(("slots", "chatty"), [(4, False), (4096, True)])
def test_what_a_killed_writer_leaves_is_true(trainer, slots, chatty):
    pick, seen = random.Random(slots), 0
    for _ in range(4):
        process, segment = trainer(slots=slots, chatty=chatty)
        time.sleep(pick.uniform(0, 0.03))
        process.kill()
        process.wait()
        account = Account()

        events = list(itertools.chain.from_iterable(segment.poll() for _ in range(10)))

        account.take(events)
        status, end, beat = segment.status(), segment.end(), segment.beat()
        seen += account.frames
        assert isinstance(events[0], Announced)
        assert status.get("step") == status.get("again")
        assert end is None or end[1] == f"step {end[0]}"
        assert beat.seen_ns // 8 >= account.next - 1 or beat.phase == "startup"
        Path(segment.path).unlink()
    assert seen > 0
