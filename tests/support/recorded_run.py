"""Frames, a small policy, and a run directory as the supervisor leaves it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from supervise.catalog import load_policy
from supervise.core import initial_state
from supervise.core import step as step_engine
from supervise.core.model import Announced, Finished, Frame, Launched, OperatorCommand, Policy
from supervise.errors import StoreError
from supervise.store import Audit, Journal, Recorder, Reloader, RunDir

WALL = "2026-01-05T10:11:12.345Z"
SECOND = 1_000_000_000
BEGIN = (Launched(1, 2**22 + 7, 0), Announced(2, 0, 1, 7, ("train_loss_raw", "grad_global_norm")))

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


@cache
def shipped_policy(name: str, mode: str | None = None) -> Policy:
    """Return a shipped policy, loaded once: it cannot be changed, and loading takes 0.1 s."""
    return load_policy(name, mode=mode)


def policy_of(name_or_path: Path | str, mode: str | None = None) -> Policy:
    """Return a policy, by the name of a shipped one or from a file of a test."""
    load = load_policy if isinstance(name_or_path, Path) else shipped_policy
    return load(name_or_path, mode=mode)


class Judge:
    """Judges events as the supervisor does, and records both.

    `answer` returns the result of an action, None for one without an outcome; a result with `error`
    is a failed action.
    """

    def __init__(
        self,
        run: RunDir,
        policy: Path | str,
        *,
        mode: str | None = None,
        answer: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] = lambda action: {},
    ) -> None:
        self.run, self.policy, self._answer = run, policy_of(policy, mode), answer
        audit, ticks = Audit.open(run.audit_path, run.id, at_ns=0, wall=WALL), itertools.count()
        journal = Journal.open(run.journal_path)
        self.recorder = Recorder(journal, audit, lambda: (next(ticks), WALL), print)
        self.reloader = Reloader(run, self.policy, load_policy, str(policy), mode)
        self.state = initial_state(self.policy)

    def judge(self, *events: Any) -> None:
        """Judge events and what follows from each: outcomes of actions, a reload."""
        for event in events:
            number = self.recorder.record_event(event)
            self.state, made = step_engine(self.policy, self.state, event)
            follow = [self._outcome(decision, number, event.at_ns) for decision in made]
            if isinstance(event, OperatorCommand) and event.command == "reload":
                self.policy, loaded = self.reloader.reload(event, self.policy, self.state)
                follow += loaded
            self.judge(*(each for each in follow if each is not None))

    def _outcome(self, decision: Any, number: int, at_ns: int) -> Finished | None:
        seq = self.recorder.record_decision(decision, number, at_ns)
        if decision.kind == "notify_intent":
            keys = [f"{self.run.id}:{seq}"]
            told = {"channel": "console", "ok": True, "keys": keys, "tries": 1}
            self.recorder.note("notify_result", self.state.step, "console: printed", told)
        action = decision.data["action"] if decision.kind == "intent" else None
        result = None if action is None else self._answer(action)
        if result is None:
            return None
        ok = "error" not in result
        seen = {"ack_step": self.state.step, **result} if ok else {}
        return Finished(at_ns + 5, action["id"], ok, seen, None if ok else str(result["error"]))


def record_run(
    directory: Path,
    events: Iterable[Any],
    *,
    policy: Path | str,
    begin: Iterable[Any] = BEGIN,
    ended: bool = True,
    code: int = 0,
    fails_at: int | None = None,
    max_bytes: float | None = None,
    **options: Any,
) -> RunDir:
    """Record a run under a policy, and return the run directory.

    Without an end its supervisor was killed. From event number `fails_at` on the journal cannot be
    written; `max_bytes` is its limit. Other options are those of `Judge`.
    """
    chosen = policy_of(policy, options.get("mode"))
    run = RunDir.create(directory, argv=["python", "train.py"], policy=chosen, wall=WALL)
    judge = Judge(run, policy, **options)
    started = {"policy": chosen.name, "policy_digest": chosen.digest, "mode": chosen.mode}
    judge.recorder.note("run_start", -1, "the job was started", started | {"channels": ["console"]})
    for count, event in enumerate([*begin, *events]):
        if count == fails_at:
            judge.recorder.record_failure(
                StoreError("cannot write the journal: No space left on device")
            )
        judge.judge(event)
        judge.recorder.limit_journal(max_bytes)
    run.write_json("state.json", {"rules": {r.id: "OK" for r in judge.policy.rules}})
    if ended:
        data = {"exit_code": code, "journal": judge.recorder.journal}
        judge.recorder.note("run_end", judge.state.step, f"exit code {code}", data)
    judge.recorder.close()
    return run
