"""A run, recorded as the supervisor does: what the targets damage."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from supervise.catalog import load_policy
from supervise.checkpoints import VERIFIED, Register
from supervise.cli import invoke
from supervise.core import initial_state
from supervise.core import step as step_engine
from supervise.core.model import (
    Adopted,
    Announced,
    Beat,
    Event,
    Exited,
    Finished,
    Frame,
    Gap,
    Launched,
    Notice,
    OperatorCommand,
    Payload,
    Policy,
    Tick,
)
from supervise.runtime import RankView, build_status
from supervise.store import Audit, Journal, Recorder, RunDir
from tests.support.recorded_run import shipped_policy

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
    steps: [snapshot, rollback: {at_least: 2, start: 0.1, rewarm: 5}]
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


@cache
def policy(name: str = "") -> Policy:
    if name:
        return shipped_policy(name)
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
        (
            "checkpoint-saved",
            {
                "path": "/c/1.pt",
                "step": 8,
                "attempt": 0,
                "how": "torch.save",
                "seconds": 0.1,
                "ranks": 1,
                "python": "/usr/bin/python3",
                "file": {"size": 1, "mtime_ns": 2, "inode": 3, "device": 4},
            },
        ),
        (
            "continuity",
            {
                "step": 9,
                "fingerprint": "same",
                "ok": False,
                "loss": {"was": 2.0, "is": 9.0},
                "lr": {"was": 0.1, "is": 0.1},
            },
        ),
        ("signal", {"final": False, "typed": True}),
    ]
    found += [
        Notice(at, kind, f"{kind} said", 0, 9, data, 5, n) for n, (kind, data) in enumerate(notices)
    ]
    found += [
        Gap(at, 0, 40, 3),
        Tick(at + SECOND, (Beat(0, at, "step"),)),
        OperatorCommand(at, "ann", "silence", {"key": "k1", "rule": "odd", "for": 9}),
        OperatorCommand(at, "ann", "lr", {"key": "k2", "value": 0.5, "rewarm": 3}),
        OperatorCommand(at, "ann", "quarantine", {"key": "k3", "shards": ["data/1.tar"]}),
        Adopted(at + 2 * SECOND, 99, True, 5),
        Exited(at + 3 * SECOND, -9),
    ]
    return found


def record(path: Path, happened: Iterable[Event]) -> RunDir:
    """Judge events and write them down, as the processor does; every action is done."""
    chosen = policy()
    run = RunDir.create(path, argv=["train"], policy=chosen, wall=WALL)
    log = Audit.open(run.audit_path, run.id, at_ns=0, wall=WALL)
    recorder = Recorder(Journal.open(run.journal_path), log, lambda: (5, WALL), print)
    started = {"policy": chosen.name, "policy_digest": chosen.digest, "mode": chosen.mode}
    recorder.note("run_start", -1, "the job was started", {**started, "channels": ["console"]})
    state, last, queue = initial_state(chosen), None, list(happened)
    while queue:
        event = queue.pop(0)
        number = recorder.event(event)
        state, made = step_engine(chosen, state, event)
        for decision in made:
            last = decision
            recorder.decision(decision, number, event.at_ns)
            if decision.kind == "intent":
                queue.insert(0, answer(decision.data["action"], event.at_ns, state.step, {}))
    ranks = {0: RankView(7, "step", 5, Payload({"collectors": {"loss": "on"}}))}
    found = build_status(
        chosen, state, ranks, wall=WALL, now_ns=9, tier="T1", last=last, trouble=None
    )
    run.write_json("state.json", found.document())
    run.write_json("launch.json", {"attempt": 0, "pid": 2**22 + 7, "start_ticks": 5})
    register = Register(run.path)
    register.add("/c/1.pt", step=8, state=VERIFIED)
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
