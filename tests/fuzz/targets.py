"""What is fuzzed: one function per surface, from bytes to nothing or a `SuperviseError`.

A target writes the bytes to where a hostile or broken writer could have put them, and then uses all
that reads them. Whatever else it raises is a finding, and so is an exit code nobody documented.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from supervise.app.past import Past
from supervise.catalog import load_policy, shipped
from supervise.catalog.load import parse
from supervise.catalog.nodes import plain
from supervise.catalog.problems import Problems, Source
from supervise.cli import invoke
from supervise.core import engine
from supervise.core.rule import Policy
from supervise.core.values import (
    Adopted,
    Announced,
    Beat,
    Event,
    Exited,
    Finished,
    Frame,
    Gap,
    Launched,
    Noticed,
    Tick,
    Told,
)
from supervise.errors import StoreError, SuperviseError
from supervise.inputs.checkpoints.told import Moment, saved
from supervise.inputs.company import Company
from supervise.inputs.segment import Segment, Segments, recorded_end
from supervise.inputs.words import DIRECTORY, Words
from supervise.outputs import live
from supervise.store import audit, checkpoints, journal, pack
from supervise.store.audit import Audit
from supervise.store.chain import Chain
from supervise.store.quarantine import Quarantine
from supervise.store.recorder import Recorder
from supervise.store.rundir import RunDir
from supervise_probe import wire
from supervise_probe.writer import Writer

from . import mutation

WALL = "2026-01-05T10:11:12.345Z"
SECOND = 10**9
CODES = frozenset((0, 1, 2, 64, 65))
NAMES = ("train_loss_raw", "grad_global_norm", "batch_shard", "loss_scale", "clip_bound")

# Loss above 5 runs every action whose answer the engine reckons with.
POLICY = """\
version: supervise/v1
policy: fuzzed
mode: enforce
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 5.0}
  wild: {kind: threshold, metric: grad_global_norm, gt: 9.0}
  z: {kind: robust_z, metric: train_loss_raw, gt: 6.0, freeze: 4, m_of_n: [2, 3]}
baseline: {window: 16, min: 8}
rules:
  - {id: spike, when: high, sev: SEV1, run: calm, cooldown: 5}
  - {id: grad, when: wild, sev: SEV2, for: 2, run: back}
  - {id: odd, when: z and not high, sev: SEV2}
runbooks:
  calm:
    meaning: The loss is high.
    impact: It may not come back.
    steps: [pause, loss_scale: {set: 1024}, clip: {factor: 0.3, for: 50}, resume]
    verify: {within: 9, clear_for: 3}
  back:
    meaning: The gradient is wild.
    impact: It may not come back.
    steps: [snapshot, rollback: {at_least: 2, rng: keep, start: 0.1, rewarm: 5}]
    verify: {within: 9, clear_for: 3}
savepoints: {every: 2, keep: 4}
budgets:
  all: {max: 30, per: 1000}
  rollback: {max: 9, per: 1000}
  loss_scale: {max: 9, per: 1000}
  clip: {max: 9, per: 1000}
escalate: {ladder: [calm, back, hold], reset_after: 50}
job: {rollback: in_process}
warmup: 3
probation: 5
"""


@dataclass(frozen=True)
class Target:
    """One surface. `seeds` are sound inputs, `change` makes another of one, `use` reads it."""

    seeds: Callable[[Path], list[bytes]]
    change: Callable[[bytes, Random], bytes]
    use: Callable[[Path, bytes], None]


# ── a run, recorded as the supervisor does ────────────────────────────────────────────────────────


@cache
def policy(name: str = "") -> Policy:
    if name:
        return load_policy(name)
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"fuzzed-{os.getpid()}.yaml"
    path.write_text(POLICY)
    try:
        return load_policy(path)
    finally:
        path.unlink()


def events() -> list[Event]:
    """Return a short life of everything: two incidents, a rollback, words, an adoption."""
    found: list[Event] = [Launched(1, 2**22 + 7, 0), Announced(2, 0, 1, 7, NAMES)]
    for step in range(34):
        loss = 9.0 if step in (12, 25) else 2.0 + step % 3 / 10
        norm = 30.0 if step in (20, 21) else 1.0
        found.append(Frame((10 + step) * SECOND, 0, 0, step, (loss, norm, step // 8, 1024.0, None)))
    at = 60 * SECOND
    notices = [
        ("shard", {"shards": {"0": "data/0.tar", "1": "data/1.tar"}}),
        ("checkpoint", {"id": "ckpt-1", "step": 8, "attempt": 0, "ok": True, "path": "/c/1.pt"}),
        ("checkpoint-saved", {"path": "/c/1.pt", "step": 8, "attempt": 0, "how": "torch.save",
                              "seconds": 0.1, "ranks": 1, "python": "/usr/bin/python3",
                              "file": {"size": 1, "mtime_ns": 2, "inode": 3, "device": 4}}),
        ("continuity", {"step": 9, "fingerprint": "same", "ok": False,
                        "loss": {"was": 2.0, "is": 9.0}, "lr": {"was": 0.1, "is": 0.1}}),
        ("signal", {"final": False, "typed": True}),
    ]  # fmt: skip
    found += [Noticed(at, kind, f"{kind} said", 0, 9, data, 5, n)
              for n, (kind, data) in enumerate(notices)]  # fmt: skip
    found += [
        Gap(at, 0, 40, 3),
        Tick(at + SECOND, (Beat(0, at, "step"),)),
        Told(at, "ann", "silence", {"key": "k1", "rule": "odd", "steps": 9}),
        Told(at, "ann", "lr", {"key": "k2", "value": 0.5, "rewarm": 3}),
        Told(at, "ann", "quarantine", {"key": "k3", "shards": ["data/1.tar"]}),
        Adopted(at + 2 * SECOND, 99, True, 5),
        Exited(at + 3 * SECOND, -9),
    ]
    return found


def record(path: Path, happened: Iterable[Event]) -> RunDir:
    """Judge events and write them down, as the desk does; every action is done."""
    chosen = policy()
    run = RunDir.create(path, argv=["train"], policy=chosen, wall=WALL)
    log = Audit.open(run.audit_path, run.id, at_ns=0, wall=WALL)
    recorder = Recorder(journal.Journal.open(run.journal_path), log, lambda: (5, WALL), print)
    started = {"policy": chosen.name, "policy_digest": chosen.digest, "mode": chosen.mode}
    recorder.note("run_start", -1, "the job was started", {**started, "channels": ["console"]})
    state, last, queue = engine.start(chosen), None, list(happened)
    while queue:
        event = queue.pop(0)
        number = recorder.event(event)
        state, made = engine.step(chosen, state, event)
        for decision in made:
            last = decision
            recorder.decision(decision, number, event.at_ns)
            if decision.kind == "intent":
                queue.insert(0, answer(decision.data["action"], event.at_ns, state.step, {}))
    ranks = {0: {"pid": 7, "phase": "step", "seen_ns": 5, "status": {"collectors": {"loss": "on"}}}}
    found = live.snapshot(
        chosen, state, ranks, wall=WALL, now_ns=9, tier="T1", last=last, trouble=None
    )
    run.write_json("state.json", found)
    run.write_json("launch.json", {"attempt": 0, "pid": 2**22 + 7, "start_ticks": 5})
    register = checkpoints.Register(run.path)
    register.add("/c/1.pt", step=8, state=checkpoints.VERIFIED)
    register.write()
    recorder.note("run_end", state.step, "exit code 0", {"exit_code": 0})
    recorder.close()
    return run


def answer(action: Any, at_ns: int, step: int, result: dict[str, Any]) -> Finished:
    """Return the outcome of an action that was done."""
    done: dict[str, Any] = {"ack_step": step, "ranks": 1}
    if action["verb"] == "rollback":
        done |= {"attempt": 1, "step": max(0, step - 4)}
    done |= {"loss_scale": 1024.0} if action["verb"] == "loss_scale" else {}
    done |= {"clip_bound": None} if action["verb"] == "clip" else {}
    return Finished(at_ns, action["id"], True, {**done, **result})


@cache
def sample(home: Path) -> RunDir:
    """Return the run whose files the targets replace."""
    return record(home / "run", events())


@contextlib.contextmanager
def replaced(path: Path, raw: bytes) -> Iterator[None]:
    """Let a file of the run hold these bytes for a while."""
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(raw)
    try:
        yield
    finally:
        path.unlink()
        if before is not None:
            path.write_bytes(before)


def say(*argv: str) -> None:
    """Run a command; its exit code must be a documented one, and its output must be text."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = invoke(list(argv))
    if code not in CODES:
        raise AssertionError(f"{argv[0]} ended with exit code {code}")


# ── the surfaces ──────────────────────────────────────────────────────────────────────────────────


def use_journal(home: Path, raw: bytes) -> None:
    run = sample(home)
    with replaced(run.journal_path / "00000.jrn", raw):
        for argv in (["status"], ["replay"], ["export", "--csv"]):
            say(*argv, str(run.path))
        say("why-not", str(run.path), "--rule", "spike", "--step", "25")
        with contextlib.suppress(StoreError):
            Past.read(run, load_policy)
        journal.Journal.open(run.journal_path).close()


def use_audit(home: Path, raw: bytes) -> None:
    run = sample(home)
    with replaced(run.audit_path, raw):
        for argv in (
            ["audit", "verify"], ["audit", "show"], ["audit", "show", "--json"], ["status"],
            ["status", "--json"], ["why"], ["why", "--json"], ["replay"],
            ["why-not", "--rule", "spike", "--step", "25"],
        ):  # fmt: skip
            say(*argv, str(run.path))
        with contextlib.suppress(StoreError):
            Past.read(run, load_policy)
        try:
            Audit.open(run.audit_path, run.id, at_ns=1, wall=WALL).close()
            opened = audit.verify(run.audit_path)
            assert opened.status == "good" or not opened.records
        finally:
            for torn in run.path.glob("audit.log.torn-*"):
                torn.unlink()


DOCUMENTS = ("state.json", "run.json", "launch.json", "checkpoints.json", "quarantine.json")


def use_status(home: Path, raw: bytes) -> None:
    name, _, content = raw.partition(b"\n")
    run = sample(home)
    if name.decode("ascii", "replace") not in DOCUMENTS:
        return
    with replaced(run.path / name.decode(), content):
        for argv in (["status"], ["status", "--json"], ["checkpoints"], ["checkpoints", "--json"]):
            say(*argv, str(run.path))
        say("why", str(run.path))
        for read in (
            lambda: checkpoints.Register(run.path), lambda: Quarantine(run.quarantine_path).read(),
        ):  # fmt: skip
            with contextlib.suppress(StoreError):
                read()


def use_policy(home: Path, raw: bytes) -> None:
    path = home / "policy.yaml"
    path.write_bytes(raw)
    say("policy", "check", "--json", str(path))
    load_policy(path)


def use_replay(home: Path, raw: bytes) -> None:
    """Lines of JSON, `[kind, fields]` or `[1, hex of a frame]`: events under good checksums."""
    rows = []
    for line in raw.split(b"\n"):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            kind, fields = json.loads(line)
            payload = bytes.fromhex(fields) if kind == 1 else mutation.dumped(fields)
            rows.append((kind, payload))
    use_journal(home, mutation.segment([row for row in rows if isinstance(row[0], int)]))


def replay_seeds(home: Path) -> list[bytes]:
    packed = [pack.pack(event) for event in events()]
    lines = [
        mutation.dumped([kind, payload.hex() if kind == 1 else json.loads(payload)])
        for kind, payload in packed
    ]
    return [b"\n".join(lines)]


def change_replay(raw: bytes, chance: Random) -> bytes:
    lines = raw.split(b"\n")
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(lines))
        try:
            kind, fields = json.loads(lines[at])
        except (ValueError, TypeError, RecursionError):
            continue
        how = chance.randrange(8)
        if how == 0:
            lines.insert(at, lines.pop(chance.randrange(len(lines))))
        elif how == 1:
            lines.insert(at, lines[chance.randrange(len(lines))])
        elif kind == 1:
            lines[at] = mutation.dumped([1, mutation._frame(bytes.fromhex(fields), chance).hex()])
        else:
            lines[at] = mutation.dumped([kind, mutation.twisted(fields, chance)])
    return b"\n".join(lines)


# ── what the probe writes ─────────────────────────────────────────────────────────────────────────


class Judge:
    """Takes live events as the desk does: journal, engine, audit log; an error here is ours."""

    def __init__(self) -> None:
        self.policy = policy()
        self.state = engine.start(self.policy)
        self.company = Company(lambda pid, leads: {"host_memory": 1.0} if leads else {})
        self.chain = Chain("run")
        self.results: list[dict[str, Any]] = []
        self.take(Launched(1, 2**22 + 7, 0))

    def take(self, event: Event) -> None:
        again = pack.unpack(*pack.pack(event))
        assert type(again) is type(event)
        self.state, made = engine.step(self.policy, self.state, event)
        follow: list[Event] = []
        for decision in made:
            body = {"seq": self.chain.size, "prev": self.chain.prev, "run": "run", "epoch": 1,
                    "mono_ns": 5, "wall": WALL, "actor": "engine", "event": 1,
                    **engine_record(decision)}  # fmt: skip
            self.chain.check(self.chain.take(self.chain.line(body)))
            if decision.kind == "intent":
                result = self.results.pop(0) if self.results else {}
                action = decision.data["action"]
                follow.append(answer(action, event.at_ns, self.state.step, result))
        for each in follow:
            self.take(each)

    def hear(self, found: Iterable[Event]) -> None:
        for event in found:
            for completed in self.company.complete(event):
                self.take(completed)
            if isinstance(event, Noticed) and event.kind == "checkpoint-saved":
                saved(event, Moment())

    def status(self, ranks: dict[int, dict[str, Any]]) -> None:
        found = live.snapshot(
            self.policy, self.state, ranks, wall=WALL, now_ns=9, tier="T1", last=None, trouble=None
        )
        json.dumps(audit.encode(found), allow_nan=False).encode()


def engine_record(decision: Any) -> dict[str, Any]:
    from supervise.core.replay import record as recorded

    return recorded(decision)


def clock() -> int:
    return 100 * SECOND


def use_notices(home: Path, raw: bytes) -> None:
    """Letters, separated by zero bytes; the word of an operator is one with a `word` in it."""
    folder = home / "letters"
    folder.mkdir(exist_ok=True)
    writer = Writer.create(str(folder), "run", 0, 1, slots=64, capacity=8)
    control = home / DIRECTORY
    control.mkdir(exist_ok=True)
    words = Words(home, clock)
    judge = Judge()
    segment = Segment.open(writer.path, clock)
    try:
        writer.announce(NAMES)
        letters = raw.split(b"\0")[: wire.LETTER_SLOTS]
        for number, letter in enumerate(letters):
            if b'"word"' in letter:
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
        {"notice": e.kind, "message": e.message, "step": e.step, "data": e.data}
        for e in events() if isinstance(e, Noticed)
    ]  # fmt: skip
    letters += [
        {"ack": "k", "verb": verb, "step": 3, "ok": True, "error": None, "result": result}
        for verb, result in (
            ("pause", {"at": 3}), ("loss_scale", {"loss_scale": 1024.0, "backoff": 0.5}),
            ("clip", {"clip_bound": 0.3, "steps": 50}), ("resume", {}),
            ("rollback", {"attempt": 1, "step": 5, "from_step": 9}),
        )
    ]  # fmt: skip
    letters += [
        {"word": e.word, "operator": e.operator, "args": e.args}
        for e in events() if isinstance(e, Told)
    ]  # fmt: skip
    return [b"\0".join(map(mutation.dumped, letters))]


def change_notices(raw: bytes, chance: Random) -> bytes:
    letters = raw.split(b"\0")
    for _ in range(chance.choice((1, 2, 3))):
        at = chance.randrange(len(letters))
        try:
            letters[at] = mutation.dumped(mutation.twisted(json.loads(letters[at]), chance))
        except (ValueError, RecursionError):
            letters[at] = mutation.bitten(letters[at], chance)
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
    writer.status({"tier": "T1", "steps": 12, "collectors": {"loss": "on"}, "savepoints": [3]})
    for letter in notice_seeds(home)[0].split(b"\0")[:9]:
        writer.post(letter)
    writer.last_words(0, "done")
    writer.close()
    raw = bytearray(Path(writer.path).read_bytes())
    Path(writer.path).unlink()
    struct.pack_into("<QQQ", raw, _FIELDS["pid"][0], 4242, 1, 1)
    return _sealed(raw)


_FIELDS = {
    "file_size": (64, "<Q"), "pid": (72, "<Q"), "start_ticks": (80, "<Q"), "created_ns": (88, "<Q"),
    "rank": (96, "<I"), "world_size": (100, "<I"), "slots": (20, "<I"), "capacity": (24, "<I"),
}  # fmt: skip


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
    judge, segments = Judge(), Segments(folder, marks, clock)
    try:
        for turn in range(5):
            judge.hear(segments.poll())
            segments.tighten(turn % 2 == 0, 5 + turn)
            segments.spare(turn, 5)
            segments.interval_s()
            for rank in list(segments.ranks.values()):
                with contextlib.suppress(SuperviseError):
                    beat = rank.beat()
                    judge.take(Tick(clock() + turn, (beat,)))
                    view = {"pid": rank.pid, "phase": beat.phase, "seen_ns": beat.seen_ns}
                    judge.status({rank.rank: view | {"status": rank.status()}})
                    judge.results += [{**ack.result} for ack in rank.acks() if ack.ok]
                    rank.send("k", "pause", {})
                    rank.resume(2, 2)
        end = recorded_end(folder, 4242, 0)
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
            at, form = _FIELDS[chance.choice(list(_FIELDS))]
            limit = 8 * struct.calcsize(form)
            struct.pack_into(form, image, at, chance.choice(mutation.NUMBERS) % 2**limit)
            image = bytearray(_sealed(image))
        elif how == 1:
            _change_slot(image, chance)
        elif how == 2:
            _change_letter(image, chance)
        elif how == 3:
            half = chance.randrange(2)
            at, size = chance.choice(
                ((wire.NAMES_AT, wire.NAMES_SIZE), (wire.STATUS_AT, wire.STATUS_SIZE))
            )
            _put_letter(image, at + half * size, size, chance)
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
    return mutation.dumped([
        [at, after[at : at + 16].hex()]
        for at in range(0, len(before), 16) if before[at : at + 16] != after[at : at + 16]
    ])  # fmt: skip


def _change_slot(image: bytearray, chance: Random) -> None:
    size = wire.layout(16, 8)[2]
    at = wire.HEADER_SIZE + chance.randrange(12) * size
    _, count, seq, step, attempt, flags, at_ns, low, high = wire.SLOT_HEAD.unpack_from(image, at)
    fields = {"count": count, "seq": seq, "step": step, "attempt": attempt, "at_ns": at_ns}
    name = chance.choice((*fields, "value", "low"))
    if name == "value":
        struct.pack_into("<d", image, at + wire.SLOT_HEAD.size + 8 * chance.randrange(5),
                         chance.choice(mutation.FLOATS))  # fmt: skip
    elif name == "low":
        low = chance.choice(mutation.NUMBERS)
    else:
        limit = 2**32 if name == "attempt" else 14 if name == "count" else 2**64
        fields[name] = chance.choice(mutation.NUMBERS) % limit
    wire.SLOT_HEAD.pack_into(
        image, at, 0, fields["count"], fields["seq"], fields["step"], fields["attempt"], flags,
        fields["at_ns"], low, high,
    )  # fmt: skip
    end = at + wire.SLOT_HEAD.size + 8 * fields["count"]
    struct.pack_into("<I", image, at, zlib.crc32(image[at + 4 : end], fields["seq"] & (2**32 - 1)))


def _change_letter(image: bytearray, chance: Random) -> None:
    at = wire.LETTERS_AT + chance.randrange(9) * wire.LETTER_SIZE
    _put_letter(image, at, wire.LETTER_SIZE, chance)


def _put_letter(image: bytearray, at: int, size: int, chance: Random) -> None:
    found = wire.unpack_letter(bytes(image[at : at + size]))
    seq, payload = found if found is not None and found[1] is not None else (1, b"{}")
    if chance.random() < 0.1:
        seq = chance.choice(mutation.NUMBERS)
    try:
        fresh = mutation.dumped(mutation.twisted(json.loads(payload or b"{}"), chance))
    except (ValueError, RecursionError):
        fresh = mutation.bitten(payload or b"", chance)
    raw = wire.pack_letter(seq, fresh[: size - wire.LETTER_HEAD.size])
    image[at : at + len(raw)] = raw


def audit_seeds(home: Path) -> list[bytes]:
    whole = sample(home).audit_path.read_bytes()
    return [whole, mutation.chained([json.loads(line[65:]) for line in whole.splitlines()[:3]])]


# ── the table ─────────────────────────────────────────────────────────────────────────────────────


def status_seeds(home: Path) -> list[bytes]:
    run = sample(home)
    quarantine = {"entries": [{"kind": "shard", "name": "a.tar"}, {"kind": "batch", "name": 7}]}
    found = [name.encode() + b"\n" + (run.path / name).read_bytes() for name in DOCUMENTS[:4]]
    return [*found, b"quarantine.json\n" + mutation.dumped(quarantine)]


def change_status(raw: bytes, chance: Random) -> bytes:
    name, _, content = raw.partition(b"\n")
    if chance.random() < 0.3:
        return name + b"\n" + mutation.bitten(content, chance)
    try:
        return name + b"\n" + mutation.dumped(mutation.twisted(json.loads(content), chance))
    except (ValueError, RecursionError):
        return name + b"\n" + mutation.bitten(content, chance)


def policy_seeds(home: Path) -> list[bytes]:
    names = ("policies/observe.yaml", "policies/packs/hang.yaml", "runbooks/soften.yaml")
    found = [POLICY.encode(), (shipped.folder("policies") / "nano.yaml").read_bytes()]
    for name in names:
        folder, _, file = name.rpartition("/")
        found.append((shipped.folder(folder) / file).read_bytes())
    return found


def change_policy(raw: bytes, chance: Random) -> bytes:
    if chance.random() < 0.5:
        return mutation.bitten(raw, chance)
    root = parse(Source("p", raw.decode("utf-8", "replace")), Problems())
    if root is None:
        return mutation.bitten(raw, chance)
    return json.dumps(mutation.twisted(plain(root), chance), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


TARGETS: dict[str, Target] = {
    "segment": Target(segment_seeds, change_segment, use_segment),
    "notices": Target(notice_seeds, change_notices, use_notices),
    "journal": Target(
        lambda home: [(sample(home).journal_path / "00000.jrn").read_bytes()],
        mutation.of_journal, use_journal,
    ),
    "audit": Target(audit_seeds, mutation.of_audit, use_audit),
    "status": Target(status_seeds, change_status, use_status),
    "policy": Target(policy_seeds, change_policy, use_policy),
    "replay": Target(replay_seeds, change_replay, use_replay),
}  # fmt: skip
