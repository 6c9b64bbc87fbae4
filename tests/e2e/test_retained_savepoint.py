"""An approval comes later than savepoints reach: the rollback finds the retained one."""

from __future__ import annotations

import pytest

from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: mine
mode: approve
warmup: 10
probation: 20
savepoints: {every: 10, keep: 4}
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 100.0}}
rules: [{id: blown, when: high, sev: SEV1, run: back}]
runbooks:
  back: [snapshot, rollback: {at_least: 10, rewarm: 0}, verify: {within: 100, clear_for: 20}]
budgets: {all: {max: 4}, rollback: {max: 2}}
"""
BLOWN_AT = 60  # steps, and once: after going back it learns on
JOB = """\
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
while step < 50000 and not os.path.exists("enough"):
    x = torch.randn(32, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step == 60 and not os.path.exists("blown"):
        open("blown", "w").close()
        with torch.no_grad():
            model.weight.add_(100.0)
    is_slow = os.path.exists("blown") and not os.path.exists("asked")
    time.sleep(0.2 if is_slow else 0.01)  # till then the savepoints of before must be there
"""


@pytest.mark.chaos
def test_a_late_approval_still_finds_its_savepoint(supervise, script):
    """At the time of the answer, four savepoints reach no further back than 40 steps."""
    (supervise.home / "mine.yaml").write_text(POLICY)
    watcher = supervise.start("--policy", "mine.yaml", "--run-dir", "run", "--", *script(JOB))
    run = supervise.run_of()

    (request,) = wait_until(lambda: run.state.get("approvals"), "an approval request")
    (supervise.home / "asked").touch()
    (rollback,) = (one["args"] for one in request["steps"] if one["verb"] == "rollback")
    before = BLOWN_AT - 10
    assert rollback["before_step"] == before
    wait_until(lambda: run.state["step"] > BLOWN_AT + 60, "60 more steps")
    allowed = supervise("approve", "run", "ask-1", "--by", "anna")
    assert allowed.returncode == 0, allowed.stderr
    wait_until(lambda: run.kinds("verify", "passed") or run.kinds("abort"), "the verification")
    (supervise.home / "enough").touch()
    watcher.communicate(timeout=60)

    assert run.kinds("abort") == []
    (done,) = (r for r in run.kinds("commit") if "rollback" in r["reason"])
    assert before - 20 <= done["data"]["result"]["step"] < before
    assert done["data"]["result"]["from_step"] > BLOWN_AT + 60
    run.prove()
