"""One run: bad batches, which cost it no step, and then damaged weights, which are taken back."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: mine
mode: enforce
warmup: 10
probation: 10
savepoints: {every: 10, keep: 4}
job: {rollback: in_process, probe_batch: true}
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 4.0}
rules:
  - {id: high, when: high, sev: SEV1, run: back, for: 2}
runbooks:
  back:
    steps: [check_weights, pause, snapshot, {rollback: {at_least: 5, rewarm: 0}}, resume]
    verify: {within: 60, clear_for: 5}
budgets: {all: {max: 4}, rollback: {max: 2}}
"""
BAD_BATCHES, DAMAGE = range(60, 64), 100
JOB = f"""\
import time, torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(140):
    x = torch.randn(64, 8)
    y = (-x if step in {BAD_BATCHES} else x)[:, :4].argmax(1)
    loss = F.cross_entropy(2 * model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3 if step < 50 else 0.02)
    optimizer.step()
    if step == {DAMAGE}:
        with torch.no_grad():
            model.weight.neg_()
    time.sleep(0.01)
"""


def test_bad_batches_are_left_alone_and_damaged_weights_are_not(supervise):
    (supervise.home / "mine.yaml").write_text(POLICY)
    (supervise.home / "train.py").write_text(JOB)
    job = [sys.executable, "train.py"]
    run = supervise.run("--policy", "mine.yaml", job=job)

    assert run.intents[:2] == ["check_weights", "snapshot"], run.stderr
    withdrawn = run.kinds("abort", "withdrawn")[0]  # a late answer on a busy machine is another
    assert withdrawn["step"] < BAD_BATCHES.start + 15 and "weights are good" in withdrawn["reason"]
    assert run.actions == ["pause", "rollback", "resume"]
    assert run.kinds("verify", "passed")
    run.prove()
