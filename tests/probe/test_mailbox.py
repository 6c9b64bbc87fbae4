"""Letters both ways: each order is handed out once, and answered as often as it is asked."""

from __future__ import annotations

import json
import os

import pytest

from supervise.errors import SegmentError
from supervise.runtime import Ack, Segment
from supervise_probe import wire
from supervise_probe.ipc.segment import KEPT_KEYS, Mailbox, Writer


@pytest.fixture
def writer(tmp_path):
    """A writer with a small ring."""
    writer = Writer.create(str(tmp_path), "run-7", 2, 4, slots=8, capacity=4)
    yield writer
    writer.close()


@pytest.fixture
def mailbox(writer):
    """The probe's end."""
    return Mailbox(writer)


@pytest.fixture
def segment(writer):
    """The supervisor's end."""
    segment = Segment.open(writer.path, lambda: 77)
    yield segment
    segment.close()


def answers(segment: Segment) -> list[Ack]:
    segment.poll()
    return segment.acks()


def test_a_new_supervisor_goes_on_where_the_old_one_died(writer, mailbox, segment):
    """Also when it died between the letter and the count: nothing is lost, skipped or repeated."""
    segment.send("a", "pause", {})
    assert [command.key for command in mailbox.poll()] == ["a"]
    segment.send("b", "resume", {})
    fd = os.open(writer.path, os.O_RDWR)
    os.pwrite(fd, (1).to_bytes(8, "little"), wire.COMMANDS_HEAD_AT)
    os.close(fd)

    heir = Segment.open(writer.path, lambda: 78)
    heir.send("c", "savepoint", {})

    assert [command.key for command in mailbox.poll()] == ["b", "c"]
    assert mailbox.bad == 0
    heir.close()


def test_orders_beyond_the_ring_are_counted(mailbox, segment):
    """A job that hangs while 100 orders come reads the newest 64 and knows of the other 36."""
    for number in range(100):
        segment.send(f"k{number}", "savepoint", {})

    handed_out = [command.key for _ in range(3) for command in mailbox.poll()]

    assert handed_out == [f"k{number}" for number in range(36, 100)]
    assert mailbox.bad == 36


@pytest.mark.parametrize(
    "payload", [b"nonsense", b"{}", b"[" * 900, b'{"key":"k","verb":"v","args":[]}']
)
def test_an_order_that_cannot_be_read_is_skipped_and_counted(writer, mailbox, segment, payload):
    """It neither raises nor stops the orders behind it."""
    fd = os.open(writer.path, os.O_RDWR)
    os.pwrite(fd, wire.pack_letter(0, payload), wire.COMMANDS_AT)
    os.close(fd)
    segment.send("good", "savepoint", {})

    assert [command.key for command in mailbox.poll()] == ["good"]
    assert mailbox.bad == 1


def test_a_half_written_order_is_waited_for_then_given_up(writer, mailbox, segment):
    segment.send("torn", "savepoint", {})
    segment.send("good", "savepoint", {})
    fd = os.open(writer.path, os.O_RDWR)
    os.pwrite(fd, b"\xff", wire.COMMANDS_AT + 20)
    os.close(fd)

    handed_out = [[command.key for command in mailbox.poll()] for _ in range(wire.PATIENCE)]

    assert handed_out == [[], [], ["good"]]
    assert mailbox.bad == 1


def test_a_command_that_does_not_fit_is_an_error_here(segment, mailbox):
    """The supervisor hears of it at once; nothing is sent."""
    with pytest.raises(SegmentError, match=r"command snapshot takes \d+ bytes"):
        segment.send("k", "snapshot", {"directory": "x" * 2000})

    assert mailbox.poll() == []


@pytest.mark.parametrize(
    "result",
    [
        {"not_restored": [f"loader.dataset.cache[{i}]" for i in range(500)]},
        {(1, 2): "no JSON key"},
        {"model": {"nested": ["y" * 400] * 40}},
    ],
)
def test_an_answer_always_arrives(mailbox, segment, result):
    key = "inc-20310405-1/" + "k" * 120
    segment.send(key, "rollback", {})

    mailbox.ack(mailbox.poll()[0], 9, False, result, "because " * 500)

    (ack,) = answers(segment)
    assert (ack.key, ack.verb, ack.step, ack.ok) == (key, "rollback", 9, False)
    assert ack.error is not None
    assert ack.error.startswith("because")
    assert len(ack.result) == 1


@pytest.mark.parametrize(
    "letter",
    [
        [],
        {"notice": "note", "message": "m", "step": 1, "frame": 0},
        {"ack": "k", "verb": "v", "step": 7, "ok": True, "result": {}, "error": None, "more": 1},
    ],
)
def test_a_letter_of_the_wrong_shape_is_one_note(writer, segment, letter):
    """Garbage behind a good checksum is counted, not raised and not believed."""
    writer.post(json.dumps(letter).encode())

    (note,) = segment.poll()

    assert note.kind == "note"
    assert "1 letters from the probe of rank 2" in note.message
    assert segment.acks() == []


def test_a_notice_stands_between_the_frames_it_came_between(writer, mailbox, segment):
    """Read in one poll, with steps that go back: what explains a frame is judged before it."""
    writer.announce(["train_loss_raw"])
    for step, attempt in ((7, 0), (8, 0), (5, 1), (6, 1)):
        if attempt and step == 5:
            mailbox.send_notice("resume-refused", "the job does not resume", step)
        writer.publish(step, attempt, [1.0], 10 + step)
    mailbox.send_notice("note", "at the end", 7)

    steps = [(type(event).__name__, event.step) for event in segment.poll()[1:]]

    frames = [("Frame", step) for step in (7, 8, 5, 6)]
    assert steps == [*frames[:2], ("Notice", 5), *frames[2:], ("Notice", 7)]


def test_the_memory_of_keys_is_bounded(mailbox, segment):
    total = KEPT_KEYS + 70
    for number in range(total):
        segment.send(f"k{number}", "savepoint", {})
        for command in mailbox.poll():
            mailbox.ack(command, number, True, {}, None)
        segment.poll()
    segment.acks()

    for number in range(total - wire.LETTER_SLOTS, total):
        segment.send(f"k{number}", "savepoint", {})
    assert mailbox.poll() == []
    assert len(answers(segment)) == wire.LETTER_SLOTS
    segment.send("k0", "savepoint", {})
    assert [command.key for command in mailbox.poll()] == ["k0"]


@pytest.mark.parametrize("read_by", ["nobody", "the probe", "the probe, which answered"])
def test_an_order_of_a_dead_supervisor_is_carried_out_once(writer, mailbox, read_by):
    """The next one sends it again, whatever had become of it; there is one effect, one answer."""
    done = []

    def carry_out() -> list:
        found = mailbox.poll()
        done.extend(command.key for command in found)
        return found

    dead = Segment.open(writer.path, lambda: 1)
    dead.send("inc-1/2-rollback", "rollback", {"before_step": 62, "until_ns": 5})
    dead.close()
    begun = carry_out() if read_by != "nobody" else []
    if read_by == "the probe, which answered":
        mailbox.ack(begun.pop(), 70, True, {"step": 60, "attempt": 1})

    heir = Segment.open(writer.path, lambda: 2)
    heir.send("inc-1/2-rollback", "rollback", {"before_step": 62, "until_ns": 9})
    for command in [*begun, *carry_out()]:
        mailbox.ack(command, 70, True, {"step": 60, "attempt": 1})
    seen = answers(heir)
    heir.close()

    assert done == ["inc-1/2-rollback"]
    assert {(ack.key, ack.step, ack.ok) for ack in seen} == {("inc-1/2-rollback", 70, True)}
