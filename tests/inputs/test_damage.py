"""Damaged, cut, foreign and odd files: one clear error or nothing, and never a lie."""

import json
import os
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervise.core.model import Frame, Notice
from supervise.errors import SegmentError
from supervise.runtime import Segment, Segments
from supervise_probe import wire
from supervise_probe.ipc.segment import Mailbox, Writer

from .conftest import poke, publish


def opened(path):
    return Segment.open(path, lambda: 77)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("sample"))
    writer = Writer.create(folder, "run-7", 0, 1, slots=4, capacity=3)
    mailbox, segment = Mailbox(writer), opened(writer.path)
    writer.announce(["a", "b"])
    writer.announce(["a", "b", "c"])
    publish(writer, *range(6))
    writer.write_status({"tier": "T1"})
    segment.send("k", "pause", {})
    mailbox.ack(mailbox.poll()[0], 3, True, {})
    mailbox.send_notice("note", "hello", 3)
    segment.lease(5)
    writer.write_end(0, "done")
    segment.close()
    writer.close()
    return Path(writer.path).read_bytes()


def use_everything(segment):
    """Call all there is, and believe no frame that was not published."""
    for _ in range(5):
        for event in segment.poll():
            if isinstance(event, Frame):
                assert event.values == (float(event.step),) * 3
    for read in (segment.beat, segment.status, segment.end, segment.acks, segment.step_ns):
        read()
    segment.write_heartbeat(1)
    segment.lease(2)
    segment.send("k", "resume", {})


PARTS = (wire.NAMES_AT, wire.NAMES_AT + wire.NAMES_SIZE)
PARTS += (wire.STATUS_AT, wire.COMMANDS_AT, wire.LETTERS_AT)
ANYWHERE = st.one_of(
    st.integers(0, wire.END_AT - 1),  # header and words
    st.integers(wire.END_AT, wire.END_AT + 64),
    *(st.integers(at, at + 200) for at in PARTS),
    st.integers(wire.HEADER_SIZE, wire.header_fields(4, 3)[-1] - 1),
    st.integers(0, wire.header_fields(4, 3)[-1] - 1),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(ANYWHERE, st.integers(1, 255)), min_size=1, max_size=4), st.booleans())
def test_damage_anywhere_is_a_segment_error_or_nothing(tmp_path_factory, sample, flips, already):
    path = tmp_path_factory.getbasetemp() / "damaged.seg"
    damaged = bytearray(sample)
    for at, mask in flips:
        damaged[at] ^= mask
    path.write_bytes(sample if already else damaged)

    try:
        segment = opened(path)
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
@given(st.integers(0, wire.header_fields(4, 3)[-1] - 1), st.booleans())
def test_a_file_cut_short_at_any_length_is_a_segment_error(tmp_path_factory, sample, size, already):
    path = tmp_path_factory.getbasetemp() / "short.seg"
    path.write_bytes(sample)
    segment = opened(path)
    os.truncate(path, size)

    if already:
        for call in (
            segment.poll,
            segment.beat,
            segment.status,
            lambda: segment.write_heartbeat(1),
        ):
            with pytest.raises(SegmentError, match=f"short.seg was cut short: {size} of"):
                call()
    else:
        with pytest.raises(SegmentError, match=r"short.seg (was cut short|holds)"):
            opened(path)
    segment.close()
    assert path.stat().st_size == size


def test_a_file_that_was_cut_and_grew_again_is_noticed(tmp_path, sample):
    path = tmp_path / "regrown.seg"
    path.write_bytes(sample)
    segment = opened(path)
    os.truncate(path, 0)
    os.truncate(path, len(sample))

    with pytest.raises(SegmentError, match="header overwritten"):
        segment.poll()
    segment.close()


def test_a_half_written_document_leaves_the_one_before_in_force(writer, segment):
    writer.announce(["a"])
    writer.announce(["a", "b"])
    writer.write_status({"n": 1})
    writer.write_status({"n": 2})
    segment.poll()
    assert segment.status() == {"n": 2}
    poke(writer.path, (wire.NAMES_AT + 20, b"\xff"), (wire.STATUS_AT + 20, b"\xff"))
    poke(writer.path, (wire.NAMES_GENERATION_AT, 99), (wire.STATUS_GENERATION_AT, 99))

    assert segment.poll() == []
    assert segment.status() == {"n": 2}
    other = opened(writer.path)
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
        (b"%PDF-1.7" + bytes(200_000), "is not a probe segment: it starts with b'%PDF-1.7'"),
        (wire.MAGIC + b"\2\0\0\0" + bytes(200_000), "has wire version 2, .* reads version 1"),
        (wire.MAGIC + b"\1\0\0\0" + bytes(200_000), "has a damaged header"),
        (lambda path: None, "No such file"),
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("/dev/null"), "cannot be opened"),
    ],
)
def test_what_is_no_segment_of_ours_is_named_and_does_not_block(tmp_path, content, message):
    path = tmp_path / "rank-0.1.seg"
    path.write_bytes(content) if isinstance(content, bytes) else content(path)

    with pytest.raises(SegmentError, match=rf"^segment rank-0\.1\.seg .*{message}"):
        opened(path)


# ── what no probe writes is refused before it becomes an event: under good checksums too ──────────


NOW = 10**9


@pytest.fixture
def late(writer):
    segment = Segment.open(writer.path, lambda: NOW)
    yield segment
    segment.close()


def forge(path, slot, **changed):
    """Change fields of a frame, and seal it again."""
    at, size = wire.HEADER_SIZE + slot * wire.header_fields(4, 3)[2], wire.header_fields(4, 3)[2]
    names = ("crc", "count", "seq", "step", "attempt", "flags", "at_ns", "low", "high")
    raw = bytearray(Path(path).read_bytes()[at : at + size])
    fields = dict(zip(names, wire.SLOT_HEAD.unpack_from(raw), strict=True)) | changed
    wire.SLOT_HEAD.pack_into(raw, 0, *fields.values())
    end = wire.SLOT_HEAD.size + 8 * fields["count"]
    struct.pack_into("<I", raw, 0, zlib.crc32(raw[4:end], fields["seq"]))
    poke(path, (at, bytes(raw)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", 1 << 53),
        ("attempt", 1 << 31),
        ("at_ns", NOW + 3601 * 10**9),
    ],
)
def test_a_frame_out_of_range_is_a_fault_of_the_segment(writer, late, field, value):
    writer.announce(["a", "b", "c"])
    publish(writer, *range(3))
    forge(writer.path, 1, **{field: value})

    assert [event.step for event in late.poll() if isinstance(event, Frame)] == [0]
    with pytest.raises(SegmentError, match=f"out of range: {field} {value}"):
        late.poll()


@pytest.mark.parametrize(
    ("name", "at", "form", "value"),
    [
        ("rank", 96, "<I", 1 << 24),
        ("world_size", 100, "<I", (1 << 32) - 1),
        ("pid", 72, "<Q", 1 << 31),
        ("created_ns", 88, "<Q", 1 << 63),
    ],
)
def test_a_header_out_of_range_is_a_fault_of_the_segment(
    tmp_path, shm, writer, name, at, form, value
):
    raw = bytearray(Path(writer.path).read_bytes())
    struct.pack_into(form, raw, at, value)
    struct.pack_into("<I", raw, wire.FIXED_SIZE - 4, zlib.crc32(raw[: wire.FIXED_SIZE - 4]))
    (shm / "rank-0.4242.seg").write_bytes(raw)
    segments = Segments(shm, shm, lambda: NOW)

    (told,) = segments.poll()

    assert isinstance(told, Notice)
    assert (told.kind, segments.poll()) == ("segment-fault", [])
    assert f"out of range: {name} {value}" in told.message
    segments.close()


NOTICE = {"notice": "note", "message": "m", "step": 3, "frame": 4, "data": {}}
SAVED = {"path": "/c", "file": {"size": 1, "mtime_ns": 2, "inode": 3, "device": 4}}


@pytest.mark.parametrize(
    "raw",
    [
        *(b"[]", b"null", b"{", b"\xff\xfe", b"[" * 1000),
        *(json.dumps({k: v for k, v in NOTICE.items() if k != key}).encode() for key in NOTICE),
        *(
            json.dumps({**NOTICE, **changed}).encode()
            for changed in (
                {"extra": 1},
                *({"step": step} for step in ("3", True, 1 << 53, -2)),
                *({"message": message} for message in (None, "\ud800")),
                *({"data": data} for data in ([], {"\udc00": 1})),
                {"data": {"a": 10**30}},
                {"data": {"a": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}},
                *({"frame": frame} for frame in (-1, 2**53, None)),
                *({"notice": kind} for kind in ("checkpoint", "signal", "segment-fault")),
                {"notice": "continuity", "data": {"ok": False, "loss": {"was": "x", "is": 1.0}}},
                {"notice": "checkpoint-saved", "data": {**SAVED, "file": {"size": 1}}},
                {"notice": "checkpoint-saved", "data": {**SAVED, "seconds": [1]}},
                {"notice": "drill", "data": {"fault": "nan", "refused": True}},
            )
        ),
        *(
            json.dumps(
                {"ack": "k", "verb": verb, "step": 3, "ok": True, "error": None, "result": result}
            ).encode()
            for verb, result in (
                ("rollback", {"attempt": "1", "step": 0}),
                ("loss_scale", {}),
                ("clip", {}),
                ("pause", {"ack_step": "x"}),
            )
        ),
    ],
)
def test_a_letter_of_another_shape_is_refused(writer, segment, raw):
    writer.post(raw)

    (told,) = segment.poll()

    assert (told.kind, told.data) == ("note", {})
    assert told.message == "1 letters from the probe of rank 2 were lost or unreadable"
    assert segment.acks() == []


def test_every_kind_that_the_supervisor_reads_passes_without_its_detail(writer, segment):
    """Limits must not cost a notice whose detail was left out for its size, or is not finite."""
    kinds = ["checkpoint-saved", "continuity", "measurement-changed", "collector-off", "drill"]
    kinds += ["training-ended", "weights-restored", "resume-refused"]
    for kind in kinds:
        for data in ({"left_out": "takes 2000 bytes"}, {}):
            writer.post(json.dumps({**NOTICE, "notice": kind, "data": data}).encode())
    continuity = {"ok": False, "loss": {"was": 2.0, "is": float("nan")}, "lr": {"was": None}}
    writer.post(json.dumps({**NOTICE, "notice": "continuity", "data": continuity}).encode())

    passed = [event.kind for event in segment.poll()]
    assert passed == [*(kind for kind in kinds for _ in range(2)), "continuity"]


def test_a_status_that_nobody_could_write_down_is_not_taken(writer, segment):
    writer.write_status({"n": 1})
    assert segment.status() == {"n": 1}
    deep = b'{"a":' * 300 + b"1" + b"}" * 300
    status = (wire.STATUS_AT, wire.pack_letter(2, deep))
    poke(writer.path, status, (wire.STATUS_GENERATION_AT, 2))

    assert segment.status() == {"n": 1}
