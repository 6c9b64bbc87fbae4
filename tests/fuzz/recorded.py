"""A run, recorded as the supervisor does: what the targets damage."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from supervise.catalog import load_policy
from supervise.checkpoints import VERIFIED, Register
from supervise.cli import invoke
from supervise.core import model
from supervise.runtime import RankView, build_status
from supervise.store import RunDir
from tests.support.recorded_run import SECOND, WALL, Judge

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
def policy(home: Path) -> model.Policy:
    (home / "fuzzed.yaml").write_text(POLICY)
    return load_policy(home / "fuzzed.yaml")


def events() -> list[model.Event]:
    """Return a short life of everything: two incidents, a rollback, words, an adoption."""
    found: list[model.Event] = [model.Launched(1, 2**22 + 7, 0), model.Announced(2, 0, 1, 7, NAMES)]
    for step in range(34):
        loss = 9.0 if step in (12, 25) else 2.0 + step % 3 / 10
        norm = 30.0 if step in (20, 21) else 1.0
        found.append(
            model.Frame((10 + step) * SECOND, 0, 0, step, (loss, norm, step // 8, 1024.0, None))
        )
    at = 60 * SECOND
    saved = {"path": "/c/1.pt", "step": 8, "attempt": 0, "how": "torch.save", "seconds": 0.1}
    saved |= {"ranks": 1, "python": "/usr/bin/python3"}
    saved |= {"file": {"size": 1, "mtime_ns": 2, "inode": 3, "device": 4}}
    continuity = {"step": 9, "fingerprint": "same", "ok": False}
    continuity |= {"loss": {"was": 2.0, "is": 9.0}, "lr": {"was": 0.1, "is": 0.1}}
    notices: list[tuple[str, dict[str, Any]]] = [
        ("shard", {"shards": {"0": "data/0.tar", "1": "data/1.tar"}}),
        ("checkpoint", {"id": "ckpt-1", "step": 8, "attempt": 0, "ok": True, "path": "/c/1.pt"}),
        ("checkpoint-saved", saved),
        ("continuity", continuity),
        ("signal", {"final": False, "typed": True}),
    ]
    found += [
        model.Notice(at, kind, f"{kind} said", 0, 9, data, 5, n)
        for n, (kind, data) in enumerate(notices)
    ]
    found += [
        model.Gap(at, 0, 40, 3),
        model.Tick(at + SECOND, (model.Beat(0, at, "step"),)),
        model.OperatorCommand(at, "ann", "silence", {"key": "k1", "rule": "odd", "for": 9}),
        model.OperatorCommand(at, "ann", "lr", {"key": "k2", "value": 0.5, "rewarm": 3}),
        model.OperatorCommand(at, "ann", "quarantine", {"key": "k3", "shards": ["data/1.tar"]}),
        model.Adopted(at + 2 * SECOND, 99, True, 5),
        model.Exited(at + 3 * SECOND, -9),
    ]
    return found


def answer(action: Any) -> dict[str, Any]:
    """Return the result of an action that was done."""
    results: dict[str, dict[str, Any]] = {
        "rollback": {"attempt": 1, "step": 17},
        "loss_scale": {"loss_scale": 1024.0},
        "clip": {"clip_bound": None},
    }
    return {"ranks": 1} | results.get(action["verb"], {})


@cache
def sample(home: Path) -> RunDir:
    """Return the run whose files the targets replace: it has every document of a run."""
    chosen = policy(home)
    run = RunDir.create(home / "run", argv=["train"], policy=chosen, wall=WALL)
    judge = Judge(run, home / "fuzzed.yaml", answer=answer)
    started = {"policy": chosen.name, "policy_digest": chosen.digest, "mode": chosen.mode}
    started |= {"channels": ["console"]}
    judge.recorder.note("run_start", -1, "the job was started", started)
    judge.judge(*events())
    ranks = {0: RankView(7, "step", 5, model.Payload({"collectors": {"loss": "on"}}))}
    about: dict[str, Any] = {"wall": WALL, "now_ns": 9, "tier": "T1", "last": None}
    status = build_status(chosen, judge.state, ranks, **about, trouble=None)
    run.write_json("state.json", status.document())
    run.write_json("launch.json", {"attempt": 0, "pid": 2**22 + 7, "start_ticks": 5})
    register = Register(run.path)
    register.add("/c/1.pt", step=8, state=VERIFIED)
    register.write()
    judge.recorder.note("run_end", judge.state.step, "exit code 0", {"exit_code": 0})
    judge.recorder.close()
    return run


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
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = invoke(list(argv))
    if code not in CODES:
        raise AssertionError(f"{argv[0]} ended with exit code {code}")
