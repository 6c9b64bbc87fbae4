"""The bytes: nothing half-written is believed, and every number is accounted for exactly once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervise_probe import wire
from supervise_probe.ipc.segment import Writer


def header(**changes: object) -> wire.Header:
    fixed = (wire.MAGIC, *wire.header_fields(8, 4), 4321, 99, 10**12, 1, 2, b"run-7")
    return wire.Header._make(fixed)._replace(**changes)


def slots_of(directory: Path, frames: list[tuple[float | None, ...]]) -> list[bytes]:
    """The bytes of frames 0, 1, ... as a real writer lays them into a ring that holds them all."""
    writer = Writer.create(str(directory), "run", 0, 1, slots=max(2, len(frames)), capacity=128)
    writer.announce([f"m{i}" for i in range(len(frames[0]))])
    for step, values in enumerate(frames):
        writer.publish(step, 0, values, 1000 + step)
    writer.close()
    raw = Path(writer.path).read_bytes()
    Path(writer.path).unlink()
    size = wire.header_fields(2, 128)[2]
    return [raw[wire.HEADER_SIZE + i * size :][:size] for i in range(len(frames))]


def test_a_half_written_slot_is_never_believed(tmp_path):
    """Whatever prefix or suffix of the new frame lies over the old one: old, new or nothing."""
    old, new = slots_of(tmp_path, [(2.5, 0.5, 1.0), (9.5, 8.5, -1.0)])
    whole = {wire.unpack_slot(old), wire.unpack_slot(new)}

    for cut in range(len(new) + 1):
        assert wire.unpack_slot(new[:cut] + old[cut:]) in {None, *whole}
        assert wire.unpack_slot(old[:cut] + new[cut:]) in {None, *whole}
    assert len(whole) == 2
    assert None not in whole


def test_every_flipped_bit_of_a_slot_is_noticed(tmp_path):
    (slot, _) = slots_of(tmp_path, [(2.5, None, math.nan), (1.0, 1.0, 1.0)])
    used = wire.SLOT_HEAD.size + 24

    for bit in range(8 * used):
        damaged = bytearray(slot)
        damaged[bit // 8] ^= 1 << bit % 8
        assert wire.unpack_slot(bytes(damaged)) is None


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.one_of(st.none(), st.floats()), min_size=5, max_size=5), min_size=2, max_size=8
    ),
    st.sampled_from([1, 13, 25]),
)
def test_absent_is_not_nan(tmp_path_factory, rows, repeat):
    """Every float64 comes back as it was, NaN as NaN, None as None, up to 125 values a frame."""
    frames = [tuple(row) * repeat for row in rows]
    slots = slots_of(tmp_path_factory.mktemp("slots"), frames)

    for seq, (slot, values) in enumerate(zip(slots, frames, strict=True)):
        found = wire.unpack_slot(slot)
        assert found is not None
        assert found[0] == seq
        assert found[1] is not None
        assert repr(found[1].values) == repr(values)


def test_every_damaged_byte_of_the_header_is_noticed():
    good = wire.pack_header(header())

    for at in range(wire.FIXED_SIZE):
        damaged = bytearray(good)
        damaged[at] ^= 0x40
        with pytest.raises(wire.WireError, match=r"not a probe segment|version|damaged header"):
            wire.unpack_header(bytes(damaged))


@pytest.mark.parametrize("version", [0, 77])
def test_another_wire_version_is_named(version):
    """Older or newer: the sentence holds both versions, whatever else the header looks like."""
    other = wire.MAGIC + version.to_bytes(4, "little") + bytes(range(244))

    with pytest.raises(wire.VersionError, match=f"version {version}, this .* version 1"):
        wire.unpack_header(other)


def test_a_layout_of_other_offsets_is_refused():
    with pytest.raises(wire.WireError, match="does not have"):
        wire.unpack_header(wire.pack_header(header(names_at=4097)))


def test_a_half_written_letter_is_never_believed():
    old = wire.pack_letter(3, b'{"key":"a"}').ljust(wire.LETTER_SIZE, b"\0")
    new = wire.pack_letter(67, b'{"key":"other"}').ljust(wire.LETTER_SIZE, b"\0")
    whole = {(3, b'{"key":"a"}'), (67, b'{"key":"other"}')}

    for cut in range(64):
        assert wire.unpack_letter(new[:cut] + old[cut:]) in {None, *whole}


def test_a_torn_checked_word_is_noticed():
    one, two = 10**12 + 255, 10**12 + 256
    old = wire.CHECKED.pack(one, one ^ wire.ALL_ONES)
    new = wire.CHECKED.pack(two, two ^ wire.ALL_ONES)

    for cut in range(17):
        assert wire.read_checked_word(new[:cut] + old[cut:], 0) in {None, one, two}
    assert wire.read_checked_word(bytes(16), 0) is None


class Store:
    """A complete ring of numbers in memory; a slot can be torn, as in the middle of a write."""

    def __init__(self, slots: int) -> None:
        self.slots = [wire.pack_letter(0, b"")[:0].ljust(32, b"\0")] * slots
        self.head = 0

    def put(self, *, torn: bool = False) -> None:
        raw = wire.pack_letter(self.head, b"%d" % self.head).ljust(32, b"\0")
        index = self.head % len(self.slots)
        self.slots[index] = raw[:9] + b"\xff" + self.slots[index][10:] if torn else raw
        self.head += not torn

    def ring(self) -> wire.Ring[bytes]:
        return wire.Ring(len(self.slots), self.slots.__getitem__, wire.unpack_letter)


@settings(max_examples=300)
@given(
    st.integers(2, 5),
    st.lists(st.sampled_from(["put", "put", "torn", "take", "take2"]), max_size=60),
)
def test_every_number_is_accounted_for_exactly_once(slots, moves):
    """However writes, interrupted writes and reads follow each other: one item or one loss each."""
    store = Store(slots)
    ring = store.ring()
    seen: list[int] = []

    def take(limit: int) -> None:
        for first, lost, item in ring.read_until(store.head, limit):
            assert first == len(seen)
            assert lost or item == b"%d" % first
            seen.extend(range(first, first + (lost or 1)))

    for move in moves:
        if move.startswith("take"):
            take(2 if move == "take2" else 100)
        else:
            store.put(torn=move == "torn")
    store.put()
    for _ in range(40):
        take(100)

    assert seen == list(range(store.head))


@pytest.mark.parametrize("head", [0, 1, 4, 11, 1 << 20, (1 << 64) - 1])
def test_a_damaged_count_loses_nothing(head):
    """The count is a hint: too low it hides, too high it changes nothing; the slots decide."""
    store = Store(8)
    ring = store.ring()
    for _ in range(5):
        store.put()

    for _ in range(10):
        early = ring.read_until(head, 100)
        assert all(not lost for _, lost, _ in early)
        assert ring.next <= 5
    for _ in range(3):
        store.put()
    ring.read_until(store.head, 100)
    assert ring.next == 8


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_bytes_that_are_not_json_are_refused(raw):
    with pytest.raises(wire.WireError, match="not JSON"):
        wire.from_json(raw)
