"""Several trainings in one process, as in a sweep or a cross-validation."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SWEEP = """
import hashlib, sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
teacher = torch.randn(16, 10)
F = torch.nn.functional

def train(model, optimizer, steps):
    step = 0
    while step < steps:
        x = torch.randn(64, 16)
        loss = F.cross_entropy(model(x), (x @ teacher).argmax(1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            print("first", loss.item())
        step += 1

def new():
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))

model = new()
for fold in range(3):
    if "again" not in sys.argv:
        model = new()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, optimizer, 200)
print("sha", hashlib.sha256(model[0].weight.detach().numpy().tobytes()).hexdigest())
"""


@pytest.fixture
def sweep(supervise, tmp_path):
    """Run it bare and supervised; returns what it printed, the run, and the rows of its frames."""
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP)

    def both(*args):
        job = [sys.executable, str(script), *args]
        alone = subprocess.run(job, capture_output=True, text=True, check=True)
        run = supervise.run("--policy", "nano", job=job)
        assert (run.returncode, run.stdout) == (0, alone.stdout)
        rows = supervise("export", str(run.directory), "--csv").stdout.splitlines()
        return alone.stdout, run, list(csv.DictReader(rows))

    return both


def test_each_training_is_judged_by_itself(sweep):
    """A new model's loss is no spike of the old one's, and there is nothing to go back to."""
    printed, run, rows = sweep()

    assert run.actions == []
    assert run.severities <= {"SEV2"}
    told = [note["data"]["last_step"] for note in run.kinds("note", "program")]
    assert told == [199, 399]
    assert [int(row["step"]) for row in rows] == list(range(600))
    begins = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("first")]
    assert [float(rows[at]["train_loss_raw"]) for at in (0, 200, 400)] == pytest.approx(begins)
    assert [float(rows[at]["tokens_seen"]) for at in (199, 200, 599)] == [12800, 64, 12800]
    assert [rows[at]["step_time"] for at in (0, 200, 400)] == ["", "", ""]


def test_a_new_optimizer_of_the_same_model_goes_on(sweep):
    """As some jobs make one for each epoch."""
    _, run, rows = sweep("again")

    assert run.kinds("note", "program") == []
    assert float(rows[599]["tokens_seen"]) == 600 * 64
