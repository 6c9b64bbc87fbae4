"""supervise run, end to end, on a small job: what passes through, what is kept, what is done."""

from __future__ import annotations

import csv
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import Supervise, tiny

pytestmark = pytest.mark.slow


def sha(stdout: str) -> str:
    found = re.search(r"sha ([0-9a-f]+)", stdout)
    assert found, stdout
    return found[1]


STEPS = 150


@pytest.fixture(scope="module")
def alone():
    """A healthy job that nobody watches."""
    job = tiny("--steps", STEPS, "--exit", 3)
    return subprocess.run(job, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The same job under nano."""
    supervise = Supervise(tmp_path_factory.mktemp("healthy"))
    return supervise.run("--policy", "nano", job=tiny("--steps", STEPS, "--exit", 3))


def test_a_healthy_job_is_left_alone(alone, healthy):
    """Same output, same weights, same exit code as without us; no action, no serious incident."""
    run = healthy

    assert run.returncode == alone.returncode == 3
    assert run.stdout == alone.stdout
    assert run.actions == []
    assert run.severities <= {"SEV2"}
    assert run.state["tier"] == "T1"
    assert run.state["step"] == STEPS - 1


def test_every_frame_is_exported(supervise, healthy):
    """One row per step and rank, columns named by metric ids, none missing."""
    done = supervise(
        "export",
        str(healthy.directory),
        "--csv",
        "--metrics",
        "train_loss_raw,grad_global_norm,learning_rate,update_to_weight",
    )
    rows = list(csv.DictReader(done.stdout.splitlines()))

    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    assert all(float(row["train_loss_raw"]) > 0 for row in rows)
    assert all(float(row["grad_global_norm"]) > 0 for row in rows)
    assert float(rows[0]["learning_rate"]) == pytest.approx(1e-2 / 20)
    assert all(float(row["update_to_weight"]) > 0 for row in rows)


def test_a_nan_gradient_never_reaches_a_weight(supervise, tiny_job):
    """The standing order skips the step; the run ends with finite weights."""
    run = supervise.run("--policy", "nano", "--drill", "nan_grad@100", job=tiny_job("--steps", 200))

    assert run.returncode == 0
    assert "finite True" in run.stdout
    notes = run.kinds("note", "standing-order")
    assert notes
    assert notes[0]["data"]["at_step"] == 100


SKIPS = """
import hashlib, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(60):
    x = torch.randn(16, 8)
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    (loss * (float("nan") if step in (20, 40) else 1.0)).backward()
    if torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
        optimizer.step()
    optimizer.zero_grad()
print("sha", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


def test_a_job_that_skips_by_itself_is_left_alone(supervise, tmp_path):
    """The standing order keeps no good update from the weights for a batch that never got there."""
    script = tmp_path / "skips.py"
    script.write_text(SKIPS)
    job = [sys.executable, str(script)]
    alone = subprocess.run(job, capture_output=True, text=True, check=True)
    run = supervise.run("--policy", "nano", job=job)

    assert run.returncode == 0
    assert sha(run.stdout) == sha(alone.stdout)
    assert not run.kinds("note", "standing-order")
    assert run.state["step"] == 57


def test_without_a_policy_the_run_is_observed(supervise, tiny_job, alone):
    """`supervise -- CMD` uses nano in observe mode; weights are those of the bare job."""
    done = supervise("--", *tiny_job("--steps", STEPS))

    assert done.returncode == 0
    assert sha(done.stdout) == sha(alone.stdout)
    assert "nano (observe)" in done.stderr
    assert len(list((supervise.home / "runs").iterdir())) == 1


def test_a_killed_supervisor_does_not_harm_the_job(supervise, tiny_job, alone, tmp_path):
    """kill -9 in mid-run: training goes on to its end, with the weights of an unwatched run."""
    job = tiny_job("--steps", STEPS, "--sleep", 0.02)
    run_dir = tmp_path / "run"
    out = tmp_path / "out.txt"
    with out.open("w") as stdout:
        watcher = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "supervise",
                "--policy",
                "nano",
                "--run-dir",
                str(run_dir),
                "--",
                *job,
            ],
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            env=supervise.env,
        )
        deadline = time.monotonic() + 60
        while "step 50" not in out.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        watcher.kill()
        watcher.wait()
    while "sha" not in out.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)

    assert sha(out.read_text()) == sha(alone.stdout)
    status = supervise("status", str(run_dir))
    assert "supervisor is gone" in status.stdout or "so is its supervisor" in status.stdout
    supervise.prove(run_dir)


def test_signals_pass_through(supervise, tiny_job):
    """TERM to us ends the job by TERM; we exit 128+15."""
    watcher = supervise.start("--run-dir", "run", "--", *tiny_job("--steps", 9999, "--sleep", 0.02))
    assert watcher.stdout is not None
    watcher.stdout.readline()
    watcher.send_signal(signal.SIGTERM)
    watcher.communicate(timeout=60)

    assert watcher.returncode == 128 + signal.SIGTERM


def test_nothing_is_left_in_shared_memory(healthy):
    """The run's directory in /dev/shm goes with the run."""
    run_id = healthy.records[0]["run"]

    assert not [path for path in Path("/dev/shm").iterdir() if run_id in path.name]


@pytest.fixture
def impatient(tmp_path):
    """Writes a policy that takes some seconds without a step for a hang; returns its path."""

    def write(seconds):
        policy = tmp_path / "impatient.yaml"
        policy.write_text(
            "version: supervise/v1\n"
            "policy: impatient\n"
            "mode: enforce\n"
            "use: [hang]\n"
            "override:\n"
            f"  hang.stalled: {{after: {{min: {seconds}s, p99_multiple: 8}}}}\n"
            "runbooks:\n"
            "  stop-and-page: [snapshot, notify, {stop: {grace: 2s, if_idle: 2s}}]\n"
        )
        return str(policy)

    return write


def test_training_that_moves_to_another_thread_is_no_hang(supervise, impatient, tmp_path):
    """A warm-up in the main thread, which then waits for the rest: nothing is wrong with that."""
    job = tmp_path / "moves.py"
    job.write_text(
        "import threading, time, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "def train(steps, pause):\n"
        "    for _ in range(steps):\n"
        "        optimizer.zero_grad()\n"
        "        model(torch.ones(2, 4)).pow(2).mean().backward()\n"
        "        optimizer.step()\n"
        "        time.sleep(pause)\n"
        "train(40, 0.01)\n"
        "thread = threading.Thread(target=train, args=(140, 0.05))\n"
        "thread.start()\n"
        "thread.join()\n"
        "print('done')\n"
    )
    run = supervise.run("--policy", impatient(3), job=[sys.executable, str(job)], name="moved")

    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
    assert run.actions == [] and run.severities == set()


def test_a_job_that_goes_on_after_a_stall_is_not_stopped(supervise, impatient, tmp_path):
    """It stood still for longer than the limit, and trains again before the stop is due."""
    job = tmp_path / "stalls.py"
    job.write_text(
        "import time, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for step in range(140):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2, 4)).pow(2).mean().backward()\n"
        "    optimizer.step()\n"
        "    time.sleep(4.5 if step == 40 else 0.05)\n"
        "print('done')\n"
    )
    run = supervise.run("--policy", impatient(3), job=[sys.executable, str(job)], name="stalled")

    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
    assert run.kinds("rule", "fired"), "it was no stall at all"
    assert run.kinds("abort", "withdrawn")


def test_a_hang_is_stopped_with_evidence(supervise, tiny_job, impatient):
    """A job that makes no step any more is snapshotted, stopped, and a person is asked: exit 78.

    A probe that was heard of within ten seconds would be waited for twenty.
    """
    run = supervise.run(
        "--policy", impatient(11), "--drill", "hang@60", job=tiny_job("--steps", 200), name="hung"
    )

    assert run.returncode == 78
    assert "stop" in run.actions
    bundle = next((run.directory / "incidents").rglob("manifest.json"))
    assert bundle.parent.joinpath("metrics.csv").read_text().count("\n") > 50
    stacks = "".join(path.read_text() for path in bundle.parent.glob("stacks-*.txt"))
    assert "hang.py" in stacks
    assert "tiny.py" in stacks


# Unlike `print`, `os.write` may come within itself: the next signal is sent at the first word.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"no\\n"))
os.write(1, b"up\\n")
time.sleep(60)
"""


def test_a_third_term_is_on_record_as_what_it_did(supervise):
    """It was not passed on: the job was killed."""
    running = supervise.start("--run-dir", "run", "--", sys.executable, "-c", STUBBORN)
    for _ in range(3):
        assert running.stdout.readline()
        running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=60)

    assert running.returncode == 137, said
    noted = [r["reason"] for r in supervise.records("run") if r["data"].get("what") == "signal"]
    assert noted == [
        "SIGTERM was passed on",
        "SIGTERM was passed on",
        "SIGTERM came as number 3 of INT and TERM: all of the job was killed",
    ]


def test_a_typed_interrupt_is_on_record(supervise, tmp_path):
    """Ctrl-C goes from the terminal straight to the job; its end was asked for by a person."""
    code = "import time; print('running', flush=True); time.sleep(60)"
    command = [sys.executable, "-m", "supervise", "--run-dir", "run", "--", sys.executable]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(supervise.home)
        os.execve(sys.executable, [*command, "-c", code], supervise.env)
    seen = b""
    try:
        while b"running\r\n" not in seen:
            seen += os.read(terminal, 4096)
        os.write(terminal, b"\x03")
        while select.select([terminal], [], [], 60)[0] and (more := read(terminal)):
            seen += more
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 130, seen
    [noted] = [r for r in supervise.records("run") if r["data"].get("what") == "signal"]
    assert noted["reason"] == "SIGINT was typed at the terminal"
    assert noted["data"]["details"]["typed"] is True


def read(terminal):
    """Return what is there, b"" once nobody has the terminal open any more."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
