"""Loops that do something unusual with losses, optimizers or weights, measured as they mean it."""

import math

import pytest

pytestmark = pytest.mark.slow

MODEL = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def batch():
    x = torch.randn(16, 8)
    return x, x.sum(1, keepdim=True)

def gradients():
    return [p.grad for p in model.parameters()]
"""

TWO_LOSSES = (
    MODEL
    + """
critic = nn.Linear(8, 1)
first = torch.optim.SGD(model.parameters(), lr=0.05)
second = torch.optim.SGD(critic.parameters(), lr=0.01)
for step in range(6):   # as a GAN: each has its own backward, so each is a step of its own
    x, y = batch()
    first.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    emit(train_loss_raw=loss.item(), grad_global_norm=norm(gradients()))
    first.step()
    second.zero_grad()
    loss = F.mse_loss(critic(x), y)
    loss.backward()
    emit(train_loss_raw=loss.item(), grad_global_norm=norm(p.grad for p in critic.parameters()))
    second.step()
"""
)

NOW_AND_THEN = (
    MODEL
    + """
first = torch.optim.SGD(model[0].parameters(), lr=0.05)
second = torch.optim.SGD(model[2].parameters(), lr=0.01)
for step in range(10):  # the second optimizer steps every other time
    x, y = batch()
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    both = step % 2 == 0
    emit(train_loss_raw=loss.item(),
         grad_global_norm=norm(gradients() if both else [p.grad for p in model[0].parameters()]))
    first.step()
    if both:
        second.step()
"""
)

PHANTOMS = (
    MODEL
    + """
with torch.device("meta"):
    ghost = nn.Linear(4, 4)
ghost(torch.ones(1, 4, device="meta")).sum().backward()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
for p in model.parameters():
    p.grad = torch.zeros_like(p)
optimizer.step()        # as a checkpoint library makes the optimizer's state
optimizer.param_groups[0]["lr"] = 1e-2
for step in range(4):
    x, y = batch()
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    emit(train_loss_raw=loss.item(), grad_global_norm=norm(gradients()), steps_seen=step + 1)
    optimizer.step()
"""
)

RELOADED = (
    MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
kept = {k: v.clone() for k, v in model.state_dict().items()}
for step in range(8):
    x, y = batch()
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    if step == 3:
        model.load_state_dict(kept)
    if step == 5:
        model[0].weight.data = model[0].weight.data.clone() * 2
    old = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moved = norm(p - q for p, q in zip(model.parameters(), old))
    emit(update_norm=moved, update_to_weight=moved / norm(old))
"""
)

ODD_TENSORS = """
table, body = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4).to(torch.bfloat16)
first = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
second = torch.optim.SGD(body.parameters(), lr=1e-2)
for step in range(5):
    first.zero_grad()
    second.zero_grad()
    loss = (body(table(torch.tensor([1, 1, 3])).to(torch.bfloat16)).float() ** 2).mean()
    loss.backward()
    dense = [table.weight.grad.to_dense(), *(p.grad for p in body.parameters())]
    emit(train_loss_raw=loss.item(), grad_global_norm=norm(dense))
    first.step()
    second.step()
"""

NESTED = (
    MODEL
    + """
from torch.utils.checkpoint import checkpoint
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(5):   # a checkpointed block runs a backward inside the backward
    x, y = batch()
    optimizer.zero_grad()
    loss = F.mse_loss(checkpoint(model, x.requires_grad_(), use_reentrant=True), y)
    loss.backward()
    emit(train_loss_raw=loss.item(), grad_global_norm=norm(gradients()))
    optimizer.step()
"""
)

LOOPS = {
    "two-losses": TWO_LOSSES,
    "now-and-then": NOW_AND_THEN,
    "phantoms": PHANTOMS,
    "reloaded": RELOADED,
    "odd-tensors": ODD_TENSORS,
    "nested": NESTED,
}


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_is_measured_as_its_author_would(probed, bare, name):
    """Steps are counted as the loop means them, and each frame holds what the script computes,
    which is what it computes without the probe, to the bit."""
    job = probed.run(LOOPS[name])
    assert job.err == "" and job.output == bare.run(LOOPS[name]).output
    assert [frame["step"] for frame in job.frames] == list(range(len(job.output)))
    for frame, row in zip(job.frames, job.output, strict=True):
        for metric, value in row.items():
            assert math.isclose(frame[metric], value, rel_tol=1e-6), (metric, frame, value)
