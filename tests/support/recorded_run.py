"""Frames, a small policy, and a run directory as the supervisor leaves it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from supervise.catalog import load_policy
from supervise.core import start_engine, step_engine
from supervise.core.model import Announced, Finished, Frame, Launched, OperatorCommand
from supervise.store import Audit, Journal, Recorder, Reloader, RunDir

WALL = "2026-01-05T10:11:12.345Z"
SECOND = 1_000_000_000

# Loss above 5 runs `calm`, a learning rate halved; gradient above 9 for two steps is only told.
SMALL = """\
version: supervise/v1
policy: small
mode: enforce
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 5.0}
  wild: {kind: threshold, metric: grad_global_norm, gt: 9.0}
  gone: {kind: threshold, metric: my_score, gt: 1.0}
  z: {kind: robust_z, metric: train_loss_raw, gt: 6.0, freeze: 16, m_of_n: [2, 3]}
baseline: {window: 32, min: 16}
rules:
  - {id: spike, when: high, sev: SEV1, run: calm, cooldown: 50}
  - {id: grad, when: wild, sev: SEV2, for: 2}
  - {id: odd, when: z and not high, sev: SEV2}
  - {id: blind, when: gone, sev: SEV2}
inhibit:
  - {by_state: [acting, probation], mute: [grad]}
runbooks:
  calm:
    meaning: The loss is high.
    impact: It may not come back.
    steps: [{lr_scale: {set: 0.5, rewarm: 10}}]
    verify: {within: 30, clear_for: 5}
budgets:
  all: {max: 3, per: 1000}
  lr_scale: {max: 2, per: 1000}
escalate: {ladder: [calm, hold], reset_after: 500}
warmup: 10
probation: 20
"""


def make_frames(
    first: int, *losses: float | None, grad: float | None = 1.0, attempt: int = 0
) -> list[Frame]:
    """Return frames of rank 0, one a second, the first at step `first`."""
    return [
        Frame((10 + step) * SECOND, 0, attempt, step, (loss, grad))
        for step, loss in enumerate(losses, first)
    ]


def record_run(
    directory: Path,
    events: Iterable[Any],
    *,
    policy: Path,
    mode: str | None = None,
    ended: bool = True,
    answer: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] = lambda action: {},
) -> RunDir:
    """Judge events as the supervisor does, and return the run directory.

    `answer` returns the result of an action, None for one without an outcome; a result with `error`
    is a failed action.
    """
    chosen = load_policy(policy, mode=mode)
    run = RunDir.create(directory, argv=["train"], policy=chosen, wall=WALL)
    audit = Audit.open(run.audit_path, run.id, at_ns=0, wall=WALL)
    ticks = itertools.count()
    recorder = Recorder(Journal.open(run.journal_path), audit, lambda: (next(ticks), WALL), print)
    started = {"policy": chosen.name, "policy_digest": chosen.digest, "mode": chosen.mode}
    started |= {"channels": ["console"]}
    recorder.note("run_start", -1, "the job was started", started)
    reloader = Reloader(run, chosen, load_policy, str(policy), mode)
    state = start_engine(chosen)
    first = [
        Launched(1, 2**22 + 7, 0),
        Announced(2, 0, 1, 7, ("train_loss_raw", "grad_global_norm")),
    ]
    queue = [*first, *events]
    while queue:
        event = queue.pop(0)
        number = recorder.event(event)
        state, made = step_engine(chosen, state, event)
        follow: list[Any] = []
        for decision in made:
            seq = recorder.decision(decision, number, event.at_ns)
            if decision.kind == "intent":
                action = decision.data["action"]
                result = answer(action)
                if result is not None:
                    ok = "error" not in result
                    seen = {"ack_step": state.step, **result} if ok else {}
                    error = None if ok else str(result["error"])
                    follow.append(Finished(event.at_ns + 5, action["id"], ok, seen, error))
            elif decision.kind == "notify_intent":
                keys = [f"{run.id}:{seq}"]
                told = {"channel": "console", "ok": True, "keys": keys, "tries": 1}
                recorder.note("notify_result", state.step, "console: printed", told)
        if isinstance(event, OperatorCommand) and event.command == "reload":
            chosen, loaded = reloader.reload(event, chosen, state)
            follow += loaded
        queue = follow + queue
    run.write_json("state.json", {"rules": {r.id: "OK" for r in chosen.rules}})
    if ended:
        recorder.note("run_end", state.step, "exit code 0", {"exit_code": 0})
    recorder.close()
    return run
