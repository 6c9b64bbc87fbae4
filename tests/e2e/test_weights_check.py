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
BAD_BATCHES, DAMAGE = range(60, 64), 100
JOB = f"""\
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
    time.sleep(0.02)
"""


def test_bad_batches_are_left_alone_and_damaged_weights_are_not(supervise, script):
    (supervise.home / "mine.yaml").write_text(POLICY)
    run = supervise.run("--policy", "mine.yaml", job=script(JOB))

    assert run.intents[:2] == ["check_weights", "snapshot"], run.stderr
    withdrawn = run.kinds("abort", "withdrawn")[0]  # a late answer on a busy machine is another
    assert (
        withdrawn["step"] < BAD_BATCHES.start + 15
        and "weights show no damage" in withdrawn["reason"]
    )
    assert run.actions == ["pause", "rollback", "resume"]
    assert run.kinds("verify", "passed")
    run.prove()


FLIP = 160
CLASSIFIER = f"""\
chance = torch.Generator().manual_seed(3)
centres = 0.25 * torch.randn(10, 1, 8, 8, generator=chance)
layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU()
model = nn.Sequential(*layers, nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for step in range(260):
    y = torch.randint(0, 10, (64,), generator=chance)
    x = centres[y] + 0.5 * torch.randn(64, 1, 8, 8, generator=chance)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == {FLIP}:
        flat = model[0].weight.data.view(-1)
        flipped = (flat.view(torch.int32) ^ (1 << 26)).view(torch.float32).abs()
        at = int(flipped.masked_fill(flipped > 64, 0).argmax())
        flat[at : at + 1].view(torch.int32).bitwise_xor_(1 << 26)
    time.sleep(0.01)
"""


@pytest.mark.chaos
def test_a_flipped_bit_that_costs_a_little_for_good_is_taken_back(supervise, script):
    run = supervise.run("--policy", "nano", job=script(CLASSIFIER))

    assert run.actions == ["pause", "rollback", "resume"], run.stderr
    assert "SEV1 inc-1: One weight moved alone, and the loss is higher for it" in run.stderr
    run.prove()
