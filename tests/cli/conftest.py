"""Runs as the supervisor leaves them behind, and the command line to look at them."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from supervise.cli import invoke as run_cli
from supervise.core.model import Announced, Event, Exited, Frame, Launched
from supervise.runtime import ControlInbox
from supervise.store import Audit, RunDir
from tests.support.recorded_run import Judge, record_run

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


# As nano, with the packs that judge a loss alone: each command loads the policy of its run again.
NANO = """\
version: supervise/v1
policy: nano
mode: enforce
use: [nonfinite, loss_spike]
baseline: {window: 128, min: 64}
savepoints: {every: 25, keep: 4}
budgets: {all: {max: 6}, rollback: {max: 2}, restart: {max: 3, per: 1800s}, lr_scale: {max: 4}}
escalate: {ladder: [undo-update, rollback-and-rewarm, hold], reset_after: 5000}
job: {rollback: in_process, probe_batch: true}
warmup: 64
probation: 100
notify: {console: {min_sev: SEV2}}
"""


@pytest.fixture(scope="session")
def originals() -> dict[str, Path]:
    """The runs that `recorded` has recorded, by all that they depend on."""
    return {}


@pytest.fixture
def recorded(tmp_path, tmp_path_factory, originals):
    """A function that records the story, or other events, under a small nano; see `record_run`.

    What an earlier test recorded is copied; of two runs in one test each is of its own.
    """
    numbers = itertools.count()

    def record(events=None, *, end: int | None = 3, **options) -> RunDir:
        options |= {"begin": (), "ended": end is not None, "code": end or 0}
        events = story() if events is None else events
        key = repr((next(numbers), events, options))
        if key not in originals:
            home = tmp_path_factory.mktemp("original")
            (policy := home / "nano.yaml").write_text(NANO)
            run = record_run(
                home / "run" / "run", events, policy=policy, answer=lambda action: None, **options
            )
            (run.path / "state.json").unlink()
            originals[key] = run.path.parent
        shutil.copytree(originals[key], tmp_path, copy_function=shutil.copy, dirs_exist_ok=True)
        return RunDir.open(tmp_path / "run")

    return record


@pytest.fixture
def alive():
    """A function that holds a run as a living supervisor does."""
    logs = []

    def hold(run):
        logs.append(Audit.open(run.audit_path, run.id, at_ns=0, wall=""))
        return logs[-1]

    yield hold
    for log in logs:
        log.close()


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The working directory of a job. Its Python and its launchers end at once, with an error."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "python3.11", "torchrun", "accelerate", "mpirun", "ssh", "litgpt"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho 'no such option' >&2\nexit 3\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "job" / "package").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "job")
    return tmp_path / "job"


@pytest.fixture
def supervised(keep_run, make_frames, small):
    """A run whose supervisor takes words on a thread, and whose job does what it is told."""
    frames, over = make_frames(0, *[2.0] * 20), threading.Event()
    run = keep_run(frames, ended=False)
    (run.path / "quarantine.json").write_text('{"entries": [{"kind": "shard", "name": "a.tar"}]}')
    failure = {"error": "no room for it"}
    judge = Judge(run, small, answer=lambda a: failure if a["verb"] == "savepoint" else {})

    def loop():
        commands = ControlInbox(run.path, time.monotonic_ns)
        judge.judge(*frames)
        while not over.wait(0.01):
            judge.judge(*commands.poll())

    thread = threading.Thread(target=loop)
    thread.start()
    yield run
    over.set()
    thread.join()
    judge.recorder.close()
