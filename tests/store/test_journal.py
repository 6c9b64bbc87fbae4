import math
import os
import struct
import subprocess
import sys
from typing import get_args

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from supervise.core.model import (
    Announced,
    Beat,
    Event,
    Exited,
    Finished,
    Frame,
    Gap,
    LateFrame,
    Launched,
    Notice,
    OperatorCommand,
    PartChanges,
    PolicyChanges,
    Reloaded,
    Tick,
)
from supervise.errors import StoreError
from supervise.store import Journal, pack_event, read_journal, unpack_event

from .conftest import file_limit

STEPS = [Frame(100 + i, 0, 0, i, (1.5 * i, None, 0.0)) for i in range(8)]


def write(path, events, **more):
    journal = Journal.open(path, **more)
    numbers = [journal.append(event) for event in events]
    journal.close()
    return numbers


def write_steps(path):
    """Write frames of one size; return their segment, its bytes, and the size of a frame."""
    write(path, STEPS)
    segment = path / "00000.jrn"
    whole = segment.read_bytes()
    return segment, whole, (len(whole) - 16) // len(STEPS)


NUMBER = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(0, 2**32 - 1)
TEXT = st.text(max_size=20)
JSON = st.dictionaries(TEXT, st.none() | st.floats(allow_nan=False) | TEXT | NUMBER, max_size=4)
VALUES = st.lists(st.none() | st.floats(allow_nan=False), max_size=70).map(tuple)
PART = st.builds(PartChanges, st.lists(TEXT, min_size=1, max_size=2))
CHANGES = st.builds(PolicyChanges, rules=PART) | st.just(PolicyChanges())
EVENTS = st.one_of(
    st.builds(Frame, NUMBER, SMALL, SMALL, NUMBER, VALUES),
    st.builds(
        LateFrame,
        NUMBER,
        st.sampled_from(["checkpoint", "savepoint", "build"]),
        SMALL,
        NUMBER,
        st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=4),
    ),
    st.builds(Launched, NUMBER, NUMBER, NUMBER),
    st.builds(Announced, NUMBER, NUMBER, NUMBER, NUMBER, st.lists(TEXT).map(tuple)),
    st.builds(Gap, NUMBER, NUMBER, NUMBER, NUMBER),
    st.builds(Tick, NUMBER, st.lists(st.builds(Beat, NUMBER, NUMBER, TEXT), max_size=3).map(tuple)),
    st.builds(Notice, NUMBER, TEXT, TEXT, st.none() | NUMBER, st.none() | NUMBER, JSON),
    st.builds(Finished, NUMBER, TEXT, st.booleans(), JSON, st.none() | TEXT),
    st.builds(OperatorCommand, NUMBER, TEXT, TEXT, JSON),
    st.builds(Exited, NUMBER, NUMBER),
    st.builds(Reloaded, NUMBER, TEXT, TEXT, TEXT, TEXT, TEXT, CHANGES, st.none() | TEXT),
)


@settings(max_examples=40, deadline=None)
@given(events=st.lists(EVENTS, max_size=10), segment_bytes=st.sampled_from([1, 300, 1 << 20]))
def test_every_event_comes_back_as_it_was(tmp_path_factory, events, segment_bytes):
    path = tmp_path_factory.mktemp("run") / "journal"

    numbers = write(path, events, segment_bytes=segment_bytes)

    assert numbers == list(range(len(events)))
    assert list(read_journal(path)) == list(enumerate(events))


@pytest.mark.parametrize("kind", get_args(Event))
def test_every_kind_of_event_has_a_number_on_disk(kind):
    """A new event type must not be forgotten there."""
    event = find(st.builds(kind), lambda event: True, settings=settings(phases=[Phase.generate]))

    assert unpack_event(*pack_event(event)) == event


@given(bits=st.integers(0, 2**64 - 1))
def test_a_float_comes_back_bit_by_bit(bits):
    """All 64 bits: subnormal, minus zero, infinite; a NaN stays a NaN, apart from absent."""
    (value,) = struct.unpack("<d", struct.pack("<Q", bits))

    frame = unpack_event(*pack_event(Frame(1, 2, 3, 4, (None, value))))

    assert isinstance(frame, Frame)
    absent, back = frame.values
    assert absent is None and back is not None
    assert struct.pack("<d", back) == struct.pack("<d", value) or math.isnan(value)
    assert math.isnan(back) == math.isnan(value)
    ack = unpack_event(*pack_event(Finished(1, "a", True, {"x": value})))
    assert isinstance(ack, Finished)
    assert ack.result["x"] == value or (math.isnan(value) and math.isnan(ack.result["x"]))


def test_a_journal_cut_anywhere_ends_at_its_last_whole_event(tmp_path):
    segment, whole, size = write_steps(tmp_path / "j")

    for cut in range(16, len(whole), 3):
        for tail in (b"", bytes(50)):
            segment.write_bytes(whole[:cut] + tail)
            good = (cut - 16) // size
            events = list(read_journal(tmp_path / "j"))
            # the zeros may just complete the record: its last value is 0.0
            assert events[:good] == list(enumerate(STEPS[:good])), cut
            assert len(events) - good in (0, 1 if tail else 0)

        assert write(tmp_path / "j", [Exited(1, 0)]) == [len(events)]
        assert [event for _, event in read_journal(tmp_path / "j")][len(events) :] == [Exited(1, 0)]


def test_damage_before_the_tail_is_an_error_that_names_the_event(tmp_path):
    """Only the last event may be taken for a torn tail; nothing wrong is ever returned."""
    segment, whole, size = write_steps(tmp_path / "j")

    for at in range(16, len(whole)):
        segment.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        bad = (at - 16) // size
        seen = []
        if bad == len(STEPS) - 1:
            seen.extend(read_journal(tmp_path / "j"))
        else:
            with pytest.raises(StoreError, match=f"event {bad} in .* is damaged"):
                seen.extend(read_journal(tmp_path / "j"))
            with pytest.raises(StoreError, match=f"event {bad} in .* is damaged"):
                Journal.open(tmp_path / "j")
        assert seen == list(enumerate(STEPS[:bad]))


def test_a_dropped_event_and_a_lost_segment_are_told(tmp_path):
    segment, whole, size = write_steps(tmp_path / "j")
    segment.write_bytes(whole[: 16 + size] + whole[16 + 2 * size :])
    with pytest.raises(StoreError, match="event 1 in"):
        list(read_journal(tmp_path / "j"))

    write(tmp_path / "k", STEPS, segment_bytes=100)
    (tmp_path / "k" / "00001.jrn").unlink()
    with pytest.raises(StoreError, match=r"00002.jrn starts with event \d, not with event \d"):
        list(read_journal(tmp_path / "k"))


def test_a_segment_begins_when_the_one_before_is_on_disk(tmp_path, monkeypatch):
    """Else a power cut in between leaves a gap behind which nothing is read."""
    directory, sync, begun = tmp_path / "j", os.fdatasync, []

    def synced(fd):
        begun.append((directory / "00001.jrn").exists())
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", synced)
    write(directory, STEPS, segment_bytes=300)
    assert (directory / "00001.jrn").exists()
    assert begun and not begun[0]


@pytest.mark.parametrize("lost", [1, 50, 90])
def test_a_gap_before_an_empty_segment_is_a_truncated_tail(tmp_path, lost):
    segment, whole, size = write_steps(tmp_path / "j")
    segment.write_bytes(whole[:-lost])
    left = (len(whole) - lost - 16) // size
    empty = tmp_path / "j" / "00001.jrn"
    empty.write_bytes(whole[:8] + struct.pack("<Q", len(STEPS)))
    assert list(read_journal(tmp_path / "j")) == list(enumerate(STEPS[:left]))

    assert write(tmp_path / "j", [Exited(1, 0)]) == [left]
    assert not empty.exists()
    events = [event for _, event in read_journal(tmp_path / "j")]
    assert events == [*STEPS[:left], Exited(1, 0)]


def test_a_journal_of_another_version_is_not_called_damaged(tmp_path):
    (tmp_path / "00000.jrn").write_bytes(b"SUPVJRN2" + bytes(64))
    for act in (lambda: list(read_journal(tmp_path)), lambda: Journal.open(tmp_path)):
        with pytest.raises(StoreError, match="SUPVJRN2', this version reads b'SUPVJRN1'") as caught:
            act()
        assert caught.value.hint == "use the version of supervise that wrote it"


def test_what_is_no_journal_is_said_to_be_none(tmp_path):
    with pytest.raises(StoreError, match="has no journal"):
        list(read_journal(tmp_path))
    (tmp_path / "00000.jrn").write_bytes(b"something else entirely")
    for act in (lambda: list(read_journal(tmp_path)), lambda: Journal.open(tmp_path)):
        with pytest.raises(StoreError, match="is not a journal segment"):
            act()


WRITER = """
import sys
from pathlib import Path
from supervise.core.model import Frame
from supervise.store import Journal
journal = Journal.open(Path(sys.argv[1]), segment_bytes=20000)
while True:
    n = len(journal)
    journal.append(Frame(n, 0, 0, n, (float(n), None) * (n % 20)))
    print(n, flush=True)
"""


@pytest.mark.slow
def test_kill_9_loses_no_event_whose_append_returned(tmp_path):
    """No buffer in between: what a killed supervisor has judged can be replayed."""
    path, expected = tmp_path / "j", 0
    for stop_after in (1, 2000):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
        said = [int(writer.stdout.readline()) for _ in range(stop_after)]
        writer.kill()
        said += [int(line) for line in writer.stdout.read().split(b"\n")[:-1]]
        writer.communicate()

        assert said[0] == expected
        events = list(read_journal(path))
        assert [n for n, _ in events] == list(range(len(events)))
        last = said[-1]
        assert events[last][1] == Frame(last, 0, 0, last, (float(last), None) * (last % 20))
        assert len(events) - last in (1, 2)
        expected = len(events)


def test_a_full_disk_takes_back_the_part_that_fitted(tmp_path):
    path = tmp_path / "j" / "00000.jrn"
    journal = Journal.open(tmp_path / "j")
    journal.append(STEPS[0])
    size = path.stat().st_size - 16
    with file_limit(16 + 3 * size + 9):
        for event in STEPS[1:]:
            journal.add(event)
        with pytest.raises(StoreError, match="cannot write"):
            journal.flush()
    assert len(journal) == 3 and list(read_journal(tmp_path / "j")) == list(enumerate(STEPS[:3]))

    with file_limit(16 + 3 * size + 9), pytest.raises(StoreError, match="cannot write"):
        journal.append(STEPS[3])
    assert journal.append(STEPS[4]) == 3
    journal.sync()
    journal.close()
    assert [event for _, event in read_journal(tmp_path / "j")] == [*STEPS[:3], STEPS[4]]


def rare_and_bulk(count):
    return [
        Notice(i, "note", f"{i}") if i % 10 == 0 else Frame(i, 0, 0, i, (1.0 * i, 2.0, 3.0))
        for i in range(count)
    ]


def test_a_journal_over_its_limit_loses_frames_of_its_oldest_piece_first(tmp_path):
    """Those that an incident refers to go last. What else was in them stays, under its number."""
    events, directory = rare_and_bulk(120), tmp_path / "journal"
    journal = Journal.open(directory, segment_bytes=2000)
    for event in events:
        journal.append(event)
    journal.cite_event(5)
    before = journal.size_bytes
    plan = journal.plan_next_thinning()
    assert plan.piece.path.name == "00001.jrn"
    assert journal.size_bytes == before and list(read_journal(directory)) == list(enumerate(events))

    journal.replace_piece(plan)
    cut = [plan.facts["events"][i] + i for i in (0, 1)]
    kept = [n for n in range(120) if not cut[0] <= n < cut[1] or n % 10 == 0]
    assert list(read_journal(directory, only=(Notice, Frame))) == [(n, events[n]) for n in kept]
    with pytest.raises(StoreError, match=f"lacks the frames of events {cut[0]} to"):
        list(read_journal(directory))

    while plan := journal.plan_next_thinning():
        newest = plan.piece.path.name
        journal.replace_piece(plan)
    assert newest == "00000.jrn"
    journal.close()
    assert write(directory, events[:3]) == [120, 121, 122]
    names = [name for name, _, _ in Journal.open(directory).head["pieces"]]
    assert names == [path.name for path in sorted(directory.iterdir())]
    assert len(list(read_journal(directory, only=(Notice,)))) == 13
    (directory / "00001.jrn").unlink()  # one that is missing is found out though all were thinned
    with pytest.raises(StoreError, match="starts with event"):
        list(read_journal(directory, only=(Notice,)))


def test_a_piece_cited_while_it_is_written_goes_last_and_damage_to_a_thinned_one_is_told(tmp_path):
    journal = Journal.open(tmp_path / "journal", segment_bytes=2000)
    for number, event in enumerate(rare_and_bulk(120)):
        journal.append(event)
        if number == 5:
            journal.cite_event(3)

    plan = journal.plan_next_thinning()
    assert plan.piece.path.name == "00001.jrn"
    journal.replace_piece(plan)
    journal.close()
    raw = bytearray(plan.piece.path.read_bytes())
    raw[len(raw) // 2] ^= 1
    plan.piece.path.write_bytes(raw)
    with pytest.raises(StoreError, match=r"in .*00001.jrn .* is damaged"):
        list(read_journal(tmp_path / "journal", only=(Notice,)))


SHORT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
ssize_t write(int fd, const void *data, size_t size) {
    ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    return real(fd, data, fd > 2 && size > 7 ? 7 : size);
}
"""
IN_PARTS = """
import sys
from pathlib import Path
from supervise.core.model import Exited
from supervise.store import Audit, Journal, read_audit, read_journal
home = Path(sys.argv[1])
journal = Journal.open(home / "j")
numbers = [journal.append(Exited(1, 0)), journal.add(Exited(2, 0)), journal.add(Exited(3, 0))]
journal.flush()
log = Audit.open(home / "audit.log", "run-1", at_ns=1, wall="w")
log.append("note", actor="app", at_ns=1, wall="w", step=1, body={"reason": "x" * 99}, sync=True)
log.close()
count = len(list(read_audit(home / "audit.log")))
print(numbers, [n for n, _ in read_journal(home / "j")], count, log.trouble)
"""


@pytest.mark.slow
def test_a_short_write_is_followed_by_the_rest(tmp_path):
    (tmp_path / "short.c").write_text(SHORT)
    build = ["cc", "-shared", "-fPIC", "-o", "short.so", "short.c", "-ldl"]
    try:
        subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a short write needs a C compiler")
    environ = os.environ | {"LD_PRELOAD": str(tmp_path / "short.so")}

    done = subprocess.run(
        [sys.executable, "-c", IN_PARTS, tmp_path], env=environ, capture_output=True, text=True
    )

    assert done.stdout == "[0, 1, 2] [0, 1, 2] 1 None\n", done.stderr


def test_events_that_come_at_once_are_written_at_once(tmp_path):
    journal = Journal.open(tmp_path / "j", segment_bytes=300)
    numbers = [journal.add(event) for event in STEPS]
    early = len(list(read_journal(tmp_path / "j")))
    journal.flush()

    assert early < len(STEPS) and journal.unwritten == 0
    assert list(read_journal(tmp_path / "j")) == list(zip(numbers, STEPS, strict=True))
    assert {path.stat().st_size < 600 for path in (tmp_path / "j").iterdir()} == {True}


def test_the_reserve_is_no_part_of_the_journal(tmp_path):
    journal = Journal.open(tmp_path / "j")
    journal.append(STEPS[0])
    path, before = tmp_path / "j" / "00000.jrn", (tmp_path / "j" / "00000.jrn").stat()
    try:
        journal.reserve(1 << 20)
    except OSError as error:
        pytest.skip(f"this file system reserves nothing: {error}")
    with_it = path.stat()
    journal.append(STEPS[1])
    journal.close()

    assert with_it.st_size == before.st_size
    assert (with_it.st_blocks - before.st_blocks) * 512 >= 1 << 20
    assert path.stat().st_blocks <= before.st_blocks + 8
    assert list(read_journal(tmp_path / "j")) == list(enumerate(STEPS[:2]))
