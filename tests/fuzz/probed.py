"""What a probe writes, damaged: segments, notices, and the words of operators."""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from supervise.checkpoints import RunPosition, save_report
from supervise.core import initial_state
from supervise.core import step as step_engine
from supervise.core.model import (
    Event,
    Finished,
    Launched,
    Notice,
    OperatorCommand,
    Tick,
    decision_record,
    plain_json,
)
from supervise.errors import SuperviseError
from supervise.runtime import (
    ControlInbox,
    FrameEnricher,
    RankView,
    Segment,
    Segments,
    build_status,
    recorded_returncode,
)
from supervise.store import Chain, pack_event, unpack_event
from supervise_probe import wire
from supervise_probe.ipc.segment import Writer

from . import mutation
from .recorded import NAMES, SECOND, WALL, answer, events, policy


class Judge:
    """Handles live events as the processor does: journal, engine, audit log."""

    def __init__(self, home: Path) -> None:
        self.policy = policy(home)
        self.state = initial_state(self.policy)
        self.company = FrameEnricher(lambda pid, leads: {"host_memory": 1.0} if leads else {})
        self.chain = Chain("run")
        self.results: list[dict[str, Any]] = []
        self.take(Launched(1, 2**22 + 7, 0))

    def take(self, event: Event) -> None:
        again = unpack_event(*pack_event(event))
        assert type(again) is type(event)
        self.state, made = step_engine(self.policy, self.state, event)
        about = {
            "run": "run",
            "epoch": 1,
            "mono_ns": 5,
            "wall": WALL,
            "actor": "engine",
            "event": 1,
        }
        outcomes: list[Event] = []
        for decision in made:
            links = {"seq": self.chain.size, "prev": self.chain.head}
            line = self.chain.line({**links, **about, **decision_record(decision)})
            self.chain.check_fields(self.chain.check_line(line))
            if decision.kind == "intent":
                result = self.results.pop(0) if self.results else {}
                action = decision.data["action"]
                result = {"ack_step": self.state.step, **answer(action), **result}
                outcomes.append(Finished(event.at_ns, action["id"], True, result))
        for outcome in outcomes:
            self.take(outcome)

    def hear(self, found: Iterable[Event]) -> None:
        for event in found:
            for completed in self.company.complete(event):
                self.take(completed)
            if isinstance(event, Notice) and event.kind == "checkpoint-saved":
                save_report(event, RunPosition())

    def status(self, ranks: dict[int, RankView]) -> None:
        found = build_status(
            self.policy, self.state, ranks, wall=WALL, now_ns=9, tier="T1", last=None, trouble=None
        )
        json.dumps(plain_json(found.document()), allow_nan=False).encode()


def clock() -> int:
    return 100 * SECOND


def use_notices(home: Path, raw: bytes) -> None:
    """Letters, separated by zero bytes; the word of an operator is one with a `word` in it."""
    folder = home / "letters"
    folder.mkdir(exist_ok=True)
    writer = Writer.create(str(folder), "run", 0, 1, slots=64, capacity=8)
    control = home / "control"
    control.mkdir(exist_ok=True)
    words = ControlInbox(home, clock)
    judge = Judge(home)
    segment = Segment.open(writer.path, clock)
    try:
        writer.announce(NAMES)
        letters = raw.split(b"\0")[: wire.LETTER_SLOTS]
        for number, letter in enumerate(letters):
            if b'"command"' in letter:
                (control / f"{number:03}.json").write_bytes(letter)
            else:
                writer.post(letter[: wire.LETTER_ROOM])
        for step in range(30):
            loss = 9.0 if step in (12, 20) else 2.0
            writer.publish(
                step, 0, [loss, 30.0 if step == 25 else 1.0, 0.0, 1024.0, None], step + 1
            )
            judge.hear(segment.poll())
            judge.results += [{**ack.result} for ack in segment.acks() if ack.ok]
            for told in words.poll():
                judge.take(told)
    finally:
        segment.close()
        writer.close()
        Path(writer.path).unlink(missing_ok=True)
        for path in control.iterdir():
            path.unlink()


def notice_seeds(home: Path) -> list[bytes]:
    letters: list[Any] = [
        {"notice": e.kind, "message": e.message, "step": e.step, "frame": 0, "data": dict(e.data)}
        for e in events()
        if isinstance(e, Notice)
    ]
    letters += [
        {"ack": "k", "verb": verb, "step": 3, "ok": True, "error": None, "result": result}
        for verb, result in (
            ("pause", {"at": 3}),
            ("loss_scale", {"loss_scale": 1024.0, "backoff": 0.5}),
            ("clip", {"clip_bound": 0.3, "steps": 50}),
            ("resume", {}),
            ("rollback", {"attempt": 1, "step": 5, "from_step": 9}),
        )
    ]
    letters += [
        {"command": e.command, "operator": e.operator, "args": dict(e.args)}
        for e in events()
        if isinstance(e, OperatorCommand)
    ]
    return [b"\0".join(map(mutation.dumped, letters))]


def change_notices(raw: bytes, chance: Random) -> bytes:
    letters = raw.split(b"\0")
    for _ in range(chance.choice((1, 2, 3))):
        at = chance.randrange(len(letters))
        letters[at] = mutation.reworded(letters[at], chance)
        if chance.random() < 0.15:
            letters[at] = mutation.bitten(letters[at], chance)
    return b"\0".join(letters)


@cache
def base(home: Path) -> bytes:
    """Return a segment with something in every part of it."""
    folder = home / "base"
    folder.mkdir(exist_ok=True)
    writer = Writer.create(str(folder), "run", 0, 1, slots=16, capacity=8)
    writer.announce(NAMES[:2])
    writer.announce(NAMES)
    for step in range(12):
        writer.publish(step, 0, [2.0, 1.0, step // 4, 1024.0, None], step + 1)
    writer.write_status(
        {"tier": "T1", "steps": 12, "collectors": {"loss": "on"}, "savepoints": [3]}
    )
    for letter in notice_seeds(home)[0].split(b"\0")[:9]:
        writer.post(letter)
    writer.write_end(0, "done")
    writer.close()
    raw = bytearray(Path(writer.path).read_bytes())
    Path(writer.path).unlink()
    struct.pack_into("<QQQ", raw, PID_AT, 4242, 1, 1)
    return _sealed(raw)


PID_AT = 72
# Slots, capacity, file size, pid, start, creation, rank and world size in the header.
_FIELDS = [(20, "<I"), (24, "<I"), *((at, "<Q") for at in (64, PID_AT, 80, 88))]
_FIELDS += [(96, "<I"), (100, "<I")]


def _sealed(raw: bytearray) -> bytes:
    struct.pack_into("<I", raw, 252, zlib.crc32(raw[:252]))
    return bytes(raw)


def use_segment(home: Path, raw: bytes) -> None:
    """JSON: a list of `[offset, hex]`, written over a sound segment, in two halves of time."""
    patches = [(at, bytes.fromhex(text)) for at, text in json.loads(raw)]
    folder, marks = home / "shm", home / "marks"
    folder.mkdir(exist_ok=True)
    marks.mkdir(exist_ok=True)
    path = folder / "rank-0.4242.seg"
    damaged = bytearray(base(home))
    for at, changed in patches:
        damaged[at : at + len(changed)] = changed
    path.write_bytes(damaged)
    judge, segments = Judge(home), Segments(folder, marks, clock)
    try:
        for turn in range(5):
            judge.hear(segments.poll())
            segments.sample_densely(turn % 2 == 0, 5 + turn)
            segments.retain_savepoint_before(turn, 5)
            segments.interval_s()
            for rank in list(segments.ranks.values()):
                with contextlib.suppress(SuperviseError):
                    beat = rank.beat()
                    judge.take(Tick(clock() + turn, (beat,)))
                    view = RankView(rank.pid, beat.phase, beat.seen_ns, rank.status())
                    judge.status({rank.rank: view})
                    judge.results += [{**ack.result} for ack in rank.acks() if ack.ok]
                    rank.send("k", "pause", {})
                    rank.resume(2, 2)
        end = recorded_returncode(folder, 4242, 0)
        assert end is None or isinstance(end, int)
    finally:
        segments.close()
        path.unlink(missing_ok=True)


def change_segment(raw: bytes, chance: Random) -> bytes:
    """Change parts under good checksums, or bytes anywhere."""
    image = bytearray(_BASE[0])
    before = bytes(image)
    for at, text in json.loads(raw):
        image[at : at + len(text) // 2] = bytes.fromhex(text)
    for _ in range(chance.choice((1, 1, 2, 3))):
        how = chance.randrange(7)
        if how == 0:
            at, form = chance.choice(_FIELDS)
            limit = 8 * struct.calcsize(form)
            struct.pack_into(form, image, at, chance.choice(mutation.NUMBERS) % 2**limit)
            image = bytearray(_sealed(image))
        elif how == 1:
            _change_slot(image, chance)
        elif how == 2:
            at = wire.LETTERS_AT + chance.randrange(9) * wire.LETTER_SIZE
            _put_letter(image, at, wire.LETTER_SIZE, chance)
        elif how == 3:
            parts = ((wire.NAMES_AT, wire.NAMES_SIZE), (wire.STATUS_AT, wire.STATUS_SIZE))
            at, size = chance.choice(parts)
            _put_letter(image, at + chance.randrange(2) * size, size, chance)
        elif how == 4:
            _put_letter(image, wire.END_AT, wire.END_SIZE, chance)
        elif how == 5:
            at = chance.choice((256, 264, 272, 280, 288, 416))
            number = chance.choice(mutation.NUMBERS)
            struct.pack_into("<QQ", image, at, number, number ^ (2**64 - 1))
        else:
            at = chance.randrange(len(image))
            image[at] ^= 1 << chance.randrange(8)
    return _patches(before, bytes(image))


_BASE: list[bytes] = []


def segment_seeds(home: Path) -> list[bytes]:
    _BASE[:] = [base(home)]
    return [b"[]"]


def _patches(before: bytes, after: bytes) -> bytes:
    return mutation.dumped(
        [
            [at, after[at : at + 16].hex()]
            for at in range(0, len(before), 16)
            if before[at : at + 16] != after[at : at + 16]
        ]
    )


def _change_slot(image: bytearray, chance: Random) -> None:
    size = wire.header_fields(16, 8)[2]
    at = wire.HEADER_SIZE + chance.randrange(12) * size
    head = list(wire.SLOT_HEAD.unpack_from(image, at))  # crc, count, seq, step, attempt, ...
    field = chance.choice((1, 2, 3, 4, 6, 7, None))
    if field is None:
        value_at = at + wire.SLOT_HEAD.size + 8 * chance.randrange(5)
        struct.pack_into("<d", image, value_at, chance.choice(mutation.FLOATS))
    else:
        head[field] = chance.choice(mutation.NUMBERS) % {1: 14, 4: 2**32}.get(field, 2**64)
    wire.SLOT_HEAD.pack_into(image, at, 0, *head[1:])
    end = at + wire.SLOT_HEAD.size + 8 * head[1]
    struct.pack_into("<I", image, at, zlib.crc32(image[at + 4 : end], head[2] & (2**32 - 1)))


def _put_letter(image: bytearray, at: int, size: int, chance: Random) -> None:
    found = wire.unpack_letter(bytes(image[at : at + size]))
    seq, payload = found if found is not None and found[1] is not None else (1, b"{}")
    if chance.random() < 0.1:
        seq = chance.choice(mutation.NUMBERS)
    fresh = mutation.reworded(payload or b"{}", chance)
    raw = wire.pack_letter(seq, fresh[: size - wire.LETTER_HEAD.size])
    image[at : at + len(raw)] = raw
