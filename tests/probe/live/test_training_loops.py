"""The ways in which people write a training loop, each measured as its author would."""

import math

import pytest

MODEL = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def batch():
    x = torch.randn(16, 8)
    return x, x.sum(1, keepdim=True)

def gradients():
    return [p.grad for p in model.parameters()]
"""

ACCUMULATION = (
    MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(8):
    total = 0.0
    for _ in range(4):
        x, y = batch()
        loss = F.mse_loss(model(x), y) / 4
        loss.backward()
        total += loss.item()
    tell(train_loss_raw=total, grad_global_norm=norm(gradients()))
    optimizer.step()
    optimizer.zero_grad()
"""
)

SCALED_ACCUMULATION = (
    MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(8):
    total = 0.0
    for _ in range(2):
        x, y = batch()
        loss = F.mse_loss(model(x), y)
        (scaler.scale(loss) / 2).backward()
        total += loss.item() / 2
    scaler.unscale_(optimizer)
    tell(train_loss_raw=total, grad_global_norm=norm(gradients()))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
)

CLIPPED_IN_PARTS = (
    MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(9):
    x, y = batch()
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    true = norm(gradients())
    if step % 3 == 0:    # a part only
        nn.utils.clip_grad_norm_(model[0].parameters(), 1e-3)
    elif step % 3 == 1:  # both parts, and once more
        nn.utils.clip_grad_norm_(model[0].parameters(), 1e-3)
        nn.utils.clip_grad_norm_(model[2].parameters(), 1e-3)
        nn.utils.clip_grad_norm_(model[2].parameters(), 1e-4)
    else:                # more than the optimizer has, from a list
        nn.utils.clip_grad_norm_([*model.parameters(), nn.Parameter(torch.ones(3))], 1e-3)
    tell(grad_global_norm=true)
    optimizer.step()
"""
)

CLIPPED_OTHERWISE = (
    MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(9):
    x, y = batch()
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    tell(grad_global_norm=norm(gradients()))
    if step % 3 == 0:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    elif step % 3 == 1:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=float("inf"))
    else:
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, total)
    optimizer.step()
"""
)

GROUPS = (
    MODEL
    + """
optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 1e-2},
                               {"params": model[2].parameters(), "lr": torch.tensor(1e-3)}])
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
extra = nn.Parameter(torch.ones(2))
for step in range(10):
    if step == 5:
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
    x, y = batch()
    optimizer.zero_grad()
    (F.mse_loss(model(x), y) + (extra**2).sum()).backward()
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    old = [p.detach().clone() for p in owned]
    true = norm(p.grad for p in owned)
    optimizer.step()
    if step < 5:
        schedule.step()
    tell(learning_rate=rates[0], **{"learning_rate.1": rates[1]}, learning_rate_scheduled=rates[0],
         grad_global_norm=true, update_norm=norm(p - q for p, q in zip(owned, old)),
         **({"learning_rate.2": 0.5} if step >= 5 else {}))
"""
)

CLOSURE = (
    MODEL
    + """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
for step in range(6):
    x, y = batch()
    first = []

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if not first:
            first.extend([loss.item(), norm(gradients())])
        return loss

    old = [p.detach().clone() for p in model.parameters()]
    optimizer.step(closure)
    moved = norm(p - q for p, q in zip(model.parameters(), old))
    tell(train_loss_raw=first[0], grad_global_norm=first[1], update_norm=moved)
"""
)

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
    tell(train_loss_raw=loss.item(), grad_global_norm=norm(gradients()))
    first.step()
    second.zero_grad()
    loss = F.mse_loss(critic(x), y)
    loss.backward()
    tell(train_loss_raw=loss.item(), grad_global_norm=norm(p.grad for p in critic.parameters()))
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
    tell(train_loss_raw=loss.item(),
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
    tell(train_loss_raw=loss.item(), grad_global_norm=norm(gradients()), steps_seen=step + 1)
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
    tell(update_norm=moved, update_to_weight=moved / norm(old))
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
    tell(train_loss_raw=loss.item(), grad_global_norm=norm(dense))
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
    tell(train_loss_raw=loss.item(), grad_global_norm=norm(gradients()))
    optimizer.step()
"""
)

LOOPS = {
    "accumulation": ACCUMULATION,
    "scaled-accumulation": SCALED_ACCUMULATION,
    "clipped-in-parts": CLIPPED_IN_PARTS,
    "clipped-otherwise": CLIPPED_OTHERWISE,
    "groups": GROUPS,
    "closure": CLOSURE,
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
    assert job.err == "" and job.told == bare.run(LOOPS[name]).told
    assert [frame["step"] for frame in job.frames] == list(range(len(job.told)))
    for frame, row in zip(job.frames, job.told, strict=True):
        for metric, value in row.items():
            assert math.isclose(frame[metric], value, rel_tol=1e-6), (metric, frame, value)


SAMPLED = """
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
updates = __import__("sys").modules["_supervise_probe"]._probe.collectors["updates"]
for step in range(6):
    if step == 2:
        updates.relax()
    optimizer.zero_grad()
    model(torch.randn(2, 256)).pow(2).mean().backward()
    old = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moved = norm(p - q for p, q in zip(model.parameters(), old))
    tell(update_norm=moved, update_to_weight=moved / norm(old))
"""


def test_a_sampled_update_is_close_to_the_exact_one(probed):
    """Where the exact update is too dear, a third of the weights estimates it within 5 %."""
    job = probed.run(SAMPLED)
    for frame, row in zip(job.frames, job.told, strict=True):
        rel = 1e-6 if frame["step"] < 2 else 0.05
        for metric, value in row.items():
            assert math.isclose(frame[metric], value, rel_tol=rel)
    assert job.segment().status()["update_to_weight"] == "sampled"
    exact = [row["update_norm"] for row in job.told]
    assert job.column("update_norm")[5] != pytest.approx(exact[5], rel=1e-6)


TOKENS = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, x):
        return self.head(self.table(x))

model, data = Words(), torch.randint(0, 20, (40, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=4)
rows = iter(loader)
for step in range(10):
    x = next(rows)
    y = x.clone()
    y[:, :step] = -100
    logits = model(x).reshape(-1, 20)
    optimizer.zero_grad()
    if step == 3:
        loss = F.nll_loss(logits.log_softmax(-1), y.reshape(-1))
    else:
        loss = F.cross_entropy(logits, y.reshape(-1))
    with torch.no_grad():
        F.cross_entropy(model(x).reshape(-1, 20), x.reshape(-1))  # evaluation does not count
    loss.backward()
    optimizer.step()
    tell(tokens_per_update=40 - 4 * step)
"""


@pytest.mark.parametrize("late", [False, True])
def test_tokens_are_targets_that_carry_loss(probed, late):
    """Ignored targets and evaluation do not count; rates and sums follow."""
    job = probed.run(TOKENS, late=late)
    told = [row["tokens_per_update"] for row in job.told]
    assert job.column("tokens_per_update") == told
    assert job.column("tokens_seen") == [sum(told[: i + 1]) for i in range(10)]
    assert all(
        frame["tokens_per_sec"] == pytest.approx(frame["tokens_per_update"] / frame["step_time"])
        for frame in job.frames[1:]
    )
    assert len(set(job.column("batch_fingerprint"))) == 10
    for frame in job.frames[1:]:
        parts = ("input", "forward", "backward", "optimizer", "other")
        assert sum(frame[f"{part}_time"] for part in parts) == pytest.approx(frame["step_time"])
