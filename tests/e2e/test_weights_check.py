"""Bad batches, which cost a run no step, and damaged weights, which are taken back."""

from __future__ import annotations

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
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 4.0}}
rules: [{id: high, when: high, sev: SEV1, run: back, for: 2}]
runbooks:
  back:
    steps: [check_weights, pause, snapshot, {rollback: {at_least: 5, rewarm: 0}}, resume]
    verify: {within: 60, clear_for: 5}
budgets: {all: {max: 4}, rollback: {max: 2}}
"""
BAD_BATCHES, DAMAGE = range(60, 64), 200
JOB = f"""\
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(2000):
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
    time.sleep(0.02)
    if step % 10 == 0 and '"what":"passed"' in Path("run/audit.log").read_text():
        break  # on a busy machine it takes longer to act
"""


def test_bad_batches_are_left_alone_and_damaged_weights_are_not(supervise, script):
    (supervise.home / "mine.yaml").write_text(POLICY)
    run = supervise.run("--policy", "mine.yaml", job=script(JOB))

    assert run.intents[:2] == ["check_weights", "snapshot"], run.stderr
    withdrawn = run.kinds("abort", "withdrawn")[0]  # a late answer on a busy machine is another
    assert withdrawn["step"] < DAMAGE and "weights show no damage" in withdrawn["reason"]
    assert run.actions == ["pause", "rollback", "resume"]
    assert run.kinds("verify", "passed")
    run.prove()
