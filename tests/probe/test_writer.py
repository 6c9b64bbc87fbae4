"""The writer: cheap, safe on a full /dev/shm, inert after a fork, precise about what it refuses."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from supervise.runtime import Segment
from supervise_probe import wire
from supervise_probe.ipc.segment import Writer

NAMES = ["loss", "norm", "lr"]


@pytest.fixture
def writer(tmp_path):
    """A writer with a ring of eight slots of four values."""
    writer = Writer.create(str(tmp_path), "run-7", 0, 1, slots=8, capacity=4)
    yield writer
    writer.close()


def read(writer: Writer) -> list[object]:
    segment = Segment.open(writer.path, lambda: 5)
    try:
        return segment.poll()
    finally:
        segment.close()


def frames(writer: Writer) -> list[tuple[float | None, ...]]:
    return [event.values for event in read(writer) if type(event).__name__ == "Frame"]


def write_all(writer: Writer) -> None:
    """Use all that a writer has, as hooks do that know nothing of its end."""
    writer.announce([*NAMES, "late"])
    writer.publish(1, 0, [7.0, 7.0, 7.0], 20)
    writer.write_heartbeat(99, 1)
    writer.write_status({"tier": "child"})
    writer.post(b"{}")
    writer.write_end(1, "child")


def test_the_file_is_private_complete_and_alone(tmp_path):
    """Mode 0600 under any umask, fully allocated, named by rank and pid, nothing else beside it."""
    before = os.umask(0o277)
    try:
        writer = Writer.create(str(tmp_path), "run-7", 3, 8, slots=16, capacity=4)
    finally:
        os.umask(before)

    info = Path(writer.path).stat()
    assert [entry.name for entry in tmp_path.iterdir()] == [f"rank-3.{os.getpid()}.seg"]
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_size == wire.header_fields(16, 4)[-1]
    assert info.st_blocks * 512 >= info.st_size
    writer.close()


@pytest.mark.parametrize(
    "bad",
    [
        {"slots": 1},
        {"capacity": 129},
        {"run": "x" * 65},
        {"rank": -1},
        {"rank": 1 << 32},
        {"world_size": 1 << 32},
    ],
)
def test_sizes_without_room_in_the_layout_leave_nothing_behind(tmp_path, bad):
    wanted = {"directory": str(tmp_path), "run": "r", "rank": 0, "world_size": 1, **bad}

    with pytest.raises(wire.WireError):
        Writer.create(**wanted)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b", "c", "d", "e"], "room for 4"),
        (["x", "loss"], "behind those announced before"),
        (["loss", "x" * 20_000], "room for"),
    ],
)
def test_names_that_cannot_be_are_refused_and_change_nothing(writer, names, message):
    writer.announce(["loss"])

    with pytest.raises(wire.WireError, match=message):
        writer.announce(names)

    writer.publish(0, 0, [1.0], 10)
    assert frames(writer) == [(1.0,)]


@pytest.mark.parametrize(
    "values", [[1.0], [1.0, 2.0, 3.0, 4.0], [1.0, "2", 3.0], [1.0, None, 10**400], [None, "2", 1.0]]
)
def test_values_that_cannot_be_published_publish_nothing(writer, values):
    writer.announce(NAMES)

    with pytest.raises(wire.WireError):
        writer.publish(0, 0, values, 10)

    assert frames(writer) == []
    writer.publish(0, 0, [1.0, 2.0, 3.0], 10)
    assert frames(writer) == [(1.0, 2.0, 3.0)]


def test_a_forked_child_is_inert(tmp_path, writer):
    """Data workers inherit the writer: theirs writes nothing, closes safely, and never raises."""
    writer.announce(NAMES)
    writer.publish(0, 0, [1.0, 2.0, 3.0], 10)
    before = Path(writer.path).read_bytes()

    child = os.fork()
    if child == 0:
        code = 1
        try:
            write_all(writer)
            code = int((writer.commands_head(), writer.lease_until_ns()) != (0, 0))
            writer.close()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert Path(writer.path).read_bytes() == before
    writer.publish(1, 0, [4.0, 5.0, 6.0], 20)
    assert frames(writer) == [(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)]


def test_after_close_every_call_is_a_no_op(writer):
    """Hooks may still run while the interpreter ends."""
    writer.announce(NAMES)
    writer.close()
    writer.close()

    write_all(writer)
    assert (writer.commands_head(), writer.lease_until_ns()) == (0, 0)
    assert frames(writer) == []


def test_a_long_status_is_clipped_and_a_wrong_one_refused(writer):
    """It must fit; a clipped list says how much is missing. One that is no JSON changes nothing."""
    segment = Segment.open(writer.path, lambda: 5)
    writer.write_status({"tier": "T1", "savepoints": list(range(5000)), "why": "x" * 9000})
    seen = segment.status()

    assert seen["tier"] == "T1"
    assert seen["savepoints"][-1] == "… 4984 more"
    assert seen["why"].endswith("…")
    with pytest.raises(wire.WireError, match="JSON"):
        writer.write_status({(1, 2): 3})
    with pytest.raises(wire.WireError, match="room for"):
        writer.write_status({f"key{i}": i for i in range(1000)})
    assert segment.status() == seen
    segment.close()


@pytest.mark.parametrize(
    ("code", "text", "seen"),
    [
        (0, "", (0, "")),
        (None, "killed", (None, "killed")),
        (-9, "ValueError: \udcff \0 ünï", (-9, "ValueError: ? \0 ünï")),
        (1, "é" * 4000, (1, "é" * 512)),
    ],
)
def test_last_words_always_fit(writer, code, text, seen):
    segment = Segment.open(writer.path, lambda: 5)
    assert segment.end() is None

    writer.write_end(None, "first")
    writer.write_end(code, text)

    assert segment.end() == seen
    segment.close()
