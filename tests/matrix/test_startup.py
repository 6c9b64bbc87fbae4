"""Rehearsals before the first step, which look like steps and are none."""

REHEARSALS = """
import copy
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

def build():
    return nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 30))

def loss_of(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

# Shapes are tried out on a model that holds nothing.
with torch.device("meta"):
    ghost = build()
    loss_of(ghost, torch.zeros(2, 5, dtype=torch.long)).backward()
model = build()
loss_of(model, torch.ones(3, 9, dtype=torch.long)).backward()
model.zero_grad()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

# Memory is tried out with a batch of zeros, twice, and nothing of it is kept.
for _ in range(2):
    loss_of(model, torch.zeros(16, 9, dtype=torch.long)).backward()
    optimizer.zero_grad()
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


def test_rehearsals_are_no_steps(pair):
    """The first frame is that of the first step; and a model that holds nothing does not hinder a
    rollback."""
    job = pair.run(REHEARSALS)
    assert job.frames[0]["learning_rate"] == 0 and job.frames[0]["update_norm"] == 0

    pair.check_rollback(REHEARSALS, at=7, to=5)
