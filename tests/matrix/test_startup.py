"""What jobs do before their first step, and what looks like a step and is none."""

import pytest

pytestmark = pytest.mark.slow

REHEARSALS = """
import copy
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

def build():
    return nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 30))

def loss_of(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

{ghost}
model = build()
{early}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

{mock}
# A checkpoint library makes the optimizer's state with a step of rate 0 over gradients of 0.
get_optimizer_state_dict(model, optimizer)
assert optimizer.state

schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 3))   # begins at 0
book = Ledger(optimizer)
step = 0
while step < 8:
    pass_by(step)
    total = 0.0
    for _ in range(2):
        loss = loss_of(model, torch.randint(0, 30, (4, 9))) / 2
        loss.backward()
        total += loss.item()
    book.before(train_loss_raw=total, grad_global_norm=book.gradient(), tokens_per_update=64,
                steps_seen=step + 1, tokens_seen=64 * (step + 1))
    optimizer.step()
    book.after()
    optimizer.zero_grad()
    schedule.step()
    step += 1
finish(model)
"""
# Shapes are tried out on a model that holds nothing.
GHOST = """
with torch.device("meta"):
    ghost = build()
    loss_of(ghost, torch.zeros(2, 5, dtype=torch.long)).backward()
"""
# Memory is tried out with a batch of zeros, twice, and nothing of it is kept.
MOCK = """
for _ in range(2):
    loss_of(model, torch.zeros(16, 9, dtype=torch.long)).backward()
    optimizer.zero_grad()
"""
EARLY = """
loss_of(model, torch.ones(3, 9, dtype=torch.long)).backward()
model.zero_grad()
"""
STARTS = {
    "meta": {"ghost": GHOST, "early": "", "mock": ""},
    "mock": {"ghost": "", "early": "", "mock": MOCK},
    "mock-before-the-optimizer": {"ghost": "", "early": EARLY, "mock": ""},
    "all": {"ghost": GHOST, "early": EARLY, "mock": MOCK},
}


@pytest.mark.parametrize("start", STARTS)
def test_rehearsals_are_no_steps(pair, start):
    """The first frame is that of the first step, with its own loss and tokens, rate 0 and all."""
    job = pair.run(REHEARSALS.format(**STARTS[start]))
    assert job.frames[0]["learning_rate"] == 0 and job.frames[0]["update_norm"] == 0


def test_what_was_rehearsed_does_not_hinder_a_rollback(pair):
    """Least of all a model that holds nothing and is still there."""
    script = REHEARSALS.format(**STARTS["all"])
    again, answer = pair.back(script, at=7, to=5)
    assert answer.ok, answer.error
    assert again.output[-1] == pair.bare.run(script).output[-1]
