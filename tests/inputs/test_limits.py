"""What no probe writes is refused before it becomes an event: under good checksums too."""

import json
import struct
import zlib
from pathlib import Path

import pytest

from supervise.core.model import Frame, Notice
from supervise.errors import SegmentError
from supervise.runtime import Segment, Segments
from supervise_probe import wire

from .conftest import poke, publish

NOW = 10**9


@pytest.fixture
def late(writer):
    """A reader whose clock is behind the frames of the tests."""
    segment = Segment.open(writer.path, lambda: NOW)
    yield segment
    segment.close()


def forge(path, slot, **changed):
    """Change fields of a frame, and seal it again."""
    at, size = wire.HEADER_SIZE + slot * wire.layout(4, 3)[2], wire.layout(4, 3)[2]
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
        ("step", (1 << 64) - 1),
        ("attempt", 1 << 31),
        ("at_ns", NOW + 3601 * 10**9),
        ("at_ns", (1 << 64) - 1),
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
    """One notice, and nothing of it is read."""
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
        b"[]",
        b"null",
        b"3",
        b'"note"',
        b"{",
        b"\xff\xfe",
        b"{" * 900,
        b"[" * 1000,
        *(json.dumps({k: v for k, v in NOTICE.items() if k != key}).encode() for key in NOTICE),
        *(
            json.dumps({**NOTICE, **changed}).encode()
            for changed in (
                {"extra": 1},
                {"step": "3"},
                {"step": True},
                {"step": 1.0},
                {"step": 1 << 53},
                {"step": -2},
                {"message": None},
                {"message": "\ud800"},
                {"data": []},
                {"data": {"\udc00": 1}},
                {"data": {"a": 10**30}},
                {"data": {"a": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}},
                *({"frame": frame} for frame in (-1, 2**53, None)),
                *({"notice": kind} for kind in ("checkpoint", "signal", "segment-fault")),
                {"notice": "continuity", "data": {"ok": False, "loss": {"was": "x", "is": 1.0}}},
                {"notice": "continuity", "data": {"ok": False, "loss": 3}},
                {"notice": "checkpoint-saved", "data": {**SAVED, "file": {"size": 1}}},
                {"notice": "checkpoint-saved", "data": {**SAVED, "attempt": "0"}},
                {"notice": "checkpoint-saved", "data": {**SAVED, "seconds": [1]}},
            )
        ),
        *(
            json.dumps(
                {"ack": "k", "verb": verb, "step": 3, "ok": True, "error": None, "result": result}
            ).encode()
            for verb, result in (
                ("rollback", {}),
                ("rollback", {"attempt": "1", "step": 0}),
                ("loss_scale", {}),
                ("loss_scale", {"loss_scale": None}),
                ("clip", {}),
                ("pause", {"ack_step": "x"}),
            )
        ),
    ],
)
def test_a_letter_of_another_shape_is_refused(writer, segment, raw):
    """It is counted, so that people hear of it; nothing of it is journaled or acted on."""
    writer.post(raw)

    (told,) = segment.poll()

    assert (told.kind, told.data) == ("note", {})
    assert told.message == "1 letters from the probe of rank 2 were lost or unreadable"
    assert segment.acks() == []


def test_every_kind_that_the_supervisor_reads_passes_as_the_probe_writes_it(writer, segment):
    """Limits must not cost a sound notice, or one whose detail was left out for its size."""
    sound = {
        "checkpoint-saved": SAVED
        | {"step": 8, "seconds": 0.1, "attempt": 0, "how": "torch.save", "ranks": 1}
        | {"python": None, "probe_batch": {"why": "x"}},
        "continuity": {
            "step": 9,
            "fingerprint": "same",
            "loss": {"was": 2.0, "is": float("nan")},
            "lr": {"was": None, "is": 0.1},
            "ok": False,
            "probe_batch": {"verdict": "equal"},
        },
        "measurement-changed": {"metrics": ["update_norm"]},
        "collector-off": {"metrics": ["grad_global_norm"]},
        "training-ended": {"done": 20, "total": 160, "stopped": False},
        "weights-restored": {"attempt": 1, "to": 7},
        "resume-refused": {"how": "library", "path": "/c"},
    }
    for kind, data in sound.items():
        for each in (data, {"left_out": "takes 2000 bytes"}, {}):
            writer.post(json.dumps({**NOTICE, "notice": kind, "data": each}).encode())

    assert [event.kind for event in segment.poll()] == [kind for kind in sound for _ in range(3)]


def test_a_status_that_nobody_could_write_down_is_not_taken(writer, segment):
    writer.status({"n": 1})
    assert segment.status() == {"n": 1}
    deep = b'{"a":' * 300 + b"1" + b"}" * 300
    status = (wire.STATUS_AT, wire.pack_letter(2, deep))
    poke(writer.path, status, (wire.STATUS_GENERATION_AT, 2))

    assert segment.status() == {"n": 1}
