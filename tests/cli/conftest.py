"""Runs as the supervisor leaves them behind, and the command line to look at them."""

from __future__ import annotations

import itertools

import pytest

from supervise.catalog import load_policy
from supervise.cli import invoke as run_cli
from supervise.core import start_engine, step_engine
from supervise.core.model import Announced, Event, Exited, Frame, Launched
from supervise.errors import StoreError
from supervise.store import Audit, Journal, Recorder, RunDir

WALL = "2026-01-05T10:11:12.345Z"
NAMES = ("train_loss_raw", "grad_global_norm", "learning_rate", "update_norm", "update_skipped")
NAN = float("nan")


@pytest.fixture
def supervise(capsys, monkeypatch):
    """A function that runs a command line and returns `(exit code, stdout, stderr)`."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*argv: object) -> tuple[int, str, str]:
        code = run_cli([str(arg) for arg in argv])
        caught = capsys.readouterr()
        return code, caught.out, caught.err

    return call


def story() -> list[Event]:
    """A run of 120 steps under the nano policy whose loss becomes NaN at step 100."""
    events: list[Event] = [Launched(1, 2**22 + 7, 0), Announced(2, 0, 1, 2**22 + 7, NAMES)]
    for step in range(120):
        loss = NAN if step >= 100 else 2.5 + 0.01 * (step % 7)
        values = (loss, 1.0 + 0.01 * (step % 5), 1e-3, 0.1 + 0.001 * (step % 3), 0.0)
        events.append(Frame(10 + step * 1_000_000, 0, 0, step, values))
    return [*events, Exited(10**9, 3)]


@pytest.fixture
def recorded(tmp_path):
    """A function that records events as the supervisor does, and returns the run directory.

    `end` is the exit code of the run, None where its supervisor was killed; from event number
    `fails_at` on the journal cannot be written; `max_bytes` is its limit.
    """

    def record(
        events=None,
        *,
        end: int | None = 3,
        fails_at: int | None = None,
        max_bytes: float | None = None,
    ) -> RunDir:
        policy = load_policy("nano")
        run = RunDir.create(tmp_path / "run", argv=["python", "train.py"], policy=policy, wall=WALL)
        audit = Audit.open(run.audit_path, run.id, at_ns=0, wall=WALL)
        ticks = itertools.count()
        recorder = Recorder(
            Journal.open(run.journal_path), audit, lambda: (next(ticks), WALL), print
        )
        recorder.note("run_start", -1, "the job was started", {"policy_digest": policy.digest})
        state = start_engine(policy)
        for at, event in enumerate(story() if events is None else events):
            if at == fails_at:
                recorder.failed(StoreError("cannot write the journal: No space left on device"))
            number = recorder.event(event)
            state, decisions = step_engine(policy, state, event)
            for decision in decisions:
                recorder.decision(decision, number, event.at_ns)
            recorder.limit_journal(max_bytes)
        if end is not None:
            data = {"exit_code": end, "journal": recorder.journal}
            recorder.note("run_end", state.step, f"exit code {end}", data)
        recorder.close()
        return run

    return record


NO_RUN = ["audit verify", "audit show", "replay", "export --csv", "status", "why", "record"]
NO_RUN += ["why-not --rule r --step 1", "release", "reload"]


@pytest.fixture(params=NO_RUN)
def looking(request):
    """Each command that looks at a run, as words."""
    return request.param.split()
