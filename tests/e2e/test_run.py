"""supervise run, end to end, on a small job: what passes through, what is kept, what is done."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.supervised_run import Supervise, sha, tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

STEPS = 150


def impatient(folder: Path, seconds: int) -> Path:
    """Write a policy that takes so many seconds without a step for a hang."""
    policy = folder / "impatient.yaml"
    policy.write_text(f"""\
version: supervise/v1
policy: impatient
mode: enforce
use: [hang]
override: {{hang.stalled: {{after: {{min: {seconds}s, p99_multiple: 8}}}}}}
runbooks: {{stop-and-page: [snapshot, notify, stop: {{grace: 2s, if_idle: 2s}}]}}
""")
    return policy


@pytest.fixture(scope="module", autouse=True)
def hanging(tmp_path_factory):
    """A job that hangs, beside the other tests: it mostly waits. Returns the command line and it.

    A probe whose last beat is younger than ten seconds is waited for twenty.
    """
    command = Supervise(tmp_path_factory.mktemp("hanging"))
    options = ("--policy", impatient(command.home, 11), "--run-dir", "run", "--drill", "hang@60")
    yield command, command.start(*options, "--", *tiny("--steps", 200))
    command.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A healthy job without us."""
    command = Supervise(tmp_path_factory.mktemp("alone"))
    return command.bare(tiny("--steps", STEPS, "--exit", 3))


def test_a_healthy_job_is_left_alone(alone, supervise):
    run = supervise.run(job=tiny("--steps", STEPS, "--exit", 3))
    names = "train_loss_raw,grad_global_norm,learning_rate,update_to_weight,metrics_ingest_lag"
    rows = supervise.rows("run", "--metrics", names)

    assert "nano (observe)" in run.stderr
    assert run.returncode == alone.returncode == 3
    assert run.stdout == alone.stdout
    assert run.actions == [] and run.severities <= {"SEV2"}
    assert (run.state["tier"], run.state["step"]) == ("T1", STEPS - 1)
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    for name in ("train_loss_raw", "grad_global_norm"):
        assert all(float(row[name]) > 0 for row in rows), name
    moved = [float(row["update_to_weight"]) for row in rows if row["update_to_weight"]]
    assert len(moved) > STEPS // 8  # measured less often where it would cost too much
    assert min(moved) > 0
    assert float(rows[-1]["metrics_ingest_lag"]) >= 0  # the supervisor's own
    assert float(rows[0]["learning_rate"]) == pytest.approx(1e-2 / 20)
    run_id = run.records[0]["run"]
    assert not [path for path in Path("/dev/shm").iterdir() if run_id in path.name]


def test_a_killed_supervisor_does_not_harm_the_job(supervise, alone, tmp_path):
    out = tmp_path / "out.txt"
    job = tiny("--steps", STEPS, "--sleep", 0.01)
    with out.open("w") as stdout:
        options = {"stdout": stdout, "stderr": subprocess.DEVNULL}
        watcher = supervise.start("--policy", "nano", "--run-dir", "run", "--", *job, **options)
        wait_until(lambda: "step 50" in out.read_text(), "step 50")
        watcher.kill()
        watcher.wait()
    wait_until(lambda: "sha" in out.read_text(), "the end of the job")

    assert sha(out.read_text()) == sha(alone.stdout)
    status = supervise("status", "run").stdout
    assert "its supervisor died" in status or "so is its supervisor" in status
    supervise.prove()


# A warm-up in the main thread, which then waits for the rest; one stall behind step 110.
MOVES = """
import threading
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def train(first, last):
    for step in range(first, last):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()
        time.sleep(3 if step == 110 else 0.01)
train(0, 40)
thread = threading.Thread(target=train, args=(40, 180))
thread.start()
thread.join()
print("done")
"""


def test_a_job_that_goes_on_after_a_stall_is_not_stopped(supervise, script, tmp_path):
    """Training moves to another thread, which is no hang; it stalls there for longer than the
    limit, and goes on before the stop is due."""
    run = supervise.run("--policy", impatient(tmp_path, 2), job=script(MOVES))

    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
    assert len(run.kinds("rule", "fired")) == 1
    assert run.kinds("abort", "withdrawn") and run.actions == []


def test_a_hang_is_stopped_with_evidence(hanging):
    command, watcher = hanging
    watcher.communicate(timeout=120)
    run = command.run_of()

    assert watcher.returncode == 78
    assert "stop" in run.actions
    bundle = next((run.directory / "incidents").rglob("manifest.json")).parent
    assert (bundle / "metrics.csv").read_text().count("\n") > 50
    stacks = "".join(path.read_text() for path in bundle.glob("stacks-*.txt"))
    assert "faults/process.py" in stacks and "tiny.py" in stacks
