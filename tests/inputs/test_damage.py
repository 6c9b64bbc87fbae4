"""Damaged, cut, foreign and odd files: one clear error or nothing, and never a lie."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervise.core.model import Frame
from supervise.errors import SegmentError
from supervise.runtime import Segment
from supervise_probe import wire
from supervise_probe.ipc.segment import Mailbox, Writer

from .conftest import poke, publish


def ticker():
    return 77


def write_sample(directory):
    """Write a segment with something in every part of it; return its bytes."""
    writer = Writer.create(str(directory), "run-7", 0, 1, slots=4, capacity=3)
    mailbox = Mailbox(writer)
    segment = Segment.open(writer.path, ticker)
    writer.announce(["a", "b"])
    writer.announce(["a", "b", "c"])
    publish(writer, *range(6))
    writer.status({"tier": "T1"})
    segment.send("k", "pause", {})
    mailbox.ack(mailbox.poll()[0], 3, True, {})
    mailbox.notice("note", "hello", 3)
    segment.lease(5)
    writer.last_words(0, "done")
    segment.close()
    writer.close()
    raw = Path(writer.path).read_bytes()
    Path(writer.path).unlink()
    return raw


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The bytes of a whole segment."""
    return write_sample(tmp_path_factory.mktemp("sample"))


def use_everything(segment):
    """Call all there is, and believe no frame that was not published."""
    for _ in range(5):
        for event in segment.poll():
            if isinstance(event, Frame):
                assert event.values == (float(event.step),) * 3
    segment.beat()
    segment.status()
    segment.end()
    segment.acks()
    segment.step_ns()
    segment.stamp(1)
    segment.lease(2)
    segment.send("k", "resume", {})


ANYWHERE = st.one_of(
    st.integers(0, wire.END_AT - 1),  # header and words
    st.integers(wire.END_AT, wire.END_AT + 64),
    *(
        st.integers(at, at + 100)
        for at in (wire.NAMES_AT, wire.NAMES_AT + wire.NAMES_SIZE, wire.STATUS_AT)
    ),
    *(st.integers(at, at + 200) for at in (wire.COMMANDS_AT, wire.LETTERS_AT)),
    st.integers(wire.HEADER_SIZE, wire.layout(4, 3)[-1] - 1),
    st.integers(0, wire.layout(4, 3)[-1] - 1),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(ANYWHERE, st.integers(1, 255)), min_size=1, max_size=4), st.booleans())
def test_damage_anywhere_is_a_segment_error_or_nothing(tmp_path_factory, sample, flips, already):
    """Any bytes changed, before or after the file was opened: never another error, never a lie."""
    path = tmp_path_factory.getbasetemp() / "damaged.seg"
    damaged = bytearray(sample)
    for at, mask in flips:
        damaged[at] ^= mask
    path.write_bytes(sample if already else damaged)

    try:
        segment = Segment.open(path, ticker)
    except SegmentError as error:
        assert "damaged.seg" in str(error)
        return
    try:
        if already:
            segment.poll(limit=1)
            path.write_bytes(damaged)
        use_everything(segment)
    except SegmentError as error:
        assert "damaged.seg" in str(error)
    finally:
        segment.close()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, wire.layout(4, 3)[-1] - 1), st.booleans())
def test_a_file_cut_short_at_any_length_is_a_segment_error(tmp_path_factory, sample, size, already):
    path = tmp_path_factory.getbasetemp() / "short.seg"
    path.write_bytes(sample)
    segment = Segment.open(path, ticker)
    os.truncate(path, size)

    if already:
        for call in (segment.poll, segment.beat, segment.status, lambda: segment.stamp(1)):
            with pytest.raises(SegmentError, match=f"short.seg was cut short: {size} of"):
                call()
    else:
        with pytest.raises(SegmentError, match=r"short.seg (was cut short|holds)"):
            Segment.open(path, ticker)
    segment.close()
    assert path.stat().st_size == size


def test_a_file_that_was_cut_and_grew_again_is_noticed(tmp_path, sample):
    path = tmp_path / "regrown.seg"
    path.write_bytes(sample)
    segment = Segment.open(path, ticker)
    os.truncate(path, 0)
    os.truncate(path, len(sample))

    with pytest.raises(SegmentError, match="header overwritten"):
        segment.poll()
    segment.close()


def test_a_half_written_document_leaves_the_one_before_in_force(writer, segment):
    """Names and status never go back, wherever a rewrite was cut off."""
    writer.announce(["a"])
    writer.announce(["a", "b"])
    writer.status({"n": 1})
    writer.status({"n": 2})
    segment.poll()
    assert segment.status() == {"n": 2}
    poke(writer.path, (wire.NAMES_AT + 20, b"\xff"), (wire.STATUS_AT + 20, b"\xff"))
    poke(writer.path, (wire.NAMES_GENERATION_AT, 99), (wire.STATUS_GENERATION_AT, 99))

    assert segment.poll() == []
    assert segment.status() == {"n": 2}
    other = Segment.open(writer.path, ticker)
    assert [event.names for event in other.poll()] == [("a",)]
    assert other.status() == {"n": 1}
    other.close()


def test_a_damaged_table_of_names_is_an_error_once_a_frame_needs_it(writer, segment):
    writer.announce(["a", "b", "c"])
    publish(writer, 0, 1)
    poke(writer.path, (wire.NAMES_AT + wire.NAMES_SIZE + 20, b"\xff"))

    assert [segment.poll() for _ in range(wire.PATIENCE)] == [[]] * wire.PATIENCE
    with pytest.raises(SegmentError, match="table of names is damaged"):
        segment.poll()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds 0 bytes"),
        (b"SUPVSEG1", "holds 8 bytes"),
        (b"%PDF-1.7" + bytes(200_000), "is not a probe segment: it starts with b'%PDF-1.7'"),
        (bytes(200_000), "is not a probe segment"),
        (wire.MAGIC + b"\0\0\0\0" + bytes(200_000), "has wire version 0, .* reads version 1"),
        (wire.MAGIC + b"\2\0\0\0" + bytes(200_000), "has wire version 2, .* reads version 1"),
        (wire.MAGIC + b"\1\0\0\0" + bytes(200_000), "has a damaged header"),
    ],
)
def test_what_is_no_segment_of_ours_is_named(tmp_path, content, message):
    path = tmp_path / "rank-0.1.seg"
    path.write_bytes(content)

    with pytest.raises(SegmentError, match=rf"^segment rank-0\.1\.seg {message}"):
        Segment.open(path, ticker)


def test_odd_files_neither_block_nor_mislead(tmp_path, writer):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(writer.path)

    for name, message in [
        ("pipe", "not a regular file"),
        ("folder", "Is a directory"),
        ("link", "cannot be opened"),
        ("nothing", "No such file"),
    ]:
        with pytest.raises(SegmentError, match=message):
            Segment.open(tmp_path / name, ticker)
